"""A model's directory that is written whole or not at all."""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from posttrainllm.kernel.errors import CheckpointError, UsageError

__all__ = ["new_directory", "write_json", "write_weights"]

_MOST_FILE_BYTES = 4 * 2**30  # of one file of weights; no more than that has to be in memory
_Arrays = dict[str, mx.array]


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Write beside the place where a directory is to be, and move it there at the end.

    Args:
        out: does not exist, or is an empty directory.

    Yields:
        Where to write.

    Raises:
        UsageError: `out` is taken.
        CheckpointError: it cannot be written.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"--out: got {out}, which is there already, expected a new or an empty directory")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            made = Path(folder) / "model"
            made.mkdir()
            yield made
            made.replace(out)  # an empty directory may be replaced
    except (OSError, RuntimeError) as error:  # the second is MLX's, of a full disk
        reason = getattr(error, "strerror", None) or error  # without the folder beside it, which is gone
        raise CheckpointError(f"{out}: cannot be written: {reason}") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object, an entry a line."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_weights(folder: Path, arrays: Iterable[tuple[str, mx.array]]) -> int:
    """Write tensors as safetensors files, in several and with an index where they are large.

    Args:
        folder: where to write.
        arrays: by name; they are taken one after the other.

    Returns:
        Bytes of all tensors.
    """
    parts: list[tuple[Path, list[str]]] = []
    waiting: _Arrays = {}
    total = size = 0
    for name, array in arrays:
        if waiting and size + array.nbytes > _MOST_FILE_BYTES:
            parts.append(_write_part(folder, len(parts), waiting))
            waiting, size = {}, 0
        waiting[name] = array
        size += array.nbytes
        total += array.nbytes
    parts.append(_write_part(folder, len(parts), waiting))
    if len(parts) == 1:
        parts[0][0].rename(folder / "model.safetensors")
        return total
    weight_map: dict[str, str] = {}
    for index, (file, names) in enumerate(parts, start=1):
        named = file.rename(folder / f"model-{index:05d}-of-{len(parts):05d}.safetensors")
        weight_map |= dict.fromkeys(names, named.name)
    index_of_all = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index_of_all)
    return total


def _write_part(folder: Path, index: int, arrays: _Arrays) -> tuple[Path, list[str]]:
    file = folder / f"part-{index}.safetensors"
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    return file, list(arrays)
