"""The header of a `.tinygpt` checkpoint: one file with config, tensors and step. docs/tinygpt.md has the format.

Everything that it says is checked, against itself and against the file's size, before a weight is read.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.loading.tinygpt_layout import (
    TensorPlace,
    check_tensors,
    item_bytes,
    place_tensors,
    read_manifest,
)
from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["TinyGptHeader", "is_tinygpt", "read_header"]

_MAGIC, _VERSION = b"TGPT", 2
_PREFIX, _STEP_BYTES = 12, 4  # magic, version and header length; the step counter behind the header
_MOST_HEADER_BYTES = 2**28  # beyond it a length is no header's, and reading it would fill the memory
_LONGEST_PATH = 4096  # characters: what Linux takes
_MOST_POSITIONS = 2**30  # lengths are int32, and sums of two of them must be, too
_SIZES = ("layers", "dModel", "ctx", "heads", "dMlp")
_BYTE_VOCABULARY = 256
# beside null and false, what each switch may be where the model is the plain one
_OFF: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("nExperts", "moeTopK"), (0, 1)),
    **dict.fromkeys(("slidingWindow", "kviBits", "streamingSink", "streamingWindow"), (0,)),
    **dict.fromkeys(("useMoD", "useDifferentialAttention", "useYOCO", "useDeepNorm", "useEmbeddingRMSNorm"), ()),
}


@attrs.frozen(kw_only=True)
class TinyGptHeader:
    """What a file says of its model, checked."""

    path: Path
    layers: int
    hidden: int
    """N: size of the residual stream."""
    heads: int
    mlp: int
    """Rows of the MLP's first matrix."""
    context: int
    vocab_size: int
    """V: rows of the embedding."""
    tokenizer_source: str | None
    """Directory of a tokenizer.json, as the file names it; None where tokens are bytes."""
    dtype: str
    """"float32" or "float16", of the weights as stored."""
    tensors: Mapping[str, TensorPlace] = attrs.field(repr=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored, an optimizer's state left out."""
        return sum(math.prod(place.shape) for place in self.tensors.values()) * item_bytes(self.dtype)


def is_tinygpt(path: Path) -> bool:
    """Whether a path is meant as such a file: by its name, or by how it begins."""
    if not path.is_file():
        return False
    if path.suffix == ".tinygpt":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:  # what may not be read is said by whoever reads it
        return False


def read_header(path: Path) -> TinyGptHeader:
    """Read and check everything but the weights.

    Args:
        path: the file.

    Returns:
        What it says.

    Raises:
        CheckpointError: the file is torn, of another version, or contradicts itself; with got and expected.
        UnsupportedModelError: a switch of the config is on that is not implemented; it is named.
    """
    size = path.stat().st_size
    header, start = _read_json(path, size)
    config = header.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: config: got {shown(config)}, expected an object")
    _check_switches(path, config)
    layers, hidden, context, heads, mlp = (_size(path, config, name) for name in _SIZES)
    vocab_size = _BYTE_VOCABULARY if config.get("vocabSize") is None else _size(path, config, "vocabSize")
    if hidden % heads:
        raise CheckpointError(f"{path}: dModel: got {hidden}, expected a multiple of the {heads} heads")
    if context < 2 or vocab_size < 2:
        raise CheckpointError(f"{path}: ctx and vocabSize: got {context} and {vocab_size}, expected 2 or more")
    manifest = read_manifest(path, header.get("manifest"))
    check_tensors(path, manifest, layers=layers, hidden=hidden, context=context, mlp=mlp, vocab_size=vocab_size)
    dtype, tensors = place_tensors(path, header, manifest, start=start, size=size)
    return TinyGptHeader(
        path=path,
        layers=layers,
        hidden=hidden,
        heads=heads,
        mlp=mlp,
        context=context,
        vocab_size=vocab_size,
        tokenizer_source=_tokenizer_source(path, config),
        dtype=dtype,
        tensors=tensors,
    )


def _read_json(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header, and the byte at which the tensors begin."""
    with path.open("rb") as stream:
        prefix = stream.read(_PREFIX)
        magic = prefix[: len(_MAGIC)]
        if magic != _MAGIC:
            raise CheckpointError(f"{path}: magic: got {magic!r}, expected {_MAGIC!r}")
        if len(prefix) < _PREFIX:
            raise CheckpointError(f"{path}: truncated: got {size} bytes, expected {_PREFIX} before the header")
        version, length = struct.unpack("<II", prefix[len(_MAGIC) :])
        if version != _VERSION:
            why = " (version 1 has no manifest)" if version == 1 else ""
            raise CheckpointError(f"{path}: version: got {version}{why}, expected {_VERSION}")
        start = _PREFIX + length + _STEP_BYTES
        if start > size:
            raise CheckpointError(f"{path}: truncated: got {size} bytes, expected {start} before the tensors")
        if length > _MOST_HEADER_BYTES:
            raise CheckpointError(f"{path}: header: got {length} bytes, expected at most {_MOST_HEADER_BYTES}")
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header: got what is no JSON, expected an object ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header: got {shown(header)}, expected an object")
    return header, start


def _check_switches(path: Path, config: Mapping[str, Any]) -> None:
    for name, off in _OFF.items():
        value = config.get(name)
        if not (value is None or value is False or (type(value) is int and value in off)):
            raise UnsupportedModelError(f"{path}: {name}: got {shown(value)}, expected it off: it is not implemented")


def _size(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 0 < value <= _MOST_POSITIONS:
        raise CheckpointError(
            f"{path}: {name}: got {shown(value)}, expected a whole number from 1 to {_MOST_POSITIONS}"
        )
    return value


def _tokenizer_source(path: Path, config: Mapping[str, Any]) -> str | None:
    source = config.get("tokenizerSource")
    if source is None:
        return None
    # JSON can write halves of characters, which no path has
    if not isinstance(source, str) or not 0 < len(source) <= _LONGEST_PATH or not source.isprintable():
        raise CheckpointError(f"{path}: tokenizerSource: got {shown(source)}, expected the path of a directory")
    return source
