"""Weights of Llama-shaped checkpoints, read without mlx-lm and laid out for our own forwards.

Every tensor is expected by name and shape before one is read. A checkpoint that holds others, or packs them in a way
not known here, is left to mlx-lm's loader, which also names what is wrong with it.
"""

from collections.abc import Sequence

import mlx.core as mx

from posttrainllm.adapters.loading.adapter import Adapter
from posttrainllm.adapters.loading.adapter_arrays import fuse_adapter
from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.adapters.loading.llama import Linear, LlamaLayer, LlamaWeights
from posttrainllm.adapters.loading.llama_config import LlamaConfig, read_config

__all__ = ["fuse_llama", "read_llama"]

_GROUP_SIZES, _BITS = (16, 32, 64, 128), (2, 3, 4, 5, 6, 8)
_PACKED_SCALES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}  # modes by (bits, group size), scales in a byte


class _OtherError(Exception):
    """The checkpoint is not one that is read here."""


def read_llama(checkpoint: Checkpoint, dtype: str, adapter: Adapter | None = None) -> LlamaWeights | None:
    """Read a model of the Llama shape: Llama, Mistral, Qwen2, Qwen3, dense or quantised by mlx-lm.

    The arrays have the bits that mlx-lm's module has after loading. They are read, cast and put together one by one, so
    that no more than one is in memory twice.

    Args:
        checkpoint: a checked directory.
        dtype: "float32", "float16" or "bfloat16"; quantised weights keep their bits and take it for the rest.
        adapter: put into dense weights; quantised ones would have to be quantised again, and be others.

    Returns:
        The weights, in memory; None for every other checkpoint, for one whose tensors and config do not fit, and for a
        quantised one with an adapter.

    Raises:
        CheckpointError: the adapter does not fit.
    """
    config = read_config(checkpoint.config)
    if config is None or (checkpoint.path / "hf_quant_config.json").exists():
        return None
    if adapter is not None and config.quantization is not None:
        return None
    arrays: dict[str, mx.array] = {}
    for file in sorted(checkpoint.path.glob("model*.safetensors")):
        try:
            found = mx.load(str(file))
        except (RuntimeError, ValueError):  # a type that MLX does not have
            return None
        if not isinstance(found, dict) or found.keys() & arrays.keys():
            return None
        arrays |= found
    del found  # it would hold every tensor
    if adapter is not None:
        fuse_adapter(arrays, adapter, config, dtype)
    return fuse_llama(arrays, config, dtype)


def fuse_llama(arrays: dict[str, mx.array], config: LlamaConfig, dtype: str) -> LlamaWeights | None:
    """Put the tensors of a model together.

    Args:
        arrays: by the names that mlx-lm's modules have for them, as stored; emptied as they are used.
        config: what they should be.
        dtype: what the floating ones are cast to.

    Returns:
        The weights, in memory; None where the tensors are not the expected ones.
    """
    try:
        return _Tensors(arrays, config, getattr(mx, dtype)).read()
    except _OtherError:
        return None


