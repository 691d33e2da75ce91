"""What the step asks of a model."""

from typing import Protocol

import mlx.core as mx

from posttrainllm.kernel.state import KVCache

__all__ = ["Forward"]


class Forward(Protocol):
    """A model as a pure function: the same arguments give the same bits, and nothing else is read or written.

    Weights are constants of whatever is compiled around it: load, cast and adapt them before tracing.
    """

    def __call__(self, tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        """Run a window of W tokens a row.

        Args:
            tokens: int32 [B, W].
            kv: the cache, valid for positions [0, position) of each row.
            position: int32 [B], absolute position of each window's first token.

        Returns:
            logits [B, W, V] and the cache with the window written at `position`.
        """
        ...
