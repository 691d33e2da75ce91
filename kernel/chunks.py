"""A chunk of a row's cache, cut out to be kept and put back where it was: the bits are those of the write."""

from collections.abc import Sequence

import mlx.core as mx

from posttrainllm.kernel.state import KVCache

__all__ = ["cut_chunk", "join_chunks"]


def cut_chunk(kv: KVCache, start: int, size: int) -> KVCache:
    """Copy the slots [start, start + size) of every layer.

    Two halves joined, which is always a copy: a slice may share the buffer that it was cut from, which could then
    neither be freed nor reused. (A gather copies, too, in four times the time on a CPU.)

    Args:
        kv: [B, H, C, D] for every layer.
        start: the first slot, 0 or more.
        size: P; start + P is C at most, checked by the caller.

    Returns:
        [B, H, P, D] for every layer.
    """
    middle, end = start + size // 2, start + size

    def cut(buffer: mx.array) -> mx.array:
        return mx.concatenate([buffer[:, :, start:middle], buffer[:, :, middle:end]], axis=2)  # [B, H, P, D]

    return tuple((cut(keys), cut(values)) for keys, values in kv)


def join_chunks(chunks: Sequence[KVCache], kv: KVCache) -> KVCache:
    """Put chunks at the front of a cache, one behind the other.

    Args:
        chunks: [B, H, P, D] for every layer, of consecutive positions from 0 on; fewer than fill the cache.
        kv: [B, H, C, D] for every layer; its entries behind the chunks stay.

    Returns:
        [B, H, C, D] for every layer; the same cache where there is no chunk.
    """
    if not chunks:
        return kv

    def joined(layer: int, part: int) -> mx.array:
        buffer, blocks = kv[layer][part], [chunk[layer][part] for chunk in chunks]
        filled = sum(block.shape[2] for block in blocks)
        return mx.concatenate([*blocks, buffer[:, :, filled:]], axis=2)  # [B, H, C, D]

    return tuple((joined(layer, 0), joined(layer, 1)) for layer in range(len(kv)))
