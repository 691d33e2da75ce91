"""The weights of a `.tinygpt` file, read through a memory map: one tensor at a time, and no optimizer's state."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.loading.gpt import GptLayer, GptShape, GptWeights, Norm
from posttrainllm.adapters.loading.llama import Linear
from posttrainllm.adapters.loading.tinygpt_header import TinyGptHeader

__all__ = ["gpt_shape", "read_tinygpt"]

_STORED = {"float32": "<f4", "float16": "<f2"}


def gpt_shape(header: TinyGptHeader) -> GptShape:
    """The sizes of a file's model."""
    return GptShape(
        layers=header.layers,
        hidden=header.hidden,
        heads=header.heads,
        mlp=header.mlp,
        context=header.context,
        vocab_size=header.vocab_size,
    )


def read_tinygpt(header: TinyGptHeader, dtype: str) -> GptWeights:
    """Read a model.

    Args:
        header: checked.
        dtype: "float32", "float16" or "bfloat16", of the arrays.

    Returns:
        The weights, in memory.

    Raises:
        OSError: the file cannot be read.
    """
    take = _taker(header, getattr(mx, dtype))

    def joined(names: Sequence[str], part: str) -> mx.array:
        arrays = [take(f"{name}.{part}") for name in names]
        return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=0)

    def linear(*names: str) -> Linear:
        """Matrices over the same input as one, rows below rows; what it was put together from is freed."""
        found = Linear(weight=joined(names, "weight"), bias=joined(names, "bias"))
        mx.eval(found.arrays)
        return found

    def norm(name: str) -> Norm:
        return Norm(weight=take(f"{name}.weight"), bias=take(f"{name}.bias"))

    def layer(prefix: str) -> GptLayer:
        return GptLayer(
            attention_norm=norm(f"{prefix}ln1"),
            qkv=linear(*(f"{prefix}attn.{name}_proj" for name in "qkv")),
            output=linear(f"{prefix}attn.o_proj"),
            mlp_norm=norm(f"{prefix}ln2"),
            rise=linear(f"{prefix}mlp.fc_in"),
            fall=linear(f"{prefix}mlp.fc_out"),
        )

    return GptWeights(
        shape=gpt_shape(header),
        tokens=take("token_embedding.weight"),
        positions=take("position_embedding.weight"),
        layers=tuple(layer(f"blocks.{index}.") for index in range(header.layers)),
        norm=norm("ln_final"),
    )


def _taker(header: TinyGptHeader, dtype: mx.Dtype) -> Callable[[str], mx.array]:
    """A function from a name to the tensor in memory, a matrix as [out, in]."""
    mapped = np.memmap(header.path, mode="r", dtype=np.uint8)

    def take(name: str) -> mx.array:
        place = header.tensors[name]
        stored = _STORED[header.dtype]
        flat: npt.NDArray[np.floating] = np.frombuffer(
            mapped, dtype=stored, count=math.prod(place.shape), offset=place.offset
        )
        # the manifest states [out, in] of a linear layer and the body has [in, out]
        turned = len(place.shape) == 2 and "embedding" not in name
        found = flat.reshape(place.shape[::-1]).T if turned else flat.reshape(place.shape)
        # a copy in order: the header may be of any length, so that nothing behind it is aligned
        array = mx.array(found.astype(stored[1:], order="C", copy=True)).astype(dtype)
        mx.eval(array)
        return array

    return take
