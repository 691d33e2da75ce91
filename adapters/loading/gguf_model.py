"""A GGUF file's model by mlx-lm's names: which tensors it has, in which shapes, and how each is kept.

llama.cpp rotates the heads of its `llama` in pairs of neighbours, so its files hold the rows of queries and keys in
another order; those of the other families lie as everywhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.loading.gguf_config import gguf_config
from posttrainllm.adapters.loading.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from posttrainllm.adapters.loading.gguf_rope import llama3_scaling
from posttrainllm.adapters.loading.gguf_types import DENSE, PACKED
from posttrainllm.adapters.loading.gguf_vocabulary import text_ids
from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["GROUP_SIZE", "GgufModel", "GgufPart", "read_gguf"]

GROUP_SIZE = 32
"""Weights that share a scale, in every type that MLX reads."""
_ROPE = "rope_freqs.weight"
_LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))  # products over the same input
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_Table = dict[str, tuple[str, tuple[int, ...], int]]
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@attrs.frozen(kw_only=True)
class GgufPart:
    """A tensor under its name in mlx-lm."""

    stored: GgufTensor
    heads: int = 0
    """Heads whose rows lie in llama.cpp's order; 0 where rows are in order."""
    bits: int = 0
    """Of a weight that stays packed; 0 of floats."""


