"""From directories on disk to pure forwards: checkpoints, tokenizers, pairs, BLAS, memory."""
