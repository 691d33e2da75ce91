"""Which forward computes a model: the one place where it is chosen.

A variant is a way to compute the same mathematics, and bits may differ between two of them, so its name is part of
what a verdict of the gate and a trace hold for. `--forward module` takes mlx-lm's own module everywhere.
"""

from collections.abc import Callable
from functools import cache

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.adapter import Adapter
from posttrainllm.adapters.loading.checkpoint import Checkpoint, readable
from posttrainllm.adapters.loading.cpu_llama import briefly, cpu_llama_forward
from posttrainllm.adapters.loading.cuda_llama import cuda_llama_forward, one_buffer, unsupported
from posttrainllm.adapters.loading.fused_llama import fused_llama_forward
from posttrainllm.adapters.loading.gguf_model import GgufModel
from posttrainllm.adapters.loading.gguf_reader import gguf_arrays
from posttrainllm.adapters.loading.gpt import GptWeights
from posttrainllm.adapters.loading.gpt_forward import gpt_forward
from posttrainllm.adapters.loading.gpt_reader import read_exported
from posttrainllm.adapters.loading.llama import LlamaShape, LlamaWeights
from posttrainllm.adapters.loading.llama_config import read_config
from posttrainllm.adapters.loading.llama_reader import fuse_llama, read_llama
from posttrainllm.adapters.loading.module import Model, model_from_module
from posttrainllm.adapters.loading.module_loader import load_module
from posttrainllm.adapters.loading.nvrtc import gpu
from posttrainllm.adapters.loading.tinygpt_reader import read_tinygpt
from posttrainllm.adapters.runtime import LOGGER, Runtime, start
from posttrainllm.adapters.user_cache import user_cache
from posttrainllm.kernel.errors import BackendError, UnsupportedModelError
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.quantized_cache import Packing

__all__ = ["drafting", "load_model", "model_from_weights"]


def _a_head_each(shape: LlamaShape) -> tuple[tuple[int, int, int], ...]:
    """Keys and values [B, H, C, D] in every layer."""
    return ((shape.kv_heads, shape.head_size, shape.head_size),) * shape.layers


@attrs.frozen(kw_only=True)
class _Variant:
    """A forward of ours and where it is taken."""

    name: str
    forward: Callable[[LlamaWeights, Runtime], Forward | None]
    """None where it cannot run this model on this machine."""
    kv_shapes: Callable[[LlamaShape], tuple[tuple[int, int, int], ...]] = _a_head_each
    copies_cache: bool = False


def _cpu(weights: LlamaWeights, runtime: Runtime) -> Forward | None:
    """Many small operations, fused by the C++ compiler: it pays where MLX's own `exp` is scalar."""
    return cpu_llama_forward(weights) if runtime.scalar_exp and runtime.compiled else None


def _cuda(weights: LlamaWeights, runtime: Runtime) -> Forward | None:
    if runtime.device != "gpu" or not mx.cuda.is_available():
        return None
    device = gpu()
    reason = unsupported(weights, device)
    if device is None or reason is not None:
        LOGGER.debug("no CUDA forward for this model: %s", reason)
        return None
    try:
        return cuda_llama_forward(weights, device, user_cache("kernels"))
    except BackendError as error:
        LOGGER.warning("%s; MLX's own operations are used, and are slower", error)
        return None


# the first that fits is taken
_VARIANTS = (
    _Variant(name="cpu", forward=_cpu),
    _Variant(name="cuda", forward=_cuda, kv_shapes=one_buffer, copies_cache=True),
    _Variant(name="fused", forward=lambda weights, runtime: fused_llama_forward(weights)),
)


def load_model(
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: str,
    forward: str = "auto",
    adapter: Adapter | None = None,
    packing: Packing | None = None,
) -> Model:
    """Load a checkpoint and choose its forward.

    Args:
        checkpoint: a checked directory or file.
        name: for messages, and to find it again.
        dtype: "float32", "float16" or "bfloat16".
        forward: "auto" takes a forward of ours where there is one for the model, "module" mlx-lm's module.
        adapter: fused into dense weights of a forward of ours; on mlx-lm's modules it stays beside the weights.
        packing: of quantised keys and values, which mlx-lm's modules alone read; None for floats.

    Returns:
        The model, its weights in memory.

    Raises:
        CheckpointError: weights and config do not fit, or the adapter does not.
        UnsupportedModelError: nothing here can run the architecture, or run it so.
    """
    if checkpoint.gguf is not None and checkpoint.quantized and start().device == "cpu":
        LOGGER.warning(
            "%s: packed weights are slow on a CPU; `posttrainllm convert FILE --out DIR --dtype float32` unpacks them",
            checkpoint.path,
        )
    model = _load_model(checkpoint, name, dtype, "module" if packing is not None else forward, adapter, packing)
    return model if adapter is None else attrs.evolve(model, adapter=adapter.name)