class _Tensors:
    """Lazy arrays by name; each is taken once, and what is left over at the end is not known here.

    Args:
        arrays: see `fuse_llama`.
        config: what they should be.
        dtype: of the floating ones, once taken.
    """

    def __init__(self, arrays: dict[str, mx.array], config: LlamaConfig, dtype: mx.Dtype) -> None:
        self._arrays, self._config, self._dtype = arrays, config, dtype
        if config.shape.family != "qwen3":  # tables that some old exports hold, and that mlx-lm drops
            for name in [name for name in arrays if "self_attn.rotary_emb.inv_freq" in name]:
                del arrays[name]
        if config.tied:
            arrays.pop("lm_head.weight", None)

    def read(self) -> LlamaWeights:
        """Check all, then read one by one."""
        shape, config = self._config.shape, self._config
        embedding = self._linear(["model.embed_tokens"], [shape.vocab_size], shape.hidden, bias=False)
        head = embedding
        if not config.tied:
            head = self._linear(["lm_head"], [shape.vocab_size], shape.hidden, bias=False)
        norm = self._array("model.norm.weight", (shape.hidden,))
        layers = [self._layer(f"model.layers.{index}.", config) for index in range(shape.layers)]
        if self._arrays:
            raise _OtherError
        weights = LlamaWeights(shape=shape, embedding=embedding, layers=tuple(layers), norm=norm, head=head)
        for array in weights.arrays:  # what one was put together from is freed before the next one is read
            mx.eval(array)
        return weights

    def _layer(self, prefix: str, config: LlamaConfig) -> LlamaLayer:
        shape = config.shape
        size, hidden = shape.head_size, shape.hidden
        qkv = [f"{prefix}self_attn.{name}_proj" for name in ("q", "k", "v")]
        rows = [shape.heads * size, shape.kv_heads * size, shape.kv_heads * size]
        gate_up = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        attended = shape.heads * size
        norms = [f"{prefix}self_attn.{name}_norm.weight" for name in ("q", "k")]
        query_norm, key_norm = [self._array(name, (size,)) for name in norms] if config.head_norms else [None, None]
        return LlamaLayer(
            input_norm=self._array(f"{prefix}input_layernorm.weight", (hidden,)),
            qkv=self._linear(qkv, rows, hidden, bias=config.qkv_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._linear([f"{prefix}self_attn.o_proj"], [hidden], attended, bias=config.output_bias),
            mlp_norm=self._array(f"{prefix}post_attention_layernorm.weight", (hidden,)),
            gate_up=self._linear(gate_up, [shape.mlp] * 2, hidden, bias=config.mlp_bias),
            down=self._linear([f"{prefix}mlp.down_proj"], [hidden], shape.mlp, bias=config.mlp_bias),
        )

    def _linear(self, names: Sequence[str], rows: Sequence[int], size: int, *, bias: bool) -> Linear:
        """Matrices over the same input as one, rows below rows; a name has [rows, size] of its own."""
        added = self._join(names, "bias", [(count,) for count in rows]) if bias else None
        if f"{names[0]}.scales" not in self._arrays:
            return Linear(weight=self._join(names, "weight", [(count, size) for count in rows]), bias=added)
        packing = {self._packing(name, size) for name in names}
        if len(packing) != 1:
            raise _OtherError  # bits that differ inside a group cannot be one matrix
        group_size, bits, mode = packing.pop()
        groups = [(count, size // group_size) for count in rows]
        return Linear(
            weight=self._join(names, "weight", [(count, size * bits // 32) for count in rows], packed=True),
            bias=added,
            scales=self._join(names, "scales", groups, packed=mode != "affine"),
            biases=self._join(names, "biases", groups) if mode == "affine" else None,
            group_size=group_size,
            bits=bits,
            mode=mode,
        )

    def _packing(self, name: str, size: int) -> tuple[int, int, str]:
        """Group size, bits and mode of a quantised matrix, from its shapes; its own entry in the config agrees."""
        quantization = self._config.quantization
        weight, scales = self._arrays.get(f"{name}.weight"), self._arrays.get(f"{name}.scales")
        if quantization is None or weight is None or scales is None or weight.ndim != 2 or scales.ndim != 2:
            raise _OtherError
        if weight.dtype != mx.uint32 or not scales.shape[1] or size % scales.shape[1] or weight.shape[1] * 32 % size:
            raise _OtherError
        group_size, bits = size // scales.shape[1], weight.shape[1] * 32 // size
        if group_size not in _GROUP_SIZES or bits not in _BITS:
            raise _OtherError
        mode = _PACKED_SCALES.get((bits, group_size)) if scales.dtype == mx.uint8 else "affine"
        found = {"group_size": group_size, "bits": bits, "mode": mode}
        own = quantization.get(name, found)
        if mode is None or not isinstance(own, dict) or {"mode": "affine", **own} != found:
            raise _OtherError
        return group_size, bits, mode

    def _join(
        self, names: Sequence[str], part: str, shapes: Sequence[tuple[int, ...]], *, packed: bool = False
    ) -> mx.array:
        arrays = [self._array(f"{name}.{part}", shape, packed) for name, shape in zip(names, shapes, strict=True)]
        return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=0)

    def _array(self, name: str, shape: tuple[int, ...], packed: bool = False) -> mx.array:
        """Take a tensor, cast unless it is one of packed integers."""
        array = self._arrays.pop(name, None)
        if array is None or tuple(array.shape) != shape or mx.issubdtype(array.dtype, mx.floating) == packed:
            raise _OtherError
        return array if packed else array.astype(self._dtype)
