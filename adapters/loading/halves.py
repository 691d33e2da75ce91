"""bfloat16 weights in float32, kept a second time in half the bytes for the products of few rows.

Bits stay what they are: cblas_halves.h says how. It pays where a step waits for memory, which is everywhere on a CPU,
and costs half of the weights' memory again.
"""

import ctypes
import weakref

import mlx.core as mx
import numpy as np

from posttrainllm.adapters.loading.blas import loaded_shim

__all__ = ["keep_halves"]

_MOST_BYTES = 1 << 30  # of all models in the process; what our memory forecast leaves out stays small
_kept_bytes = 0


def keep_halves(owner: object, matrix: mx.array) -> bool:
    """Keep the upper halves of a matrix for as long as its owner lives.

    Args:
        owner: whoever multiplies with it; when it is collected, the halves are dropped.
        matrix: [out, in], evaluated; of any dtype.

    Returns:
        Whether they are kept: not without our products, for values that bfloat16 does not hold, or beyond 1 GiB.
    """
    global _kept_bytes
    shim, rows = loaded_shim(), matrix.shape[0]
    if shim is None or matrix.dtype != mx.float32 or _kept_bytes + matrix.size * 2 > _MOST_BYTES:
        return False
    address = np.array(matrix, copy=False).ctypes.data  # the buffer itself, or an error
    if not shim.shim_keep(ctypes.c_void_p(address), ctypes.c_long(rows), ctypes.c_long(matrix.shape[1])):
        return False
    _kept_bytes += matrix.size * 2
    # the matrix is an argument, so that its memory holds nothing else before it is dropped
    weakref.finalize(owner, _drop, address, matrix).atexit = False  # at exit a product may still run
    return True


def _drop(address: int, matrix: mx.array) -> None:
    global _kept_bytes
    shim = loaded_shim()
    assert shim is not None, "it was there when the matrix was kept"
    shim.shim_drop(ctypes.c_void_p(address))
    _kept_bytes -= matrix.size * 2
