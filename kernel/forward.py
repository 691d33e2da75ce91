"""What the step asks of a model."""

from typing import Protocol, runtime_checkable

import mlx.core as mx

from posttrainllm.kernel.state import KVCache

__all__ = ["BoundedForward", "Forward", "bounded"]


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


@runtime_checkable
class BoundedForward(Forward, Protocol):
    """A forward that can leave the cache's end out of its attention without changing a bit."""

    def within(self, live: int) -> Forward:
        """The same forward for windows that end in the first `live` slots.

        Args:
            live: L, at most C - 1; position + W may not be more in a row whose output is read.

        Returns:
            The forward, which looks at no slot behind them.
        """
        ...


def bounded(forward: Forward, live: int | None) -> Forward:
    """The cheapest forward for windows that end in the first `live` slots.

    Args:
        forward: any.
        live: None where that is not known.

    Returns:
        The forward itself where it cannot be bounded.
    """
    return forward.within(live) if live is not None and isinstance(forward, BoundedForward) else forward
