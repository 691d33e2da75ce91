"""What the metadata of a GGUF file says of its model, as a config in Hugging Face / mlx-lm layout.

Llama (and Mistral, which has its name), Qwen2 and Qwen3. A key of the architecture that is not known here may change
what is computed, and is refused.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.adapters.loading.gguf_values import shown_value
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["FAMILIES", "gguf_config", "whole_number"]

FAMILIES: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Architectures that are read, with transformers' name of their class."""
_MOST = 2**30  # lengths are int32, and sums of two of them must be, too
_LARGEST_HEAD = 2**16
_DEFAULT_THETA = 10000.0
# read below, or without a meaning for what is computed
_KNOWN = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.causal"),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count"),
}


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Describe a model.

    Args:
        header: of the file.

    Returns:
        Plain values, for JSON, without the ids and the packing.

    Raises:
        CheckpointError: a value is missing, or is not what it should be; with got and expected.
        UnsupportedModelError: the model is one that is not read here; what it is is named.
    """
    family = _family(header)
    _check_known(header, family)
    key = family + "."
    names = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length")
    layers, hidden, mlp, heads, context = (whole_number(header, key + name, least=1) for name in names)
    kv_heads = whole_number(header, f"{key}attention.head_count_kv", least=1, default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{header.path}: {key}attention.head_count_kv: got {kv_heads}, expected a divisor of {heads} heads"
        )
    if context < 2:
        raise CheckpointError(f"{header.path}: {key}context_length: got {context}, expected 2 or more")
    eps = _float(header, f"{key}attention.layer_norm_rms_epsilon")
    if not 0 < eps < 1:
        raise CheckpointError(f"{header.path}: {key}attention.layer_norm_rms_epsilon: got {eps}, expected 0 to 1")
    window = whole_number(header, f"{key}attention.sliding_window", least=0, default=0)
    head_size = _head_size(header, key, hidden, heads)
    return {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "rms_norm_eps": eps,
        "max_position_embeddings": min(context, _MOST),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": _rows(header),
        **_rope(header, key, head_size),
        **({"sliding_window": window} if window else {}),
    }


def whole_number(header: GgufHeader, key: str, *, least: int, default: int | None = None) -> int:
    """A whole number of the metadata.

    Args:
        header: of the file.
        key: of the number.
        least: what it may be.
        default: where it is missing; None where it must be there.

    Returns:
        The number.

    Raises:
        CheckpointError: it is missing, or none.
    """
    value = header.metadata.get(key, default)
    if type(value) is not int or not least <= value <= _MOST:
        raise CheckpointError(
            f"{header.path}: {key}: got {shown_value(value)}, expected a whole number from {least} to {_MOST}"
        )
    return value


def _family(header: GgufHeader) -> str:
    path = header.path
    family = _text(header, "general.architecture", None)
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: general.architecture: got {shown_value(family)}, expected one of {', '.join(FAMILIES)}"
        )
    kind = _text(header, "general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{path}: general.type: got {shown_value(kind)}, expected model")
    parts = whole_number(header, "split.count", least=0, default=0)
    if parts > 1:
        raise UnsupportedModelError(
            f"{path}: split.count: got one of {parts} parts, expected a whole model "
            "(`llama-gguf-split --merge` makes one)"
        )
    return family


def _text(header: GgufHeader, key: str, default: str | None) -> str:
    value = header.metadata.get(key, default)
    if not isinstance(value, str):
        raise CheckpointError(f"{header.path}: {key}: got {shown_value(value)}, expected a text")
    return value


def _check_known(header: GgufHeader, family: str) -> None:
    for key, value in header.metadata.items():
        if key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in _KNOWN:
            raise UnsupportedModelError(
                f"{header.path}: {key:.200}: got {shown_value(value)}, expected no such key: it is not implemented"
            )
    experts = header.metadata.get(f"{family}.expert_count", 0)
    causal = header.metadata.get(f"{family}.attention.causal", True)
    for name, value, off in (("expert_count", experts, 0), ("attention.causal", causal, True)):
        if type(value) is not type(off) or value != off:
            raise UnsupportedModelError(
                f"{header.path}: {family}.{name}: got {shown_value(value)}, expected {shown_value(off)}: anything "
                "else is not implemented"
            )


def _head_size(header: GgufHeader, key: str, hidden: int, heads: int) -> int:
    """D: one size for keys and values, all of it rotated."""
    default = hidden // heads
    size = whole_number(header, f"{key}attention.key_length", least=1, default=default or None)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = whole_number(header, key + name, least=1, default=size if name.startswith("rope") else default or None)
        if other != size:
            raise UnsupportedModelError(f"{header.path}: {key}{name}: got {other}, expected {size}, a head's size")
    if size % 2 or size > _LARGEST_HEAD or (key == "qwen2." and size * heads != hidden):
        raise CheckpointError(
            f"{header.path}: {key}attention.key_length: got {size} for {heads} heads of {hidden}, expected an even part"
        )
    return size


def _rows(header: GgufHeader) -> int:
    """V: rows of the embedding."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or not 2 <= embedding.shape[0] <= _MOST:
        got = "nothing" if embedding is None else f"the shape {list(embedding.shape)}"
        raise CheckpointError(f"{header.path}: token_embd.weight: got {got}, expected a matrix of 2 rows or more")
    return embedding.shape[0]


def _float(header: GgufHeader, key: str, default: float | None = None) -> float:
    """A float32, as the decimal number that was meant."""
    value = header.metadata.get(key, default)
    if type(value) is not float or not abs(value) < 1e30:
        raise CheckpointError(f"{header.path}: {key}: got {shown_value(value)}, expected a finite number")
    return float(str(np.float32(value)))


def _rope(header: GgufHeader, key: str, head_size: int) -> dict[str, Any]:
    """How heads are rotated."""
    theta = _float(header, f"{key}rope.freq_base", _DEFAULT_THETA)
    if theta <= 0:
        raise CheckpointError(f"{header.path}: {key}rope.freq_base: got {theta}, expected more than 0")
    found: dict[str, Any] = {"rope_theta": theta}
    kind = _text(header, f"{key}rope.scaling.type", "none")
    if f"{key}rope.scale_linear" in header.metadata:  # how it was written before there were types
        kind, factor = "linear", _float(header, f"{key}rope.scale_linear")
    else:
        factor = _float(header, f"{key}rope.scaling.factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{header.path}: {key}rope.scaling.type: got {shown_value(kind)}, expected none, linear or yarn"
        )
    if factor < 1:
        raise CheckpointError(f"{header.path}: {key}rope.scaling.factor: got {factor}, expected 1 or more")
    if "rope_freqs.weight" in header.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{header.path}: rope_freqs.weight: got it beside {kind}, expected one of them")
        return found  # its numbers say which scaling it is
    if kind == "linear" and factor != 1:
        found["rope_scaling"] = {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        original = whole_number(header, f"{key}rope.scaling.original_context_length", least=1)
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    return found
