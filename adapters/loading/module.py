"""An mlx-lm module as a pure `Forward`."""

from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.kernel.cache import CacheView
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["Model", "load_module", "model_from_module", "module_forward"]


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
    """(H, size of a key, size of a value) for every layer."""
    kv_dtype: mx.Dtype
    variant: str = "module"
    """Which forward it is: "module" (mlx-lm's own) or "cpu_llama". Bits may differ between variants."""

    @property
    def label(self) -> str:
        """Last component of the name, for people."""
        return Path(self.name).name

    def make_kv(self, rows: int, capacity: int) -> KVCache:
        """A cache of zeros: [rows, H, capacity, D] for every layer."""
        return tuple(
            (
                mx.zeros((rows, heads, capacity, key_size), dtype=self.kv_dtype),
                mx.zeros((rows, heads, capacity, value_size), dtype=self.kv_dtype),
            )
            for heads, key_size, value_size in self.kv_shapes
        )


def module_forward(module: Module) -> Forward:
    """Wrap a module whose layers take mlx-lm caches.

    Args:
        module: called as module(tokens, cache=[one view a layer]).

    Returns:
        The pure forward.
    """

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        views = [CacheView(keys, values, position) for keys, values in kv]
        logits = module(tokens, cache=views)
        return logits, tuple((view.keys, view.values) for view in views)

    return forward


def load_module(checkpoint: Checkpoint, dtype: str) -> Module:
    """Build the architecture, read the weights and cast them.

    Args:
        checkpoint: a checked directory.
        dtype: "float32", "float16" or "bfloat16"; quantised weights keep their bits and take it for the rest.

    Returns:
        The module, its weights in memory.

    Raises:
        CheckpointError: weights and config do not fit.
        UnsupportedModelError: mlx-lm does not know the architecture.
    """
    from mlx_lm.utils import load_model  # pulls in transformers: seconds

    try:
        module: Module = load_model(checkpoint.path, lazy=True)[0]
    except Exception as error:  # whatever an architecture makes of a config that it does not expect
        raise _translate(checkpoint.path, checkpoint.config, error) from None
    module.set_dtype(getattr(mx, dtype))
    module.eval()
    mx.eval(module.parameters())  # type: ignore[no-untyped-call] # as MLX declares it
    return module


def model_from_module(module: Module, *, name: str, dtype: str, context: int) -> Model:
    """Find the shapes of a module's cache and logits, and wrap it.

    Args:
        module: an mlx-lm language model.
        name: for messages.
        dtype: of its weights, for reports.
        context: positions it was made for.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: a layer keeps something other than keys and values by position.
    """
    from mlx_lm.models.cache import KVCache as GrowingCache
    from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

    from posttrainllm.adapters.loading.cpu_llama import cpu_llama_forward  # pulls in mlx-lm

    caches: list[Any] = make_prompt_cache(module)
    for index, cache in enumerate(caches):
        if type(cache) not in (GrowingCache, RotatingKVCache):
            raise UnsupportedModelError(
                f"{name}: layer {index} keeps a {type(cache).__name__}, expected keys and values by position: "
                "what it holds cannot be rewound when a proposal is refused"
            )
    logits = module(mx.zeros((1, 1), dtype=mx.int32), cache=caches)  # lazy: only its shape is read
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    fused = cpu_llama_forward(module) if on_cpu else None
    return Model(
        forward=fused or module_forward(module),
        variant="module" if fused is None else "cpu_llama",
        name=name,
        dtype=dtype,
        vocab_size=logits.shape[-1],
        context=context,
        kv_shapes=tuple((c.keys.shape[1], c.keys.shape[3], c.values.shape[3]) for c in caches),
        kv_dtype=caches[0].keys.dtype,
    )


def _translate(path: Path, config: dict[str, Any], error: Exception) -> CheckpointError | UnsupportedModelError:
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and "not supported" in text:
        return UnsupportedModelError(f"{path}: model_type {config.get('model_type')!r} is not one that mlx-lm knows")
    if isinstance(error, TypeError) and "required positional" in text:
        return CheckpointError(f"{path}/config.json: lacks {text.rsplit(':', 1)[-1].strip()}")
    if isinstance(error, KeyError):
        return CheckpointError(f"{path}/config.json: lacks {text}")
    return CheckpointError(f"{path}: weights and config.json do not fit: {text[:300]}")
