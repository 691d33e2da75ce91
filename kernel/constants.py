"""Constants of a trace, made on the host."""

import mlx.core as mx

__all__ = ["indices"]


def indices(count: int) -> mx.array:
    """0, 1, 2, ...: `mx.arange` would be an operation of every step, this is an array that it reads.

    Args:
        count: how many.

    Returns:
        int32 [count].
    """
    return mx.array(list(range(count)), dtype=mx.int32)
