"""Which configs describe a model of the Llama shape, and what they say of it.

The choice is conservative: whatever is not surely computed by our forwards as mlx-lm's module computes it is left to
mlx-lm, which also names what is wrong with a config.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.llama import LlamaShape

__all__ = ["LlamaConfig", "lifted_rope", "read_config"]

_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # as mlx-lm maps them
_THETA = {"llama": 10000.0, "qwen2": 1000000.0, "qwen3": None}  # what mlx-lm takes where the config has none
_FULL = "full_attention"
_LARGEST_HEAD = 2**16  # beyond it a config is no model's, and its table of frequencies would fill the memory
# settings that change what is computed and that our forwards do not know
_FOREIGN = ("model_file", "quantize_activations", "rope_traditional", "use_sliding_window")


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """A shape, and which tensors the checkpoint has to hold."""

    shape: LlamaShape
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    """Whether query and key heads are normed."""
    tied: bool
    """Whether the head is the embedding."""
    quantization: Mapping[str, Any] | None
    """The config's own entry, as mlx-lm writes it; None of a dense model."""


def read_config(config: Mapping[str, Any]) -> LlamaConfig | None:
    """Describe a config of the Llama shape.

    Args:
        config: of config.json.

    Returns:
        The description; None where the model is another one, or where a value is missing or not what is expected.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None or any(config.get(name) for name in _FOREIGN) or config.get("text_config") is not None:
        return None
    if config.get("hidden_act", "silu") not in ("silu", "swish") or config.get("partial_rotary_factor", 1) != 1:
        return None
    quantization = config.get("quantization")
    if not (quantization is None or _is_packing(quantization)):
        return None
    if quantization is None and config.get("quantization_config"):
        return None  # another library's packing
    shape = _shape(config, family)
    tied = config.get("tie_word_embeddings", None if family == "qwen3" else True)
    biases = [config.get(name, False) for name in ("attention_bias", "mlp_bias")]
    if shape is None or not _full_attention(config, shape.layers) or any(type(flag) is not bool for flag in biases):
        return None
    if type(tied) is not bool or (family != "llama" and any(biases)):
        return None
    return LlamaConfig(
        shape=shape,
        qkv_bias=biases[0] or family == "qwen2",
        output_bias=biases[0],
        mlp_bias=biases[1],
        head_norms=family == "qwen3",
        tied=tied,
        quantization=quantization,
    )


def lifted_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What newer configs say under `rope_parameters`, by the names that mlx-lm's Llama and Qwen2 look for.

    Without it they would rotate by the base of their own that they take where a config names none.

    Args:
        config: of config.json.

    Returns:
        `rope_theta` and `rope_scaling`, as far as the config has them there alone; empty for other models.
    """
    parameters = config.get("rope_parameters")
    if config.get("model_type") not in _FAMILIES or not isinstance(parameters, dict):
        return {}
    found = {"rope_theta": parameters.get("rope_theta"), "rope_scaling": parameters}
    return {name: value for name, value in found.items() if value is not None and config.get(name) is None}


def _shape(config: Mapping[str, Any], family: str) -> LlamaShape | None:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    values: list[Any] = [config.get(name) for name in names]
    kv_heads, head_size = config.get("num_key_value_heads"), config.get("head_dim")
    if kv_heads is None and family == "llama":
        kv_heads = config.get("num_attention_heads")
    values.append(kv_heads)
    if not all(type(value) is int and value > 0 for value in values):
        return None
    layers, hidden, heads, mlp, vocab_size, kv_heads = values
    if family == "qwen2" or (family == "llama" and head_size is None):
        head_size = hidden // heads
    eps = _number(config.get("rms_norm_eps"))
    if type(head_size) is not int or not 2 <= head_size <= _LARGEST_HEAD or head_size % 2:
        return None
    if heads % kv_heads or eps is None:
        return None
    rope = _rope(config, family, head_size)
    if rope is None:
        return None
    return LlamaShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp=mlp,
        vocab_size=vocab_size,
        norm_eps=eps,
        family=family,
        **rope,
    )


def _full_attention(config: Mapping[str, Any], layers: int) -> bool:
    """Whether every layer attends to all positions. A `sliding_window` alone is not heeded by mlx-lm's modules."""
    types = config.get("layer_types")
    return types is None or (isinstance(types, list) and len(types) == layers and set(map(str, types)) == {_FULL})


def _is_packing(value: Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is int for name in ("group_size", "bits"))


def _number(value: Any) -> float | None:
    """A finite number above 0; None for anything else."""
    return float(value) if type(value) in (int, float) and 0 < value < 1e30 else None


def _rope(config: Mapping[str, Any], family: str, size: int) -> dict[str, Any] | None:
    """The fields of `LlamaShape` that say how heads are rotated, computed as mlx-lm's rope computes them."""
    config = {**config, **lifted_rope(config)}
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling")
    base = _number(_THETA[family] if theta is None and "rope_theta" not in config else theta)
    if base is None or not isinstance(scaling, dict | None):
        return None
    scaling = scaling or {}
    if scaling.get("partial_rotary_factor", 1) != 1:
        return None
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    factor = _number(scaling.get("factor", 1 if kind == "default" else None))
    if factor is None or kind not in ("default", "linear", "llama3"):
        return None
    if kind == "llama3":
        periods = _llama3_periods(scaling, base, factor, size)
        return None if periods is None else {"rope_frequencies": _floats(1 / periods)}
    scale = 1 / factor if kind == "linear" else 1.0
    exponents = mx.arange(0, size, 2, dtype=mx.float32) / size
    frequencies = scale * mx.exp(-math.log(base) * exponents)
    return {"rope_frequencies": _floats(frequencies), "rope_base": base, "rope_scale": scale}


def _floats(array: mx.array) -> tuple[float, ...]:
    values: Any = array.tolist()
    return tuple(values)


def _llama3_periods(scaling: Mapping[str, Any], base: float, factor: float, size: int) -> mx.array | None:
    """Positions a radian, [D / 2]: long waves are stretched, short ones kept, those between blended."""
    names = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    low, high, trained = (_number(scaling.get(name, default)) for name, default in names.items())
    if low is None or high is None or trained is None or high <= low:
        return None
    periods = base ** (mx.arange(0, size, 2) / size)
    waves = 2 * mx.pi * periods
    kept = (trained / waves - low) / (high - low)
    blended = periods / ((1 - kept) / factor + kept)
    stretched = mx.where(waves > trained / low, periods * factor, periods)
    return mx.where((waves > trained / high) & (waves < trained / low), blended, stretched)
