import mlx.core as mx
import numpy as np

from posttrainllm.kernel.cache import CacheView, attention_mask, insert_row, write_at


def test_a_window_lands_at_each_rows_own_position_and_nowhere_else():
    buffer = mx.zeros((2, 3, 8, 4))
    values = mx.random.normal((2, 3, 2, 4), key=mx.random.key(0))
    written = np.array(write_at(buffer, values, mx.array([1, 4], dtype=mx.int32)))
    expected = np.zeros((2, 3, 8, 4), dtype=np.float32)
    expected[0, :, 1:3], expected[1, :, 4:6] = np.array(values)[0], np.array(values)[1]
    np.testing.assert_array_equal(written, expected)


def test_what_is_out_of_range_is_dropped_and_never_shifts_the_window():
    buffer = mx.ones((2, 1, 6, 1))
    values = mx.array([[[[10.0], [11.0], [12.0], [13.0]]], [[[20.0], [21.0], [22.0], [23.0]]]])
    written = np.array(write_at(buffer, values, mx.array([3, 100], dtype=mx.int32)))[:, 0, :, 0]
    assert written[0, :5].tolist() == [1, 1, 1, 10, 11]  # slot 5 is scratch
    assert written[1, :5].tolist() == [1, 1, 1, 1, 1]


def test_the_mask_admits_the_past_and_the_token_itself():
    mask = np.array(attention_mask(mx.array([2], dtype=mx.int32), 2, 6))[0, 0]
    assert mask.tolist() == [[True] * 3 + [False] * 3, [True] * 4 + [False] * 2]


def test_no_mask_admits_the_scratch_slot():
    mask = np.array(attention_mask(mx.array([4, 50], dtype=mx.int32), 4, 6))
    assert not mask[..., 5].any()
    assert mask[..., :5].any(axis=-1).all()  # and no row is left with nothing to attend to


def test_a_sliding_window_admits_its_last_tokens_only():
    mask = np.array(attention_mask(mx.array([3], dtype=mx.int32), 1, 8, window=2))[0, 0, 0]
    assert np.flatnonzero(mask).tolist() == [2, 3]


def test_the_view_returns_what_it_wrote_and_leaves_the_old_arrays_alone():
    keys, values = mx.zeros((1, 1, 4, 2)), mx.zeros((1, 1, 4, 2))
    view = CacheView(keys, values, mx.array([1], dtype=mx.int32))
    new_keys, new_values = view.update_and_fetch(mx.ones((1, 1, 1, 2)), 2 * mx.ones((1, 1, 1, 2)))
    assert mx.sum(keys).item() == 0
    assert new_keys[0, 0, 1].tolist() == [1, 1]
    assert new_values[0, 0, 1].tolist() == [2, 2]
    assert view.make_mask(1, return_array=False).shape == (1, 1, 1, 4)


def test_a_view_of_a_sliding_layer_masks_by_its_own_window_unless_told_another():
    keys = values = mx.zeros((1, 1, 8, 2))
    view = CacheView(keys, values, mx.array([5], dtype=mx.int32), window=3)
    assert np.flatnonzero(np.array(view.make_mask(1))).tolist() == [3, 4, 5]
    assert np.flatnonzero(np.array(view.make_mask(1, window_size=2))).tolist() == [4, 5]


def test_inserting_a_row_replaces_all_of_it_and_nothing_else():
    buffers = mx.arange(12).reshape(3, 4)
    changed = insert_row(buffers, mx.full((1, 4), -1), 1)
    assert changed.tolist() == [[0, 1, 2, 3], [-1] * 4, [8, 9, 10, 11]]
