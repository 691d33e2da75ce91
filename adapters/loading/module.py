"""An mlx-lm module as a pure `Forward`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
from mlx.utils import tree_reduce

from posttrainllm.adapters.loading.families import check_family, family_forward, family_of
from posttrainllm.adapters.loading.layer_caches import LayerCaches, LayerViews, read_caches
from posttrainllm.adapters.loading.packed import packed_forward, packed_shapes
from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.cache import CacheView
from posttrainllm.kernel.compiled import compile_prefill
from posttrainllm.kernel.errors import UnsupportedModelError
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.quantized_cache import ENTRIES, Packing
from posttrainllm.kernel.state import KVCache

if TYPE_CHECKING:  # a model that needs no mlx-lm does not load MLX's layers either
    from mlx.nn.layers.base import Module

__all__ = ["Model", "model_from_module", "module_forward"]


@attrs.frozen(eq=False, kw_only=True)
class Model:
    """A loaded model: a pure forward and the shapes that it needs."""

    forward: Forward = attrs.field(repr=False)
    name: str
    dtype: str
    vocab_size: int
    """Rows of its logits, padding included."""
    context: int
    kv_shapes: tuple[tuple[int, int, int], ...] = attrs.field(repr=False)
    """(H, size of a key, size of a value) for every pair of its caches, which is mostly one a layer, or for each of a
    layer's three places where they are quantised."""
    kv_dtype: mx.Dtype
    """Of keys and values; of their scales where they are quantised."""
    packing: Packing | None = None
    """How keys and values are quantised; None where they are not."""
    variant: str = "module"
    """Which forward it is: "module" (mlx-lm's own; with quantised keys and values "module-kv8g64" and so on) or one of
    variants.py. Bits may differ between them."""
    copies_cache: bool = False
    """Whether its forward reads the cache beside the write, which then copies it."""
    windows: tuple[int | None, ...] = ()
    """The sliding window of every pair, None for full attention."""
    family: str = "model"
    """mlx-lm's name of the architecture."""
    module_loader: "Callable[[], Module] | None" = attrs.field(default=None, repr=False)
    """Of `module`; None where mlx-lm has none."""
    weight_bytes: int = 0
    """Of all parameters as loaded."""
    adapter: str | None = None
    """The adapter that it was loaded with, as it was given."""

    @property
    def module(self) -> "Module | None":
        """mlx-lm's own, for its loops beside ours, loaded when it is first asked for; None where there is none."""
        return None if self.module_loader is None else self.module_loader()

    @property
    def label(self) -> str:
        """Last component of the name, for people."""
        return Path(self.name).name

    def kv_bytes(self, capacity: int) -> int:
        """Bytes of one row's cache of `capacity` slots."""
        return sum(
            heads * capacity * (key + value) * dtype.size
            for (heads, key, value), dtype in zip(self.kv_shapes, self._kv_dtypes, strict=True)
        )

    def make_kv(self, rows: int, capacity: int) -> KVCache:
        """A cache of zeros: [rows, H, capacity, D] for every layer."""
        return tuple(
            (
                mx.zeros((rows, heads, capacity, key_size), dtype=dtype),
                mx.zeros((rows, heads, capacity, value_size), dtype=dtype),
            )
            for (heads, key_size, value_size), dtype in zip(self.kv_shapes, self._kv_dtypes, strict=True)
        )

    @property
    def _kv_dtypes(self) -> tuple[mx.Dtype, ...]:
        """Of each of the shapes."""
        if self.packing is None:
            return (self.kv_dtype,) * len(self.kv_shapes)
        return (mx.uint32, self.kv_dtype, self.kv_dtype) * (len(self.kv_shapes) // ENTRIES)


def module_forward(module: "Module", caches: LayerCaches, packing: Packing | None = None) -> Forward:
    """Wrap a module whose layers take mlx-lm caches.

    Args:
        module: called as module(tokens, cache=[its list of views]), or by a forward of `families` where it has one.
        caches: where it keeps keys and values.
        packing: of quantised keys and values; None for floats.

    Returns:
        The pure forward.
    """
    if packing is not None:
        return packed_forward(module, caches.windows, packing)
    view_class = _view_class(module)
    run = family_forward(family_of(module)) or _call

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        entries, views = caches.views(kv, position, view_class)
        logits = run(module, tokens, entries)
        return logits, tuple((view.keys, view.values) for view in views)

    return forward


def _call(module: "Module", tokens: mx.array, views: LayerViews) -> mx.array:
    logits: mx.array = module(tokens, cache=views)
    return logits


def model_from_module(
    module: "Module", *, name: str, dtype: str, context: int, packing: Packing | None = None
) -> Model:
    """Find the shapes of a module's cache and logits, and wrap it.

    Args:
        module: an mlx-lm language model.
        name: for messages.
        dtype: of its weights, for reports.
        context: positions it was made for.
        packing: quantise keys and values so; None keeps them as they are computed.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values by position, the forward depends
            on the value of a position and cannot be compiled, it cannot read quantised keys and values, or mlx-lm's
            module does not work, here or anywhere.
    """
    family = family_of(module)
    check_family(module, name=name)
    caches, vocab_size = read_caches(module, name=name, dtype=dtype)
    if packing is not None and (caches.listed or family_forward(family) is not None):
        raise UnsupportedModelError(f"{name}: --kv-bits: got {packing.bits} for {family}, expected none")
    model = Model(
        forward=module_forward(module, caches, packing),
        name=name,
        dtype=dtype,
        vocab_size=vocab_size,
        context=context,
        kv_shapes=caches.kv_shapes,
        kv_dtype=caches.kv_dtype,
        windows=caches.windows,
        family=family,
        module_loader=lambda: module,
        weight_bytes=tree_reduce(
            lambda total, array: total + array.nbytes,
            module.parameters(),  # type: ignore[no-untyped-call] # as MLX declares it
            0,
        ),
    )
    if packing is not None:
        variant = f"module-kv{packing.bits}g{packing.group_size}"
        packed = packed_shapes(name, caches.kv_shapes, packing)
        model = attrs.evolve(model, kv_shapes=packed, packing=packing, variant=variant)
    _check_traceable(model, "" if packing is None else " with quantised keys and values (--kv-bits)")
    return model


class _GroupedView(CacheView):
    """For layers whose scores have an axis for the query heads of a key head: [B, H, G, W, C]."""

    def make_mask(self, width: int, return_array: bool = True, window_size: int | None = None) -> mx.array:
        return super().make_mask(width, return_array, window_size)[:, :, None]  # [B, 1, W, C] -> [B, 1, 1, W, C]


def _view_class(module: "Module") -> type[CacheView]:
    """Gemma-2 computes attention itself, and adds its mask to such scores."""
    from mlx_lm.models import gemma2

    grouped = isinstance(module, gemma2.Model) and module.layers[0].self_attn.repeats > 1
    return _GroupedView if grouped else CacheView


def _check_traceable(model: Model, what: str) -> None:
    """Trace the forward once: one that reads the value of a position cannot be a pure function of arrays."""
    rows = 11  # a count that no axis has by chance, so that no mask lines up with the wrong one
    try:
        compile_prefill(model.forward)(
            mx.zeros((rows, 2), dtype=mx.int32), model.make_kv(rows, 8), mx.zeros((rows,), dtype=mx.int32)
        )
    except (AttributeError, ValueError, TypeError, RuntimeError) as error:
        text = collapsed(error, 200)
        raise UnsupportedModelError(f"{model.name}: its forward cannot be compiled{what}: {text}") from None