@attrs.frozen(kw_only=True)
class GgufModel:
    """A file whose tensors are those of its config."""

    header: GgufHeader
    config: dict[str, Any]
    """In Hugging Face / mlx-lm layout, with `quantization` where weights stay packed."""
    parts: Mapping[str, GgufPart] = attrs.field(repr=False)
    """By mlx-lm's name, `.weight` or `.bias` included."""

    @property
    def foreign(self) -> GgufTensor | None:
        """A tensor of a type that MLX does not read, None where there is none."""
        tensors = (part.stored for part in self.parts.values())
        return next((tensor for tensor in tensors if tensor.type.name not in {*DENSE, *PACKED}), None)

    @property
    def float_bytes(self) -> dict[str, int]:
        """Bytes of floats by dtype, the scales of packed weights among them, once read."""
        found: dict[str, int] = {}
        for part in self.parts.values():
            elements = part.stored.size // part.stored.type.size * part.stored.type.block
            name = "float16" if part.bits else DENSE.get(part.stored.type.name, "float16")
            size = 4 * elements // GROUP_SIZE if part.bits else (4 if name == "float32" else 2) * elements
            found[name] = found.get(name, 0) + size
        return found

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed integers, once read."""
        return sum(
            part.bits * (part.stored.size // part.stored.type.size * part.stored.type.block) // 8
            for part in self.parts.values()
        )


def read_gguf(path: Path, *, packed: bool = True) -> GgufModel:
    """Read everything of a file but its weights.

    Args:
        path: the file.
        packed: whether weights that MLX can compute with as they are stay so.

    Returns:
        The model.

    Raises:
        CheckpointError: the file is torn or contradicts itself; with got and expected.
        UnsupportedModelError: it asks for what is not implemented; that is named.
    """
    header = read_gguf_header(path)
    config = gguf_config(header)
    expected = _expected(header, config)
    _check(header, expected)
    parts = {
        name: GgufPart(stored=header.tensors[tensor], heads=heads) for tensor, (name, _, heads) in expected.items()
    }
    if _ROPE in header.tensors:
        config["rope_scaling"] = llama3_scaling(header, config)
    config |= text_ids(header, config["vocab_size"])
    if packed:
        parts |= _packed(parts)
        config |= _packing(parts)
    return GgufModel(header=header, config=config, parts=parts)


def _expected(header: GgufHeader, config: Mapping[str, Any]) -> _Table:
    """Every tensor of a model by its name in the file: name in mlx-lm, shape, heads to be put in order."""
    hidden, mlp, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads, rows = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    layers, family = config["num_hidden_layers"], config["model_type"]
    if layers * len(_LINEARS) > len(header.tensors):  # before a table of all of them is made
        raise CheckpointError(f"{header.path}: got {len(header.tensors)} tensors, expected those of {layers} layers")
    turned = {"attn_q": heads, "attn_k": kv_heads} if family == "llama" else {}
    shapes = {
        "attn_q": (heads * size, hidden),
        "attn_k": (kv_heads * size, hidden),
        "attn_v": (kv_heads * size, hidden),
        "attn_output": (hidden, heads * size),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    found: _Table = {"token_embd.weight": ("model.embed_tokens.weight", (rows, hidden), 0)}
    for index in range(layers):
        here, there = f"blk.{index}.", f"model.layers.{index}."
        for name, module in _LINEARS.items():
            found[f"{here}{name}.weight"] = (f"{there}{module}.weight", shapes[name], turned.get(name, 0))
            if family == "qwen2" and name in _FUSED[0]:
                found[f"{here}{name}.bias"] = (f"{there}{module}.bias", shapes[name][:1], 0)
        for name, module in _NORMS.items():
            found[f"{here}{name}.weight"] = (f"{there}{module}.weight", (hidden,), 0)
        for name, module in _HEAD_NORMS.items() if family == "qwen3" else ():
            found[f"{here}{name}.weight"] = (f"{there}{module}.weight", (size,), 0)
    found["output_norm.weight"] = ("model.norm.weight", (hidden,), 0)
    if not config["tie_word_embeddings"]:
        found["output.weight"] = ("lm_head.weight", (rows, hidden), 0)
    return found


def _check(header: GgufHeader, expected: _Table) -> None:
    """These tensors, in these shapes, and no other ones."""
    path = header.path
    for name, (_, shape, _) in expected.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{path}: {name} is missing, expected it with the shape {list(shape)}")
        if tensor.shape != shape:
            raise CheckpointError(f"{path}: {name}: got the shape {list(tensor.shape)}, expected {list(shape)}")
        if len(shape) == 1 and tensor.type.name not in DENSE:
            raise CheckpointError(f"{path}: {name}: got {tensor.type.name}, expected floats")
    others = header.tensors.keys() - expected.keys() - {_ROPE}
    if others:
        raise UnsupportedModelError(f"{path}: got a tensor {shown(min(others))}, expected those of the config alone")


def _packed(parts: Mapping[str, GgufPart]) -> dict[str, GgufPart]:
    """Weights that stay packed, with their bits.

    Products over the same input become one, so that the widest bits of them are taken: 4 bits in 8 are the same
    numbers. Where one of them is not packed, none is.
    """
    groups: dict[str, list[str]] = {}
    for name in parts:
        prefix, _, module = name.removesuffix(".weight").rpartition(".")
        fused = next((group[0] for group in _FUSED if module in [_LINEARS[one].split(".")[1] for one in group]), module)
        groups.setdefault(f"{prefix}.{fused}", []).append(name)
    found: dict[str, GgufPart] = {}
    for names in groups.values():
        bits = [PACKED.get(parts[name].stored.type.name, 0) for name in names if name.endswith(".weight")]
        if bits and all(bits):
            found |= {name: attrs.evolve(parts[name], bits=max(bits)) for name in names if name.endswith(".weight")}
    return found


def _packing(parts: Mapping[str, GgufPart]) -> dict[str, Any]:
    """The entry that mlx-lm writes: the packing of most weights, and that of every other one by its name."""
    bits = {name.removesuffix(".weight"): part.bits for name, part in parts.items() if part.bits}
    if not bits:
        return {}
    counts = list(bits.values())
    usual = max(set(counts), key=counts.count)
    others = {name: {"group_size": GROUP_SIZE, "bits": own} for name, own in bits.items() if own != usual}
    return {"quantization": {"group_size": GROUP_SIZE, "bits": usual, **others}}
