"""Directories in Hugging Face / mlx-lm layout, made of GGUF files and of the first layers of a model."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_checkpoint, readable
from posttrainllm.adapters.loading.gguf_model import GgufModel
from posttrainllm.adapters.loading.gguf_reader import gguf_arrays
from posttrainllm.adapters.loading.gguf_tokenizer import gguf_backend, tokenizer_json
from posttrainllm.adapters.loading.layer_cut import cut_config, layer_of
from posttrainllm.adapters.loading.module_loader import build_module
from posttrainllm.adapters.loading.new_directory import new_directory, write_json, write_weights
from posttrainllm.kernel.errors import LoadError, UnsupportedModelError

__all__ = ["convert_gguf", "cut_directory", "first_layers"]

# a model's files beside its weights and its config, but no code
_COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_WRITTEN = {"config.json", "model.safetensors.index.json"}


def first_layers(model: GgufModel, layers: int) -> GgufModel:
    """A file's model without its last blocks.

    Args:
        model: of `read_gguf`.
        layers: how many are kept.

    Returns:
        The rest.

    Raises:
        UsageError: there are not more blocks than that.
    """
    config = cut_config(model.header.path, model.config, set(model.parts), layers)
    packing = config.get("quantization")
    if packing is not None:
        config["quantization"] = {
            name: value for name, value in packing.items() if (layer_of(f"{name}.") or 0) < layers
        }
    return attrs.evolve(
        model,
        config=config,
        parts={name: part for name, part in model.parts.items() if (layer_of(name) or 0) < layers},
    )


def convert_gguf(model: GgufModel, out: Path, *, dtype: str | None) -> int:
    """Write a file's model as a directory, whole or not at all.

    Args:
        model: of `read_gguf`.
        out: does not exist, or is an empty directory.
        dtype: of all weights; None keeps what is stored, and makes float16 of types that MLX does not read.

    Returns:
        Bytes of its weights.

    Raises:
        UsageError: `out` is taken.
        UnsupportedModelError: a type of tensor that cannot be read.
        CheckpointError: the directory cannot be written.
    """
    floats = model.float_bytes
    config = model.config | {"dtype": dtype or max(floats, key=lambda name: floats[name])}
    with new_directory(out) as made:
        backend = gguf_backend(model.header)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,  # transformers tidies up spaces otherwise
            **backend.special_tokens,
            **({} if backend.chat_template is None else {"chat_template": backend.chat_template}),
        }
        write_json(made / "config.json", config)
        write_json(made / "tokenizer_config.json", settings)
        (made / "tokenizer.json").write_text(
            json.dumps(tokenizer_json(model.header), ensure_ascii=False), encoding="utf-8"
        )
        size = write_weights(made, gguf_arrays(model, dtype))
        read_checkpoint(made)
    return size


def cut_directory(checkpoint: Checkpoint, out: Path, *, layers: int) -> int:
    """Write the first blocks of a directory's model, whole or not at all; its weights stay as they are.

    Args:
        checkpoint: of a directory.
        out: does not exist, or is an empty directory.
        layers: how many are kept.

    Returns:
        Bytes of its weights.

    Raises:
        UsageError: `out` is taken, or there are not more blocks than that.
        UnsupportedModelError: which tensors belong to which block cannot be told, MLX does not read them, or what is
            left is no model that mlx-lm can build.
        CheckpointError: the directory cannot be written.
    """
    path = checkpoint.path
    arrays: dict[str, mx.array] = {}
    for file in sorted(path.glob("model*.safetensors")):
        try:
            arrays |= mx.load(str(file))  # type: ignore[arg-type] # a safetensors file is a dictionary
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModelError(f"{file}: got tensors that MLX does not read: {error}") from None
    config = cut_config(path, checkpoint.config, set(arrays), layers)

    def kept() -> Iterator[tuple[str, mx.array]]:
        for name in sorted(arrays):
            array = arrays.pop(name)  # what has been written is freed
            if (layer_of(name) or 0) < layers:
                yield name, array

    with new_directory(out) as made:
        for file in sorted({file for pattern in _COPIED for file in path.glob(pattern)}):
            if file.is_file() and file.name not in _WRITTEN:
                shutil.copyfile(file, made / file.name)
        write_json(made / "config.json", config)
        size = write_weights(made, kept())
        _check_whole(path, made, layers)
    return size


def _check_whole(path: Path, made: Path, layers: int) -> None:
    """Settings of single layers have many names: only the architecture can tell whether what is left is a model.

    It is built and called, which reads no weight, since nothing is evaluated.
    """
    from mlx_lm.models.cache import make_prompt_cache

    try:
        with readable(made, "its module does not run"):
            module = build_module(read_checkpoint(made), "float32")
            module(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(module))
    except LoadError as error:
        raise UnsupportedModelError(
            f"{path}: --layers: got {layers}, expected as many as are a model of their own: "
            + str(error).removeprefix(str(made)).lstrip(":/ ")
        ) from None
