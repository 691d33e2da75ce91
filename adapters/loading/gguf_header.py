"""The header of a GGUF file: metadata, and where the tensors lie. docs/gguf.md says what is taken.

MLX has a reader of its own, in C, which believes what a file says of itself. Everything is checked here, against the
file's size and in Python, and MLX never sees the file.
"""

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.loading.gguf_types import MAGIC, TensorType, tensor_type
from posttrainllm.adapters.loading.gguf_values import ValueReader, shown_value
from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 2**28  # beyond it a header is none, and reading it would fill the memory
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32  # bytes: of a key with a value, and of a tensor's entry
_MOST_AXES, _MOST_ELEMENTS = 4, 2**60
_ALIGNMENT, _MOST_ALIGNMENT = 32, 2**20


@attrs.frozen(kw_only=True)
class GgufTensor:
    """A tensor as the header states it, its place checked."""

    name: str
    shape: tuple[int, ...]
    """Rows first: [out, in] of a matrix. The file has it the other way round."""
    type: TensorType
    offset: int
    """Bytes from the start of the file."""

    @property
    def size(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) // self.type.block * self.type.size


@attrs.frozen(kw_only=True)
class GgufHeader:
    """What a file says of its model; read, but not yet understood."""

    path: Path
    metadata: Mapping[str, Any] = attrs.field(repr=False)
    """Numbers, texts, lists of texts, and one-dimensional numpy arrays of numbers, by key."""
    tensors: Mapping[str, GgufTensor] = attrs.field(repr=False)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check everything but the weights.

    Args:
        path: the file.

    Returns:
        What it says.

    Raises:
        CheckpointError: the file is torn, of another version, or contradicts itself; with got and expected.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        magic = stream.read(len(MAGIC))
        if magic != MAGIC:
            raise CheckpointError(f"{path}: magic: got {magic!r}, expected {MAGIC!r}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            reader = ValueReader(path, memoryview(mapped)[:_MOST_HEADER_BYTES], size, start=len(MAGIC))
            try:
                return _read(path, reader, size)
            finally:
                reader.release()


def _read(path: Path, reader: ValueReader, size: int) -> GgufHeader:
    version = reader.number("I", "version")
    if version not in _VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = " (the file is big-endian)" if turned in (1, *_VERSIONS) else ""
        raise CheckpointError(f"{path}: version: got {version}{why}, expected 2 or 3, little-endian")
    tensor_count = _count(path, reader, "tensors", _LEAST_TENSOR, size)
    entry_count = _count(path, reader, "metadata entries", _LEAST_ENTRY, size)
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = reader.name("a key")
        if key in metadata:
            raise CheckpointError(f"{path}: metadata: got {shown(key)} twice, expected it once")
        metadata[key] = reader.value(key)
    stated = [_tensor(path, reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment: got {shown_value(alignment)}, expected a power of two")
    start = -(-reader.place // alignment) * alignment
    return GgufHeader(path=path, metadata=metadata, tensors=_placed(path, stated, start, alignment, size))


def _count(path: Path, reader: ValueReader, what: str, least: int, size: int) -> int:
    found = reader.number("Q", f"the number of {what}")
    if found * least > size:
        raise CheckpointError(f"{path}: got {found} {what} in {size} bytes, expected {size // least} at most")
    return found


def _tensor(path: Path, reader: ValueReader) -> GgufTensor:
    """An entry whose offset is still that behind the header."""
    name = reader.name("a tensor's name")
    axes = reader.number("I", f"the axes of {shown(name)}")
    if not 0 < axes <= _MOST_AXES:
        raise CheckpointError(f"{path}: {shown(name)}: got {axes} axes, expected 1 to {_MOST_AXES}")
    shape = tuple(reader.number("Q", f"the shape of {shown(name)}") for _ in range(axes))[::-1]
    if not all(shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise CheckpointError(f"{path}: {shown(name)}: shape: got {list(shape)}, expected sizes from 1 up")
    number = reader.number("I", f"the type of {shown(name)}")
    found = tensor_type(number)
    if found is None:
        raise CheckpointError(f"{path}: {shown(name)}: type: got {number}, expected one that is known here")
    if shape[-1] % found.block:
        raise CheckpointError(
            f"{path}: {shown(name)}: got rows of {shape[-1]}, expected a multiple of {found.block}, "
            f"a block of {found.name}"
        )
    return GgufTensor(name=name, shape=shape, type=found, offset=reader.number("Q", f"the offset of {shown(name)}"))


def _placed(path: Path, stated: list[GgufTensor], start: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """The tensors by name with their places in the file, no two of which share a byte."""
    found: dict[str, GgufTensor] = {}
    for tensor in stated:
        if tensor.name in found:
            raise CheckpointError(f"{path}: tensors: got {shown(tensor.name)} twice, expected it once")
        if tensor.offset % alignment:
            raise CheckpointError(
                f"{path}: {shown(tensor.name)}: offset: got {tensor.offset}, expected a multiple of {alignment}"
            )
        found[tensor.name] = attrs.evolve(tensor, offset=start + tensor.offset)
    end = 0
    for tensor in sorted(found.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise CheckpointError(
                f"{path}: {shown(tensor.name)} overlaps another: got byte {tensor.offset}, expected {end} or more"
            )
        end = tensor.offset + tensor.size
        if end > size:
            raise CheckpointError(
                f"{path}: truncated: got {size} bytes, expected {end} for the tensor {shown(tensor.name)}"
            )
    return found
