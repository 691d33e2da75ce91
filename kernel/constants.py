"""Constants of a trace, made on the host."""

import mlx.core as mx
import numpy as np

__all__ = ["indices"]


def indices(count: int) -> mx.array:
    """0, 1, 2, ...: `mx.arange` would be an operation of every step, this is an array that it reads.

    Args:
        count: how many.

    Returns:
        int32 [count].
    """
    return mx.array(np.arange(count, dtype=np.int32))
