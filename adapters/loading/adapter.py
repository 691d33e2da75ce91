"""Directories of LoRA and DoRA adapters, checked before any weight is read.

Two formats: mlx-lm's (adapters.safetensors) and that of PEFT (adapter_model.safetensors), which config.json of the same
directory tells apart. Nothing here imports MLX.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import attrs

from posttrainllm.adapters.loading.checkpoint import read_json, readable
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.safetensors_header import TensorEntry, read_tensor_entries
from posttrainllm.kernel.errors import CheckpointError

__all__ = [
    "CONFIG",
    "Adapter",
    "AdapterKind",
    "Update",
    "checked",
    "count_of",
    "number_of",
    "read_adapter",
    "read_entries",
]

AdapterKind: TypeAlias = Literal["lora", "dora", "full"]
CONFIG = "adapter_config.json"
_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_LAYER = re.compile(r"(?:^|.*\.)layers\.(\d+)\.(.+)")


@attrs.frozen(kw_only=True)
class Update:
    """What one matrix [out, in] gets: y + scale * (x A) B, and with a magnitude a norm for each row."""

    rank: int
    """R."""
    scale: float
    a: str
    """Name of the tensor A: [in, R], or [R, in] where `turned`."""
    b: str
    """B: [R, out], or [out, R] where `turned`."""
    magnitude: str | None
    """[out]; None but for DoRA."""


@attrs.frozen(kw_only=True)
class Adapter:
    """A checked directory."""

    name: str
    """As it was given, to find it again."""
    path: Path
    file: Path
    """The tensors."""
    kind: AdapterKind
    """"full": weights that replace the model's own."""
    entries: dict[str, TensorEntry] = attrs.field(repr=False)
    """What the file holds."""
    updates: dict[str, Update] = attrs.field(repr=False)
    """By the name of the module; empty of a full one."""
    turned: bool = False
    """Whether the factors lie as PEFT writes them."""
    last_layers: int | None = None
    """How many layers from the last on it may touch; None for any."""
    keys: frozenset[str] | None = None
    """Which modules it may touch, by their name in a layer or in the model; None for any."""

    @property
    def description(self) -> str:
        """For people."""
        if self.kind == "full":
            return f"{len(self.entries)} tensors of a full fine-tune"
        ranks = sorted({update.rank for update in self.updates.values()})
        name = {"lora": "LoRA", "dora": "DoRA"}[self.kind]
        return f"{name} of rank {', '.join(map(str, ranks))} on {len(self.updates)} matrices"

    def check_place(self, module: str, layers: int) -> None:
        """Refuse a module that its own config leaves out, as mlx-lm does.

        Args:
            module: its name in the model.
            layers: of the model.

        Raises:
            CheckpointError: it is in no layer of the model, or in another one than the config says.
        """
        found = _LAYER.match(module)
        if found is not None and int(found[1]) >= layers:
            self.refuse(f"got an update of {module:.200}, expected layers below {layers}, which is all the model has")
        if found is not None and self.last_layers and int(found[1]) < layers - self.last_layers:
            self.refuse(
                f"got an update of {module:.200}, expected one of the last {self.last_layers} of {layers} layers"
            )
        if self.keys is not None and not {module, found[2] if found is not None else module} & self.keys:
            self.refuse(f"got an update of {module:.200}, expected one of its config's keys")

    def check_shapes(self, module: str, outputs: int, inputs: int) -> None:
        """Hold an update's tensors against the matrix that it is for.

        Args:
            module: its name in the model.
            outputs: rows of the matrix.
            inputs: its columns.

        Raises:
            CheckpointError: with both shapes.
        """
        update = self.updates[module]
        a, b = (inputs, update.rank), (update.rank, outputs)
        self.check_shape(update.a, a[::-1] if self.turned else a)
        self.check_shape(update.b, b[::-1] if self.turned else b)
        if update.magnitude is not None:
            self.check_shape(update.magnitude, (outputs,))

    def check_shape(self, tensor: str, expected: Sequence[int]) -> None:
        """Hold one tensor's shape against what the model needs; CheckpointError with both."""
        got = self.entries[tensor].shape
        if got != tuple(expected):
            self.refuse(f"{tensor:.200}: got the shape {list(got)!r:.100}, expected {list(expected)!r:.100}")

    def refuse(self, text: str) -> NoReturn:
        """A CheckpointError about the tensors."""
        raise CheckpointError(f"{self.file}: {text}")


def read_adapter(name: str | Path) -> Adapter:
    """Check an adapter and describe it.

    Args:
        name: a directory as mlx-lm or PEFT writes it, or an id of the hub.

    Returns:
        The description; no weight is read.

    Raises:
        CheckpointError: something is missing, torn or inconsistent; the text names the file, got and expected.
        UnsupportedModelError: it holds what is not read here.
    """
    from posttrainllm.adapters.loading.adapter_mlx_lm import read_mlx_lm
    from posttrainllm.adapters.loading.adapter_peft import read_peft

    path = locate(name)
    with readable(path, "cannot be read"):
        if not path.is_dir():
            found = "a file" if path.exists() else "nothing there"
            raise CheckpointError(f"{path}: got {found}, expected an adapter's directory with {CONFIG}")
        config = read_json(path / CONFIG)
        adapter = read_peft(path, config) if "peft_type" in config else read_mlx_lm(path, config)
    return attrs.evolve(adapter, name=str(name))


def read_entries(path: Path, name: str) -> tuple[Path, dict[str, TensorEntry]]:
    """Check the file of an adapter's tensors.

    Args:
        path: the directory.
        name: of the file.

    Returns:
        The file and what it holds: floating tensors with as many bytes as their shapes say.

    Raises:
        CheckpointError: it is missing or torn.
    """
    file = path / name
    if not file.is_file():
        raise CheckpointError(f"{path}: {name} is missing")
    entries = read_tensor_entries(file)
    if not entries:
        raise CheckpointError(f"{file}: got no tensor, expected an adapter's")
    for tensor, entry in entries.items():
        if entry.dtype not in _SIZES:
            raise CheckpointError(
                f"{file}: {tensor:.200}: got the type {entry.dtype:.20}, expected one of {', '.join(_SIZES)}"
            )
        if any(size < 1 for size in entry.shape) or math.prod(entry.shape) * _SIZES[entry.dtype] != entry.nbytes:
            raise CheckpointError(
                f"{file}: {tensor:.200}: got {entry.nbytes} bytes, expected those of {list(entry.shape)!r:.100}"
            )
    return file, entries


def checked(path: Path, name: str, value: Any, good: bool, expected: str) -> Any:
    """A value of the config, or one line about it.

    Args:
        path: the adapter's directory.
        name: of the field.
        value: what it holds.
        good: whether that will do.
        expected: for the message.

    Returns:
        The value.

    Raises:
        CheckpointError: it is not good.
    """
    if not good:
        raise CheckpointError(f"{path}/{CONFIG}: {name:.100}: got {value!r:.100}, expected {expected}")
    return value


def count_of(path: Path, name: str, value: Any) -> int:
    """A value of the config that is a whole number from 1 up; arguments and errors are those of `checked`."""
    return int(checked(path, name, value, type(value) is int and value >= 1, "a whole number from 1 up"))


def number_of(path: Path, name: str, value: Any) -> float:
    """A value of the config that is a finite number; arguments and errors are those of `checked`."""
    with suppress(OverflowError):  # of a whole number that no float can hold
        value = float(value) if type(value) is int else value
    good = type(value) is float and math.isfinite(value)
    return float(checked(path, name, value, good, "a finite number"))
