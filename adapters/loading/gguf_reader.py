"""The weights of a GGUF file, read through a memory map, one tensor at a time.

What MLX computes with as it is stays packed, with the bits that the file has: its blocks of 32 are MLX's groups.
Everything else becomes floats.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.loading.gguf_header import GgufTensor
from posttrainllm.adapters.loading.gguf_model import GROUP_SIZE, GgufModel, GgufPart
from posttrainllm.adapters.loading.gguf_types import DENSE, PACKED
from posttrainllm.kernel.errors import UnsupportedModelError

__all__ = ["dequantizer", "gguf_arrays"]

_Bytes = npt.NDArray[np.uint8]
_Array = npt.NDArray[Any]
_HALF = GROUP_SIZE // 2
# a block begins with its scale d, and d's offset m where it has one; then come the weights
_BLOCKS = {
    "Q4_0": np.dtype([("d", "<f2"), ("q", "u1", _HALF)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", _HALF)]),
    "Q8_0": np.dtype([("d", "<f2"), ("q", "u1", GROUP_SIZE)]),
}
_CENTRE = {"Q4_0": 8, "Q8_0": 128}  # what the stored number has more than the weight it stands for
_Dequantize = Callable[[_Bytes, GgufTensor], _Array]


def gguf_arrays(model: GgufModel, dtype: str | None = None) -> Iterator[tuple[str, mx.array]]:
    """Read a model's tensors.

    Args:
        model: of `read_gguf`.
        dtype: of the floats; None keeps what is stored, scales in float16, and makes float16 of other types.

    Returns:
        Each by mlx-lm's name, in memory: a packed one as `weight`, `scales` and `biases`.

    Raises:
        UnsupportedModelError: a type that is not read here; it is named.
        OSError: the file cannot be read.
    """
    foreign = model.foreign
    dequantize = None if foreign is None else dequantizer(model, foreign)
    mapped = np.memmap(model.header.path, mode="r", dtype=np.uint8)
    for name, part in model.parts.items():
        tensor = part.stored
        raw = mapped[tensor.offset : tensor.offset + tensor.size]
        stem = name.removesuffix(".weight")
        if part.bits:
            found = _packed_arrays(raw, part)
            arrays = {f"{stem}.{piece}": mx.array(array) for piece, array in found.items()}
        else:
            arrays = {name: _dense(raw, part, dequantize)}
        stored = part.bits or tensor.type.name in DENSE
        wanted = dtype or (None if stored else "float16")
        for key, array in arrays.items():
            floating = mx.issubdtype(array.dtype, mx.floating)
            cast = array.astype(getattr(mx, wanted)) if floating and wanted is not None else array
            mx.eval(cast)
            yield key, cast


def dequantizer(model: GgufModel, foreign: GgufTensor) -> _Dequantize:
    """The function that makes floats of types that MLX does not read.

    Args:
        model: for messages.
        foreign: its first tensor of such a type.

    Returns:
        From a tensor's bytes to its float32 elements.

    Raises:
        UnsupportedModelError: the package is not installed, or does not know the type of a tensor.
    """
    try:
        kinds = importlib.import_module("gguf.constants").GGMLQuantizationType
        dequantize = importlib.import_module("gguf.quants").dequantize
    except ImportError:
        raise UnsupportedModelError(
            f"{model.header.path}: {foreign.name} is {foreign.type.name}, which the package gguf turns into floats: "
            "got none, expected `pip install 'posttrainllm[gguf]'`"
        ) from None

    def floats(raw: _Bytes, tensor: GgufTensor) -> _Array:
        rows = np.ascontiguousarray(raw).reshape(*tensor.shape[:-1], -1)
        try:
            found: _Array = dequantize(rows, kinds[tensor.type.name])
        except (KeyError, NotImplementedError):
            raise UnsupportedModelError(
                f"{model.header.path}: {tensor.name} is {tensor.type.name}, which cannot be turned into floats"
            ) from None
        return found

    return floats


def _dense(raw: _Bytes, part: GgufPart, dequantize: _Dequantize | None) -> mx.array:
    """Floats as stored, or float32 of another type's."""
    tensor = part.stored
    if tensor.type.name == "BF16":  # numpy has none
        words = _ordered(np.frombuffer(raw, dtype="<u2").reshape(tensor.shape), part.heads)
        return mx.array(words).view(mx.bfloat16)
    if tensor.type.name in DENSE:
        stored = np.frombuffer(raw, dtype={"F32": "<f4", "F16": "<f2"}[tensor.type.name])
        return mx.array(_ordered(stored.reshape(tensor.shape), part.heads))
    if tensor.type.name in PACKED:
        weights, scales, biases = _blocks(raw, tensor)
        floats = scales[..., None].astype(np.float32) * weights + biases[..., None].astype(np.float32)
    else:
        assert dequantize is not None, "a tensor of a foreign type was found before"
        floats = dequantize(raw, tensor)
    return mx.array(_ordered(floats.reshape(tensor.shape), part.heads))


def _packed_arrays(raw: _Bytes, part: GgufPart) -> dict[str, _Array]:
    """A matrix in MLX's affine packing: w = scale * q + bias, q from the lowest bits of a word upwards."""
    weights, scales, biases = _blocks(raw, part.stored)
    if part.bits == 4:
        weights = weights[..., 0::2] | (weights[..., 1::2] << np.uint8(4))
    rows = part.stored.shape[0]
    words = np.ascontiguousarray(weights).view("<u4").reshape(rows, -1)
    found = {"weight": words, "scales": scales.reshape(rows, -1), "biases": biases.reshape(rows, -1)}
    return {name: _ordered(array, part.heads) for name, array in found.items()}


def _blocks(raw: _Bytes, tensor: GgufTensor) -> tuple[_Array, _Array, _Array]:
    """Numbers from 0 up [blocks, 32], scales and biases [blocks], of a packed type."""
    name = tensor.type.name
    blocks = np.frombuffer(raw, dtype=_BLOCKS[name])
    stored: _Array = blocks["q"]
    scales: _Array = blocks["d"].astype(np.float16)
    if name == "Q8_0":
        numbers: _Array = stored ^ np.uint8(0x80)  # from signed to a distance above -128
    else:  # the first half of a block lies in the low bits
        numbers = np.concatenate([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
    if name == "Q4_1":
        return numbers, scales, blocks["m"].astype(np.float16)
    # beyond float16 there is no model's scale; a step that meets one says that its logits are not finite
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers, scales, -np.float16(_CENTRE[name]) * scales


def _ordered(array: _Array, heads: int) -> _Array:
    """Rows of a head from pairs of neighbours to two halves, as everybody but llama.cpp's `llama` has them."""
    if not heads:
        return np.ascontiguousarray(array)
    size = array.shape[0] // heads
    turned = array.reshape(heads, size // 2, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(turned).reshape(array.shape)
