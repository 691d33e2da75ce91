"""Constants of a trace, made on the host."""

import mlx.core as mx
import numpy as np

__all__ = ["indices", "one_row_as_scalar"]


def indices(count: int) -> mx.array:
    """0, 1, 2, ...: `mx.arange` would be an operation of every step, this is an array that it reads.

    Args:
        count: how many.

    Returns:
        int32 [count].
    """
    return mx.array(np.arange(count, dtype=np.int32))


def one_row_as_scalar(values: mx.array) -> mx.array:
    """One value a row, as a scalar where there is one row: MLX vectorises a fused operation only if nothing in it
    is broadcast but scalars.

    Args:
        values: [B, 1, ...].

    Returns:
        The same values, [] if B is 1.
    """
    return values.reshape(()) if values.size == 1 else values
