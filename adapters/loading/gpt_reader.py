"""A GPT with learned positions in mlx-lm's layout: what `export-mlx` writes, and how it is read again.

mlx-lm's module for it is `gpt_bigcode`; here the forward of `.tinygpt` files reads the same directory, with the file's
bits. A config without our mark is another writer's, who may mean other things by the same names: transformers orders
the rows of `c_attn` by heads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.adapters.loading.gpt import GptLayer, GptShape, GptWeights, Norm
from posttrainllm.adapters.loading.llama import Linear
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["exported_arrays", "exported_config", "read_exported"]

_MARK = {"exported_by": "posttrainllm export-mlx"}
_FIXED: Mapping[str, Any] = {
    "model_type": "gpt_bigcode",
    "activation_function": "gelu",
    "multi_query": False,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
}
_SIZES = {
    "n_layer": "layers",
    "n_embd": "hidden",
    "n_head": "heads",
    "n_inner": "mlp",
    "n_positions": "context",
    "vocab_size": "vocab_size",
}


def exported_config(shape: GptShape, dtype: str) -> dict[str, Any]:
    """config.json of a model.

    Args:
        shape: of the model.
        dtype: of the weights.

    Returns:
        Plain values, for JSON.
    """
    sizes = {name: getattr(shape, field) for name, field in _SIZES.items()}
    # transformers' own default for the two ids is one of GPT-2's vocabulary
    ends = {"bos_token_id": None, "eos_token_id": None}
    return {**_FIXED, **sizes, **ends, "layer_norm_epsilon": shape.norm_eps, "dtype": dtype, **_MARK}


def exported_arrays(weights: GptWeights) -> dict[str, mx.array]:
    """Every tensor by mlx-lm's name.

    Args:
        weights: of the model.

    Returns:
        The weights' own arrays.
    """
    found = {"transformer.wte.weight": weights.tokens, "transformer.wpe.weight": weights.positions}
    parts: dict[str, Norm | Linear] = {"transformer.ln_f": weights.norm}
    for index, layer in enumerate(weights.layers):
        parts |= {f"transformer.h.{index}.{name}": part for name, part in _parts(layer).items()}
    for name, part in parts.items():
        assert part.bias is not None, "a model of this kind has biases everywhere"
        found |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    return found


def read_exported(checkpoint: Checkpoint, dtype: str) -> GptWeights | None:
    """Read what `export-mlx` wrote.

    Args:
        checkpoint: a checked directory.
        dtype: "float32", "float16" or "bfloat16", of the arrays.

    Returns:
        The weights, in memory; None for every other checkpoint.

    Raises:
        CheckpointError: config and tensors do not fit.
    """
    config = checkpoint.config
    if any(config.get(name) != value for name, value in {**_FIXED, **_MARK}.items()):
        return None
    shape = _shape(checkpoint)
    size, mlp = shape.hidden, shape.mlp
    arrays = _load(checkpoint)
    take = _taker(checkpoint, arrays, getattr(mx, dtype))

    def norm(name: str) -> Norm:
        return Norm(weight=take(f"{name}.weight", size), bias=take(f"{name}.bias", size))

    def linear(name: str, rows: int, columns: int) -> Linear:
        return Linear(weight=take(f"{name}.weight", rows, columns), bias=take(f"{name}.bias", rows))

    def layer(prefix: str) -> GptLayer:
        return GptLayer(
            attention_norm=norm(f"{prefix}ln_1"),
            qkv=linear(f"{prefix}attn.c_attn", 3 * size, size),
            output=linear(f"{prefix}attn.c_proj", size, size),
            mlp_norm=norm(f"{prefix}ln_2"),
            rise=linear(f"{prefix}mlp.c_fc", mlp, size),
            fall=linear(f"{prefix}mlp.c_proj", size, mlp),
        )

    weights = GptWeights(
        shape=shape,
        tokens=take("transformer.wte.weight", shape.vocab_size, size),
        positions=take("transformer.wpe.weight", shape.context, size),
        layers=tuple(layer(f"transformer.h.{index}.") for index in range(shape.layers)),
        norm=norm("transformer.ln_f"),
    )
    if arrays:
        raise CheckpointError(f"{checkpoint.path}: got a tensor {min(arrays)!r:.200}, expected those of config.json")
    return weights


def _load(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Every tensor by name, none of them read yet."""
    arrays: dict[str, mx.array] = {}
    for file in sorted(checkpoint.path.glob("model*.safetensors")):
        arrays |= mx.load(str(file))  # type: ignore[arg-type] # a safetensors file is a dictionary
    return arrays


def _taker(checkpoint: Checkpoint, arrays: dict[str, mx.array], dtype: mx.Dtype) -> Callable[..., mx.array]:
    """A function from a name and a shape to the tensor in memory, which is taken out of the arrays."""

    def take(name: str, *expected: int) -> mx.array:
        array = arrays.pop(name, None)
        if array is None or tuple(array.shape) != expected or not mx.issubdtype(array.dtype, mx.floating):
            got = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise CheckpointError(f"{checkpoint.path}: {name}: got {got}, expected floats {list(expected)}")
        array = array.astype(dtype)
        mx.eval(array)
        return array

    return take


def _parts(layer: GptLayer) -> dict[str, Norm | Linear]:
    return {
        "ln_1": layer.attention_norm,
        "attn.c_attn": layer.qkv,
        "attn.c_proj": layer.output,
        "ln_2": layer.mlp_norm,
        "mlp.c_fc": layer.rise,
        "mlp.c_proj": layer.fall,
    }


def _shape(checkpoint: Checkpoint) -> GptShape:
    values: dict[str, Any] = {field: checkpoint.config.get(name) for name, field in _SIZES.items()}
    eps = checkpoint.config.get("layer_norm_epsilon")
    bad = [name for name, field in _SIZES.items() if type(values[field]) is not int or values[field] < 1]
    if bad or type(eps) is not float or not 0 < eps < 1:
        name = (bad or ["layer_norm_epsilon"])[0]
        got = checkpoint.config.get(name)
        raise CheckpointError(f"{checkpoint.path}/config.json: {name}: got {got!r:.100}, expected a number above 0")
    shape = GptShape(norm_eps=eps, family="gpt_bigcode", **values)
    if shape.hidden % shape.heads:
        raise CheckpointError(
            f"{checkpoint.path}/config.json: n_embd: got {shape.hidden}, expected a multiple of {shape.heads} heads"
        )
    return shape
