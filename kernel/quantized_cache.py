"""Keys and values in 8 or 4 bits: each written entry is quantised alone, in groups along the head.

What a slot holds is a function of the key or value that was written there and of nothing else, so a window, a plain
step and a rewind leave what they would leave in a cache of floats. In a `KVCache` a layer takes three places: packed
words, scales, biases.
"""

import attrs
import mlx.core as mx

from posttrainllm.kernel.cache import attention_mask, write_at
from posttrainllm.kernel.state import KVCache

__all__ = ["ENTRIES", "Packing", "QuantizedCacheView"]

ENTRIES = 3
"""Places of a layer in a `KVCache`: packed words uint32 [B, H, C, D bits / 32], scales and biases [B, H, C, D / G]."""


@attrs.frozen(kw_only=True)
class Packing:
    """How elements are packed."""

    bits: int
    group_size: int
    """G: elements along the head that share a scale and a bias; it divides D."""

    def sizes(self, size: int) -> tuple[int, ...]:
        """What a head of `size` elements takes in each of the places.

        Args:
            size: D.

        Returns:
            Words, scales, biases.
        """
        return (size * self.bits // 32, size // self.group_size, size // self.group_size)


class QuantizedCacheView:
    """One layer's quantised cache in the shape that mlx-lm's attention expects; see `cache.CacheView`.

    mlx-lm's attention takes the packed keys and values where a cache has `bits`.

    Args:
        entries: the layer's places: words, scales, biases, each of keys and of values.
        position: int32 [B], absolute position of the window's first token.
        packing: of the entries.
        window: sliding-window size in tokens where the layer has one of its own, None for full attention.
    """

    def __init__(self, entries: KVCache, position: mx.array, packing: Packing, *, window: int | None = None) -> None:
        self.keys, self.values = (tuple(pair[part] for pair in entries) for part in (0, 1))
        self.offset, self.bits, self.group_size = position, packing.bits, packing.group_size
        self._window = window

    @property
    def entries(self) -> KVCache:
        """The places as they are now."""
        return tuple(zip(self.keys, self.values, strict=True))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Quantise and write the window's keys and values, each [B, H, W, D], and return the whole buffers."""
        self.keys = self._written(self.keys, keys)
        self.values = self._written(self.values, values)
        return self.keys, self.values

    def make_mask(self, width: int, return_array: bool = True, window_size: int | None = None) -> mx.array:
        """Mask of this window, see `attention_mask`; always an array."""
        window = self._window if window_size is None else window_size
        return attention_mask(self.offset, width, self.keys[0].shape[2], window)

    def _written(self, buffers: tuple[mx.array, ...], new: mx.array) -> tuple[mx.array, ...]:
        parts = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        return tuple(write_at(buffer, part, self.offset) for buffer, part in zip(buffers, parts, strict=True))
