"""bfloat16 weights kept in half the bytes: read in place of the matrix, the same bits, gone with their owner."""

import ctypes
import gc

import mlx.core as mx
import numpy as np
import pytest

from posttrainllm.adapters.loading import halves
from posttrainllm.adapters.loading.blas import loaded_shim
from posttrainllm.adapters.loading.halves import keep_halves
from posttrainllm.adapters.loading.pair import load_pair

pytestmark = pytest.mark.skipif(loaded_shim() is None, reason="another BLAS multiplies here")


class Owner:
    """Whoever holds a matrix."""


def matrix_of(rows, length, *, seed=0, dtype=mx.bfloat16):
    values = np.random.default_rng(seed).standard_normal((rows, length)).astype(np.float32)
    matrix = mx.array(values).astype(dtype).astype(mx.float32)
    mx.eval(matrix)
    return matrix


def rows_of(count, length):
    return mx.array(np.random.default_rng(count).standard_normal((count, length)).astype(np.float32))


def erase(matrix):
    """Overwrite what the matrix holds behind MLX's back: only the halves still know."""
    ctypes.memset(np.asarray(memoryview(matrix)).ctypes.data, 0, matrix.nbytes)


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (4, 8), (67, 67), (64, 300), (384, 1000), (1100, 384)])
def test_a_product_has_the_same_bits_with_halves_and_without(rows, length):
    matrix, owner = matrix_of(rows, length), Owner()
    windows = [rows_of(count, length) for count in range(1, 20)]
    without = [x @ matrix.T for x in windows]
    mx.eval(without)
    assert keep_halves(owner, matrix)
    for x, expected in zip(windows, without, strict=True):
        assert mx.array_equal(x @ matrix.T, expected), x.shape


def test_halves_are_read_by_few_rows_and_dropped_with_their_owner():
    matrix, owner, before = matrix_of(64, 128), Owner(), halves._kept_bytes
    few, many = rows_of(16, 128), rows_of(17, 128)
    expected = few @ matrix.T
    mx.eval(expected, few, many)
    assert keep_halves(owner, matrix)
    assert halves._kept_bytes == before + matrix.size * 2
    erase(matrix)
    assert mx.array_equal(few @ matrix.T, expected)
    assert not mx.any(many @ matrix.T)
    del owner
    gc.collect()
    assert halves._kept_bytes == before
    assert not mx.any(few @ matrix.T)


def test_a_part_of_a_matrix_is_known_by_its_own_address():
    matrix, owner = matrix_of(64, 128), Owner()
    part = matrix[16:48]
    mx.eval(part)
    x = rows_of(3, 128)
    expected = x @ part.T
    mx.eval(expected)
    assert keep_halves(owner, part)
    erase(matrix)
    assert mx.array_equal(x @ part.T, expected)
    assert not mx.any(x @ matrix.T)


def test_what_bfloat16_does_not_hold_is_not_kept():
    exact = np.ones((4, 16), dtype=np.float32)
    one_off = exact.copy()
    one_off[3, 15] = np.nextafter(np.float32(1), np.float32(2))
    assert not keep_halves(Owner(), mx.array(one_off))
    assert not keep_halves(Owner(), matrix_of(4, 16).astype(mx.bfloat16))
    assert keep_halves(Owner(), mx.array(exact))


def test_beyond_the_bound_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(halves, "_MOST_BYTES", halves._kept_bytes + 100)
    assert not keep_halves(Owner(), matrix_of(8, 8))


def test_a_loaded_models_products_are_kept():
    """Target and draft: every matrix but the embedding's other use, a lookup; 2 bytes a weight."""
    gc.collect()  # whatever other tests left is dropped before it is counted
    before = halves._kept_bytes
    pair = load_pair()
    if pair.target.variant != "cpu" or pair.target.dtype != "float32":
        pytest.skip("the forward in use here keeps none")
    weights = pair.target.weight_bytes + pair.draft.weight_bytes
    assert 0.99 * weights / 2 < halves._kept_bytes - before <= weights / 2
