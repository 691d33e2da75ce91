"""Quantised keys and values under mlx-lm's modules: what their caches look like, and the forward over them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx

from posttrainllm.kernel.errors import UnsupportedModelError
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.quantized_cache import ENTRIES, Packing, QuantizedCacheView
from posttrainllm.kernel.state import KVCache

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["packed_forward", "packed_shapes"]

_Shapes: TypeAlias = tuple[tuple[int, int, int], ...]


def packed_forward(module: "Module", windows: Sequence[int | None], packing: Packing) -> Forward:
    """Wrap a module whose layers take mlx-lm's quantised caches.

    Args:
        module: called as module(tokens, cache=[one view a layer]).
        windows: see `module_forward`.
        packing: of keys and values.

    Returns:
        The pure forward.
    """

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        views = [
            QuantizedCacheView(kv[ENTRIES * index : ENTRIES * (index + 1)], position, packing, window=window)
            for index, window in enumerate(windows)
        ]
        logits = module(tokens, cache=views)
        return logits, tuple(entry for view in views for entry in view.entries)

    return forward


def packed_shapes(name: str, shapes: _Shapes, packing: Packing) -> _Shapes:
    """What the layers' places hold of each slot.

    Args:
        name: of the model, for the message.
        shapes: (H, size of a key, size of a value) for every layer.
        packing: of keys and values.

    Returns:
        The same for the three places of every layer.

    Raises:
        UnsupportedModelError: the groups do not divide a head.
    """
    uneven = [size for _, *sizes in shapes for size in sizes if size % packing.group_size]
    if uneven:
        raise UnsupportedModelError(
            f"{name}: --kv-group-size: got {packing.group_size}, expected one that divides the head's {uneven[0]}"
        )
    return tuple(
        (heads, key, value)
        for heads, keys, values in shapes
        for key, value in zip(packing.sizes(keys), packing.sizes(values), strict=True)
    )
