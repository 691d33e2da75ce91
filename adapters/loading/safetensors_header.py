"""The header of a safetensors file: what is in it, and whether all of it is there."""

import json
import struct
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.kernel.errors import CheckpointError

__all__ = ["TensorEntry", "read_tensor_entries"]


@attrs.frozen(kw_only=True)
class TensorEntry:
    """What the header says of a tensor."""

    dtype: str
    """Code of the format: "F32", "BF16", "U32" and so on."""
    shape: tuple[int, ...]
    nbytes: int


def read_tensor_entries(file: Path) -> dict[str, TensorEntry]:
    """Read a header and hold it against the file's size.

    Args:
        file: it exists.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: it is truncated, torn, or no safetensors file.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{file}: truncated: got {size} bytes, expected {8 + length} for the header alone")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            entries = {name: _entry(entry) for name, entry in tensors.items()}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
            raise CheckpointError(f"{file}: its header is not that of a safetensors file") from None
    if size != 8 + length + end:
        raise CheckpointError(f"{file}: torn: got {size} bytes, expected {8 + length + end}")
    return entries


def _entry(value: dict[str, Any]) -> TensorEntry:
    dtype, shape, (first, last) = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not all(type(number) is int for number in (*shape, first, last)):
        raise ValueError
    return TensorEntry(dtype=dtype, shape=tuple(shape), nbytes=last - first)
