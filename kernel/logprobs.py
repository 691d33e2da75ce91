"""Log probabilities for people who ask for them: the target's own, before bias, penalties and temperature.

They are the log-softmax of the raw logits over the ids that may be emitted, as vLLM reports by default, so they say
what the model thinks and not how it was sampled.
"""

import mlx.core as mx

__all__ = ["MOST_ALTERNATIVES", "token_logprobs"]

MOST_ALTERNATIVES = 20
"""Alternatives a position that are reported, where the vocabulary has as many."""


def token_logprobs(logits: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Log probabilities of given ids and of the likeliest ones.

    Args:
        logits: float32 [B, N, V], raw.
        tokens: int32 [B, N]; an id outside [0, V) has log probability -inf.

    Returns:
        logprob float32 [B, N] of the given ids; ids int32 and logprobs float32 [B, N, min(20, V)] of the likeliest, by
        falling logit, equal ones by the lower id.
    """
    vocab = logits.shape[-1]
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)  # [B, N, 1]
    known = (tokens >= 0) & (tokens < vocab)
    index = mx.clip(tokens, 0, vocab - 1)[..., None]  # [B, N, 1]
    own = (mx.take_along_axis(logits, index, axis=-1) - normaliser)[..., 0]  # [B, N, 1] -> [B, N]
    ids = _likeliest(logits, min(MOST_ALTERNATIVES, vocab))
    return mx.where(known, own, -mx.inf), ids, mx.take_along_axis(logits, ids, axis=-1) - normaliser


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """Ids of the largest logits, int32 [B, N, count].

    A partition says nothing about the order of equal values, so it runs over keys that are never equal: the logit's
    bits in an order that integers share, with the id behind them.
    """
    vocab = logits.shape[-1]
    bits = mx.view(logits + 0.0, mx.int32)  # adding 0 makes -0 the 0 that it equals
    ordered = mx.where(bits < 0, mx.bitwise_xor(bits, 0x7FFF_FFFF), bits).astype(mx.int64)
    low = vocab - 1 - mx.arange(vocab)
    keys = mx.left_shift(ordered, mx.array(32, dtype=mx.int64)) + low.astype(mx.int64)
    largest = mx.partition(keys, vocab - count, axis=-1)[..., vocab - count :]  # [B, N, V] -> [B, N, count]
    largest = -mx.sort(-largest, axis=-1)
    return vocab - 1 - mx.bitwise_and(largest, mx.array(0xFFFF_FFFF, dtype=mx.int64)).astype(mx.int32)
