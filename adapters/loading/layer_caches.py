"""mlx-lm's list of caches, and the flat list of pairs of keys and values that a step carries for it."""

from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import mlx.core as mx

from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.cache import CacheView
from posttrainllm.kernel.errors import UnsupportedModelError
from posttrainllm.kernel.state import KVCache

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["LayerCaches", "LayerViews", "flat_views", "read_caches"]

LayerViews: TypeAlias = "list[CacheView | tuple[CacheView, ...]]"
"""What a module is given as its list of caches: a view for every entry, or several where the entry is a list itself."""


@attrs.frozen(kw_only=True)
class LayerCaches:
    """Where a module keeps pairs of keys and values."""

    sizes: tuple[int | None, ...]
    """For every entry of the module's list how many pairs it lists itself, None where it is a pair."""
    windows: tuple[int | None, ...]
    """For every pair the sliding window that mlx-lm's cache would keep, None where it keeps everything."""
    kv_shapes: tuple[tuple[int, int, int], ...]
    """(H, size of a key, size of a value) for every pair."""
    kv_dtype: mx.Dtype

    @property
    def listed(self) -> bool:
        """Whether an entry of the module's list is a list."""
        return any(size is not None for size in self.sizes)

    def views(self, kv: KVCache, position: mx.array, view_class: type[CacheView]) -> tuple[LayerViews, list[CacheView]]:
        """Views of a cache.

        Args:
            kv: a pair [B, H, C, D] for each of ours.
            position: int32 [B].
            view_class: of the views.

        Returns:
            The module's list, and the same views flat, in the order of the pairs.
        """
        flat = [
            view_class(keys, values, position, window=window)
            for (keys, values), window in zip(kv, self.windows, strict=True)
        ]
        entries: LayerViews = []
        place = 0
        for size in self.sizes:
            count = 1 if size is None else size
            entries.append(flat[place] if size is None else tuple(flat[place : place + count]))
            place += count
        return entries, flat


def flat_views(entries: LayerViews) -> list[CacheView]:
    """What a module of a known family is given: no entry of its list is a list."""
    views = [entry for entry in entries if not isinstance(entry, tuple)]
    assert len(views) == len(entries)
    return views


def read_caches(module: "Module", *, name: str, dtype: str) -> tuple[LayerCaches, int]:
    """Find out where a module keeps what, by a forward of one token.

    Args:
        module: an mlx-lm language model.
        name: of the model, for messages.
        dtype: of its weights, for messages.

    Returns:
        The description, and V, the rows of its logits.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values by position, or cannot run here.
    """
    from mlx_lm.models.cache import CacheList, make_prompt_cache

    caches: list[Any] = make_prompt_cache(module)
    lists = [cache.caches if type(cache) is CacheList else None for cache in caches]
    pairs = [
        (index, pair)
        for index, (cache, listed) in enumerate(zip(caches, lists, strict=True))
        for pair in (listed if listed is not None else (cache,))
    ]
    windows = tuple(_window(module, index, len(caches), pair, name) for index, pair in pairs)
    try:
        logits = module(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        mx.eval(logits)  # what a backend lacks, such as experts of 16 bits on a CPU, it says no sooner
    except RuntimeError as error:
        raise UnsupportedModelError(f"{name}: {_lacking(str(error), dtype)}") from None
    found = LayerCaches(
        sizes=tuple(None if listed is None else len(listed) for listed in lists),
        windows=windows,
        kv_shapes=tuple((pair.keys.shape[1], pair.keys.shape[3], pair.values.shape[3]) for _, pair in pairs),
        # of layers that differ the one that holds all of them without loss
        kv_dtype=max((pair.keys.dtype for _, pair in pairs), key=lambda dtype: dtype.size),
    )
    return found, logits.shape[-1]


def _lacking(problem: str, dtype: str) -> str:
    if "No Metal" in problem:
        return "its layers are kernels for Metal, which is not here"
    hint = "" if dtype == "float32" else "; --dtype float32 may"
    return f"its forward does not run here in {dtype}: {collapsed(problem, 200).rstrip('.')}{hint}"


def _window(module: "Module", index: int, count: int, cache: Any, name: str) -> int | None:
    """The window of a pair that mlx-lm gives this cache; what rewinding by length cannot undo is refused."""
    from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache
    from mlx_lm.models.cache import KVCache as GrowingCache

    # the whole history is kept here, so that a mask can do what rotating does, or forgetting a chunk
    if type(cache) in (GrowingCache, ChunkedKVCache):
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    kept = f"{type(cache).__name__} with keep={cache.keep}" if type(cache) is RotatingKVCache else type(cache).__name__
    layers = getattr(module, "layers", ())
    where = f" in a {type(layers[index]).__name__}" if len(layers) == count else ""
    raise UnsupportedModelError(
        f"{name}: layer {index} has the cache {kept}{where}, expected keys and values by position: "
        "what it holds cannot be rewound when a proposal is refused"
    )
