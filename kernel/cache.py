"""The key/value cache: the only writes, the mask, and the view that models see.

Capacity is static and masks go by absolute position, so a token's logits are a function of its own history and of the
shapes. Slot C - 1 is scratch: no mask admits it, and every write that would fall outside lands there.
"""

import mlx.core as mx

from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.state import DecodeState, KVCache

__all__ = [
    "CacheView",
    "attention_mask",
    "insert_request",
    "insert_row",
    "window_slots",
    "write_at",
    "write_slots",
]


def write_at(buffer: mx.array, values: mx.array, position: mx.array) -> mx.array:
    """Write a window of every row at its own position; what is out of range is dropped.

    Args:
        buffer: [B, H, C, D].
        values: [B, H, W, D], of the buffer's dtype.
        position: int32 [B], absolute position of each window's first entry, 0 or more.

    Returns:
        [B, H, C, D].
    """
    return write_slots(buffer, values, window_slots(position, values.shape, buffer.shape[2]))


def window_slots(position: mx.array, shape: tuple[int, ...], capacity: int) -> mx.array:
    """Where a window's entries go, for `write_slots`: made once where several layers write the same window.

    Each index is clamped on its own. Clamping the start of the block instead would shift the whole window over valid
    entries.

    Args:
        position: int32 [B], absolute position of each window's first entry, 0 or more.
        shape: B, H, W, D of what is written.
        capacity: C.

    Returns:
        int32 [B, H, W, D]; out of range becomes C - 1.
    """
    index = mx.minimum(position[:, None] + indices(shape[2]), capacity - 1)  # [B, W]
    return mx.broadcast_to(index[:, None, :, None], shape)  # [B, W] -> [B, H, W, D]


def write_slots(buffer: mx.array, values: mx.array, slots: mx.array) -> mx.array:
    """Write a window into the slots that `window_slots` gave; MLX checks no index of a scatter, so no others may be.

    Args:
        buffer: [B, H, C, D].
        values: [B, H, W, D], of the buffer's dtype.
        slots: int32 [B, H, W, D].

    Returns:
        [B, H, C, D].
    """
    return mx.put_along_axis(buffer, slots, values.astype(buffer.dtype), axis=2)


def attention_mask(position: mx.array, width: int, capacity: int, window: int | None = None) -> mx.array:
    """Which slots each token of a window may attend to.

    Args:
        position: int32 [B], absolute position of each window's first token.
        width: W.
        capacity: C.
        window: sliding-window size in tokens, None for full attention.

    Returns:
        bool [B, 1, W, C], True where the slot is admitted.
    """
    query = (position[:, None] + indices(width))[:, None, :, None]  # [B, W] -> [B, 1, W, 1]
    slot = indices(capacity)[None, None, None, :]  # [1, 1, 1, C]
    admitted = (slot <= query) & (slot < capacity - 1)
    if window is not None:
        admitted = admitted & (slot > query - window)
    return admitted


class CacheView:
    """One layer's cache in the shape that mlx-lm's modules expect, holding arrays and never writing to them.

    It lives for one forward: `update_and_fetch` replaces what it holds, and the caller takes `keys` and `values` back.

    Args:
        keys: [B, H, C, D].
        values: [B, H, C, D].
        position: int32 [B], absolute position of the window's first token.
        window: sliding-window size in tokens where the layer has one of its own, None for full attention.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        position: mx.array,
        *,
        window: int | None = None,
    ) -> None:
        self.keys, self.values, self.offset, self._window = keys, values, position, window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the window's keys and values, each [B, H, W, D], and return the whole buffers."""
        self.keys = write_at(self.keys, keys, self.offset)
        self.values = write_at(self.values, values, self.offset)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The whole buffers, for layers that attend to what another one has written."""
        return self.keys, self.values

    def make_mask(self, width: int, return_array: bool = True, window_size: int | None = None) -> mx.array:
        """Mask of this window, see `attention_mask`; always an array."""
        window = self._window if window_size is None else window_size
        return attention_mask(self.offset, width, self.keys.shape[2], window)


def insert_row(buffers: mx.array, row: mx.array, index: int) -> mx.array:
    """Replace the whole of one row, so that nothing of the row's last request stays behind.

    Args:
        buffers: [B, ...].
        row: [1, ...], of the same dtype.
        index: which row, 0 <= index < B, checked by the caller.

    Returns:
        [B, ...].
    """
    if buffers.shape[0] == 1:
        return row
    chosen = (indices(buffers.shape[0]) == index).reshape(-1, *([1] * (buffers.ndim - 1)))  # [B] -> [B, 1, ...]
    return mx.where(chosen, row, buffers)


def insert_request(state: DecodeState, request: DecodeState, index: int) -> DecodeState:
    """Put a request in a row of a batch.

    Args:
        state: B rows.
        request: the same shapes with one row, its prompt prefilled.
        index: which row, 0 <= index < B, checked by the caller.

    Returns:
        B rows, of which only that one changed.
    """

    def inserted(name: str) -> mx.array:
        row: mx.array = getattr(request, name)
        return insert_row(getattr(state, name), row, index)

    def inserted_kv(kv: KVCache, row_kv: KVCache) -> KVCache:
        return tuple(
            (insert_row(keys, row_keys, index), insert_row(values, row_values, index))
            for (keys, values), (row_keys, row_values) in zip(kv, row_kv, strict=True)
        )

    return DecodeState(
        tokens=inserted("tokens"),
        length=inserted("length"),
        limit=inserted("limit"),
        target_kv=inserted_kv(state.target_kv, request.target_kv),
        draft_kv=inserted_kv(state.draft_kv, request.draft_kv),
        key=inserted("key"),
    )
