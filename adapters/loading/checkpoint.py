"""What a model directory, a `.tinygpt` or a GGUF file holds, checked before any weight is read.

MLX maps weights lazily, so a torn file would surface in the middle of a run. Every header is read here and held
against the file's size.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posttrainllm.adapters.loading.config_values import check_sizes, context_of
from posttrainllm.adapters.loading.gguf_types import is_gguf
from posttrainllm.adapters.loading.safetensors_header import read_tensor_entries
from posttrainllm.adapters.loading.tinygpt_header import TinyGptHeader, is_tinygpt, read_header
from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.errors import CheckpointError, PosttrainllmError, UnsupportedModelError

if TYPE_CHECKING:  # it imports numpy, and --help must not
    from posttrainllm.adapters.loading.gguf_model import GgufModel

__all__ = ["Checkpoint", "read_checkpoint", "read_json", "readable"]

_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A model directory in Hugging Face / mlx-lm layout, a `.tinygpt` or a GGUF file."""

    path: Path
    config: dict[str, Any]
    weight_bytes: int
    """Bytes of all tensors as stored."""
    dtype: str
    """"float32", "float16" or "bfloat16": that of most stored bytes among the floating tensors."""
    context: int | None
    """Positions the model was made for; None where the config does not say."""
    quantized: bool
    float_bytes: dict[str, int]
    """Bytes of `weight_bytes` that are floating, by dtype; the others are packed integers."""
    native: TinyGptHeader | None = None
    """Of a `.tinygpt` file, whose `config` names the family alone; None of everything else."""
    gguf: "GgufModel | None" = None
    """Of a GGUF file, whose `config` is made of its metadata; None of everything else."""


@contextmanager
def readable(path: Path, problem: str) -> Iterator[None]:
    """Turn whatever reading a model directory raises into one line.

    The libraries that read it raise every kind of exception when a file in it is not what they expect.

    Args:
        path: the directory, for the message.
        problem: what could not be done, for the message.

    Raises:
        CheckpointError: for any other error than our own.
    """
    try:
        yield
    except PosttrainllmError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {collapsed(error, 300)}"
        if isinstance(error, OSError) and error.filename is not None:
            reason = f"{error.filename}: {error.strerror}"
        raise CheckpointError(f"{path}: {problem}: {reason}") from None


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a model and describe it.

    Args:
        path: a directory with config.json, tokenizer.json and model*.safetensors, a `.tinygpt` or a GGUF file.

    Returns:
        The description; no weight is read.

    Raises:
        CheckpointError: something is missing, torn or inconsistent; the text names the file, got and expected.
        UnsupportedModelError: a file asks for what is not implemented.
    """
    with readable(path, "cannot be read"):
        return _read_checkpoint(path)


def _read_checkpoint(path: Path) -> Checkpoint:
    if is_tinygpt(path):
        return _described(read_header(path))
    if is_gguf(path):
        from posttrainllm.adapters.loading.gguf_model import read_gguf

        return _described_gguf(read_gguf(path))
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise CheckpointError(
            f"{path}: got {found}, expected a model directory, a .tinygpt or GGUF file, or owner/name"
        )
    config = read_json(path / "config.json")
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path}: tokenizer.json is missing")
    by_dtype: dict[str, int] = {}
    tensors = 0
    for file in _weight_files(path):
        entries = read_tensor_entries(file).values()
        tensors += len(entries)
        for entry in entries:
            by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    check_sizes(path, config, tensors)
    floats = {name: by_dtype[code] for code, name in _FLOATS.items() if code in by_dtype}
    if not floats:
        raise CheckpointError(f"{path}: got tensors of {sorted(by_dtype)}, expected some of {sorted(_FLOATS)}")
    return Checkpoint(
        path=path,
        config=config,
        weight_bytes=sum(by_dtype.values()),
        dtype=max(floats, key=lambda name: floats[name]),
        context=context_of(path, config),
        quantized="quantization" in config or "quantization_config" in config,
        float_bytes=floats,
    )


def _described(header: TinyGptHeader) -> Checkpoint:
    return Checkpoint(
        path=header.path,
        config={"model_type": "tinygpt"},
        weight_bytes=header.weight_bytes,
        dtype=header.dtype,
        context=header.context,
        quantized=False,
        float_bytes={header.dtype: header.weight_bytes},
        native=header,
    )


def _described_gguf(model: "GgufModel") -> Checkpoint:
    path, foreign, floats = model.header.path, model.foreign, model.float_bytes
    if foreign is not None:
        raise UnsupportedModelError(
            f"{path}: {foreign.name} is {foreign.type.name}: got a type that MLX does not read, expected F32, F16, "
            "BF16, Q4_0, Q4_1 or Q8_0; `posttrainllm convert` makes a directory of it"
        )
    return Checkpoint(
        path=path,
        config=model.config,
        weight_bytes=model.packed_bytes + sum(floats.values()),
        dtype=max(floats, key=lambda name: floats[name]),
        context=model.config["max_position_embeddings"],
        quantized="quantization" in model.config,
        float_bytes=floats,
        gguf=model,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        CheckpointError: the file is missing, no JSON, or no object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: {path.name} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got {type(value).__name__}, expected an object")
    return value


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: weight_map is missing or empty")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise CheckpointError(f"{path}: {missing[0]:.200} is missing, {index.name} names it")
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: got no model*.safetensors, expected at least one")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: got something that is no file (a broken link?), expected weights")
    return files
