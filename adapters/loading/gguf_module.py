"""mlx-lm's module for the model of a GGUF file."""

from typing import TYPE_CHECKING

from posttrainllm.adapters.loading.gguf_model import GgufModel
from posttrainllm.adapters.loading.gguf_reader import gguf_arrays

if TYPE_CHECKING:  # a model that needs no mlx-lm does not load MLX's layers either
    from mlx.nn.layers.base import Module

__all__ = ["gguf_module"]


def gguf_module(model: GgufModel, dtype: str) -> "Module":
    """Build the architecture around a file's tensors, as mlx-lm's loader does around a directory's.

    Args:
        model: of `read_gguf`.
        dtype: "float32", "float16" or "bfloat16", of the floats.

    Returns:
        The module, its weights in memory.

    Raises:
        UnsupportedModelError: a type of tensor that is not read here.
        Exception: whatever an architecture makes of the config.
    """
    from mlx.nn.layers.quantized import quantize
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(model.config)
    module: Module = model_class(arguments.from_dict(model.config))
    arrays = dict(gguf_arrays(model, dtype))
    packing = model.config.get("quantization")
    if packing is not None:
        quantize(
            module,
            group_size=packing["group_size"],
            bits=packing["bits"],
            class_predicate=lambda path, _: packing.get(path, f"{path}.scales" in arrays),
        )
    module.load_weights(list(arrays.items()))
    return module
