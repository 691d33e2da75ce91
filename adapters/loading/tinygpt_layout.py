"""Which tensors a `.tinygpt` file has, and where in it they lie."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["ManifestEntry", "TensorPlace", "check_tensors", "item_bytes", "place_tensors", "read_manifest"]

_TRAINING_COPIES = 3  # weight, Adam's m, Adam's v
_MOST_FLOATS = 2**60  # sums and products of sizes stay numbers that can be printed


@attrs.frozen(kw_only=True)
class ManifestEntry:
    """A tensor as the header states it."""

    name: str
    shape: tuple[int, ...]
    float_offset: int | None
    """Where it starts, in elements; None where the file does not say."""


@attrs.frozen(kw_only=True)
class TensorPlace:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """As the manifest states it: [out, in] of a linear layer, which is stored the other way round."""
    offset: int
    """Bytes from the start of the file; of any alignment."""


def read_manifest(path: Path, entries: Any) -> list[ManifestEntry]:
    """Check the entries of a manifest, each for itself.

    Args:
        path: the file, for messages.
        entries: what the header has under `manifest`.

    Returns:
        The same, no name twice.

    Raises:
        CheckpointError: with got and expected.
    """
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(f"{path}: manifest: got {shown(entries)}, expected a list of tensors")
    found: dict[str, ManifestEntry] = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: manifest: got {shown(entry)}, expected an object with a name")
        if name in found:
            raise CheckpointError(f"{path}: manifest: got {shown(name)} twice, expected it once")
        shape, offset = entry.get("shape"), entry.get("floatOffset")
        if not isinstance(shape, list) or not all(type(count) is int and 0 < count < _MOST_FLOATS for count in shape):
            raise CheckpointError(f"{path}: {shown(name)}: shape: got {shown(shape)}, expected sizes from 1 up")
        if offset is not None and (type(offset) is not int or not 0 <= offset < _MOST_FLOATS):
            raise CheckpointError(f"{path}: {shown(name)}: floatOffset: got {shown(offset)}, expected 0 or more")
        found[name] = ManifestEntry(name=name, shape=tuple(shape), float_offset=offset)
    return list(found.values())


def check_tensors(
    path: Path, manifest: Sequence[ManifestEntry], *, layers: int, hidden: int, context: int, mlp: int, vocab_size: int
) -> None:
    """Hold the manifest against the config: these tensors, in these shapes, and no other ones.

    Args:
        path: the file, for messages.
        manifest: of `read_manifest`.
        layers: L.
        hidden: N.
        context: positions.
        mlp: rows of the MLP's first matrix.
        vocab_size: V.

    Raises:
        CheckpointError: one is missing, or has another shape; with got and expected.
        UnsupportedModelError: there is one that the plain model does not have.
    """
    if layers > len(manifest):  # before a table of all of them is made
        raise CheckpointError(f"{path}: manifest: got {len(manifest)} tensors, expected those of {layers} layers")
    stated = {entry.name: entry.shape for entry in manifest}
    expected = _tensor_shapes(layers, hidden, context, mlp, vocab_size)
    for name, shape in expected.items():
        if name not in stated:
            raise CheckpointError(f"{path}: manifest: {name} is missing, expected it with the shape {list(shape)}")
        if stated[name] != shape:
            raise CheckpointError(
                f"{path}: {name}: got the shape {shown(list(stated[name]))}, expected {list(shape)} by the config"
            )
    others = stated.keys() - expected.keys()
    if others:
        raise UnsupportedModelError(
            f"{path}: manifest: got {shown(min(others))}, expected the {len(expected)} tensors of the config alone"
        )


def place_tensors(
    path: Path, header: Mapping[str, Any], manifest: Sequence[ManifestEntry], *, start: int, size: int
) -> tuple[str, dict[str, TensorPlace]]:
    """Find every tensor in the body, whose layout the header describes.

    A training body has a weight and Adam's two moments behind each other for every tensor, in float32; every other body
    is one buffer of float16, whatever `weightDtype` says.

    Args:
        path: the file, for messages.
        header: with `weightDtype` and `includesOptimizerState`.
        manifest: checked against the config.
        start: byte at which the body starts.
        size: of the file.

    Returns:
        "float32" or "float16", and the places by name.

    Raises:
        CheckpointError: the tensors overlap, or do not end where the file does.
    """
    stored, state = header.get("weightDtype"), header.get("includesOptimizerState")
    if stored not in (None, "fp32", "fp16"):
        raise CheckpointError(f"{path}: weightDtype: got {shown(stored)}, expected fp32 or fp16")
    if not isinstance(state, bool | None):
        raise CheckpointError(f"{path}: includesOptimizerState: got {shown(state)}, expected true or false")
    training = stored != "fp16" and state is not False
    dtype = "float32" if training else "float16"
    item = item_bytes(dtype)
    places, behind = {}, start
    for entry in manifest:
        first = behind if training or entry.float_offset is None else start + entry.float_offset * item
        places[entry.name] = TensorPlace(shape=entry.shape, offset=first)
        behind = first + math.prod(entry.shape) * item * (_TRAINING_COPIES if training else 1)
    end = behind if training else _end_of(path, places, item)
    if end != size:
        problem = "truncated" if end > size else "longer than its tensors"
        raise CheckpointError(f"{path}: {problem}: got {size} bytes, expected {end}")
    return dtype, places


def item_bytes(dtype: str) -> int:
    """Bytes of an element of "float32" or "float16"."""
    return 4 if dtype == "float32" else 2


def _end_of(path: Path, places: Mapping[str, TensorPlace], item: int) -> int:
    """Where the last tensor of a buffer ends, no two of which share a byte."""
    end = 0
    for name, place in sorted(places.items(), key=lambda entry: entry[1].offset):
        if place.offset < end:
            raise CheckpointError(f"{path}: {name} overlaps another: got byte {place.offset}, expected {end} or more")
        end = place.offset + math.prod(place.shape) * item
    return end


def _tensor_shapes(layers: int, hidden: int, context: int, mlp: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model by name, with its shape as a manifest states it."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (vocab_size, hidden),
        "position_embedding.weight": (context, hidden),
    }
    linears = {f"attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    linears |= {"mlp.fc_in": (mlp, hidden), "mlp.fc_out": (hidden, mlp)}
    for index in range(layers):
        for name in ("ln1", "ln2"):
            shapes |= dict.fromkeys((f"blocks.{index}.{name}.weight", f"blocks.{index}.{name}.bias"), (hidden,))
        for name, shape in linears.items():
            shapes |= {f"blocks.{index}.{name}.weight": shape, f"blocks.{index}.{name}.bias": shape[:1]}
    return shapes | dict.fromkeys(("ln_final.weight", "ln_final.bias"), (hidden,))