def _load_model(
    checkpoint: Checkpoint, name: str, dtype: str, forward: str, adapter: Adapter | None, packing: Packing | None
) -> Model:
    context = checkpoint.context or 0
    if checkpoint.native is not None:
        _refuse_changes(checkpoint, "a .tinygpt file", adapter, packing)
    if checkpoint.native is not None and forward != "auto":
        raise UnsupportedModelError(f"{checkpoint.path}: --forward: got {forward} for a .tinygpt file, expected auto")
    if forward == "auto":
        with readable(checkpoint.path, "its weights cannot be read"):
            if checkpoint.native is not None:
                return _gpt_model(read_tinygpt(checkpoint.native, dtype), name=name, dtype=dtype)
            exported = read_exported(checkpoint, dtype)
            if exported is not None:
                _refuse_changes(checkpoint, "an exported .tinygpt file", adapter, packing)
                return _gpt_model(exported, name=name, dtype=dtype)
            if checkpoint.gguf is not None:
                _refuse_changes(checkpoint, "a GGUF file", adapter, None)
                weights = _read_gguf(checkpoint.gguf, dtype)
            else:
                weights = read_llama(checkpoint, dtype, adapter)
        if weights is not None:
            model = model_from_weights(weights, name=name, dtype=dtype, context=context)
            return attrs.evolve(model, module_loader=cache(lambda: load_module(checkpoint, dtype, adapter)))
    module = load_module(checkpoint, dtype, adapter)
    with readable(checkpoint.path, "config.json describes no model that runs"):
        return model_from_module(module, name=name, dtype=dtype, context=context, packing=packing)


def _refuse_changes(checkpoint: Checkpoint, what: str, adapter: Adapter | None, packing: Packing | None) -> None:
    """A GPT with learned positions is computed by one forward of ours, which knows nothing of them."""
    if adapter is not None:
        raise UnsupportedModelError(f"{checkpoint.path}: got the adapter {adapter.name} for {what}, expected none")
    if packing is not None:
        raise UnsupportedModelError(f"{checkpoint.path}: --kv-bits: got {packing.bits} for {what}, expected none")


def _read_gguf(model: GgufModel, dtype: str) -> LlamaWeights | None:
    """The weights of a GGUF file; None where none of our forwards computes its config."""
    config = read_config(model.config)
    return None if config is None else fuse_llama(dict(gguf_arrays(model, dtype)), config, dtype)


def _gpt_model(weights: GptWeights, *, name: str, dtype: str) -> Model:
    """A GPT with learned positions: one forward on every device, and no module of mlx-lm beside it."""
    shape = weights.shape
    return Model(
        forward=gpt_forward(weights),
        variant="gpt",
        name=name,
        dtype=dtype,
        vocab_size=shape.vocab_size,
        context=shape.context,
        kv_shapes=((shape.heads, shape.head_size, shape.head_size),) * shape.layers,
        kv_dtype=getattr(mx, dtype),
        windows=(None,) * shape.layers,
        family=shape.family,
        weight_bytes=weights.nbytes,
    )


def model_from_weights(weights: LlamaWeights, *, name: str, dtype: str, context: int) -> Model:
    """Take the first forward of ours that fits this machine.

    Args:
        weights: of a model of the Llama shape.
        name: for messages.
        dtype: of the weights.
        context: positions it was made for.

    Returns:
        The model.
    """
    runtime = start()
    chosen, forward = next(
        (variant, made) for variant in _VARIANTS if (made := variant.forward(weights, runtime)) is not None
    )
    return Model(
        forward=forward,
        variant=chosen.name,
        name=name,
        dtype=dtype,
        vocab_size=weights.shape.vocab_size,
        context=context,
        kv_shapes=chosen.kv_shapes(weights.shape),
        kv_dtype=getattr(mx, dtype),
        copies_cache=chosen.copies_cache,
        windows=(None,) * weights.shape.layers,
        family=weights.shape.family,
        weight_bytes=weights.nbytes,
    )


def drafting(model: Model) -> Model:
    """The model as a draft: its last bits need not be the same at every width, and where that is faster they are not.

    Args:
        model: any.

    Returns:
        The model itself where there is nothing to gain.
    """
    forward = briefly(model.forward)
    return model if forward is None else attrs.evolve(model, forward=forward, variant="cpu-draft")
