"""Whether a run fits, said before anything is allocated."""

import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.kernel.errors import MemoryLimitError

__all__ = ["Forecast", "available_bytes", "cast_bytes", "check_room", "check_weights", "dtype_size"]

_SPARE_BYTES = 2**30
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_size(dtype: str) -> int:
    """Bytes of one element."""
    return _SIZES[dtype]


def available_bytes() -> int | None:
    """Bytes that MLX's device can still take, None where nothing says.

    Metal reports the working set it recommends; CUDA and the CPU count what is free now, a container's own limit
    included.
    """
    info = mx.device_info()
    for name in ("free_memory", "max_recommended_working_set_size"):
        if name in info:
            return int(info[name]) - (mx.get_active_memory() if name.startswith("max") else 0)
    free = _meminfo("MemAvailable")
    limits = [_container_room(), free]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def cast_bytes(checkpoint: Checkpoint, dtype: str) -> float:
    """Bytes of a checkpoint's tensors once the floating ones are cast; packed ones keep their bits."""
    grown = sum(size * (dtype_size(dtype) / dtype_size(stored) - 1) for stored, size in checkpoint.float_bytes.items())
    return checkpoint.weight_bytes + grown


def check_weights(checkpoints: Sequence[Checkpoint], dtypes: Sequence[str]) -> None:
    """Refuse models whose weights cannot fit.

    Args:
        checkpoints: what is to be loaded.
        dtypes: what each is cast to.

    Raises:
        MemoryLimitError: with the numbers.
    """
    need = sum(cast_bytes(checkpoint, dtype) for checkpoint, dtype in zip(checkpoints, dtypes, strict=True))
    _check(need, "the weights", available_bytes())


def check_room(need: float, what: str) -> None:
    """Refuse what cannot fit beside what is in memory now.

    Args:
        need: bytes.
        what: takes them, for the message.

    Raises:
        MemoryLimitError: with the numbers.
    """
    _check(need, what, available_bytes())


@attrs.frozen(kw_only=True)
class Forecast:
    """What an engine needs, in bytes; the models' weights are in memory when it is made."""

    weights: tuple[int, ...]
    """Of the target, and of the draft where there is one."""
    kv: tuple[int, ...]
    """The caches of one row, of the same models."""
    rows: int
    capacity: int
    copies: int = 0
    """What a step copies of them and keeps until it is done."""
    prefixes: int = 0
    """What the chunks of earlier prompts may take."""
    free: int | None = attrs.field(factory=lambda: available_bytes())  # looked up when it is made
    """What the device can still take; None where nothing says."""

    @property
    def caches(self) -> int:
        """All rows, the one that a prompt is read into, and what a step copies."""
        return sum(self.kv) * (self.rows + 1) + self.copies

    @property
    def spare(self) -> int:
        """What may be spent on keeping prompts where nobody says: a quarter of what is left beside all, 1 GiB at most.

        1 GiB where nothing says what is free.
        """
        left = _SPARE_BYTES if self.free is None else (self.free - self.caches) // 4
        return min(max(left, 0), _SPARE_BYTES)

    def check(self) -> None:
        """Refuse caches that cannot fit.

        Raises:
            MemoryLimitError: with the numbers.
        """
        kept = f" and {self.prefixes / 1e9:.3f} GB of prompts that are kept" if self.prefixes else ""
        _check(self.caches + self.prefixes, f"the key/value caches (B={self.rows}, C={self.capacity}){kept}", self.free)

    @property
    def description(self) -> str:
        """One line for `--verbose`."""

        def parts(sizes: tuple[int, ...]) -> str:
            names = ("target", "draft")[: len(sizes)]
            return ", ".join(f"{name} {size / 1e9:.3f}" for name, size in zip(names, sizes, strict=True))

        copies = f", {self.copies / 1e9:.3f} GB of it copies that a step makes" if self.copies else ""
        kept = f" | prompts kept: at most {self.prefixes / 1e9:.3f} GB" if self.prefixes else ""
        free = "unknown" if self.free is None else f"{self.free / 1e9:.2f} GB"
        return (
            f"memory: weights {sum(self.weights) / 1e9:.3f} GB ({parts(self.weights)}) | "
            f"caches {self.caches / 1e9:.3f} GB at B={self.rows}, C={self.capacity} and one more row to read a prompt "
            f"into (a row: {parts(self.kv)}){copies}{kept} | free beside the weights: {free}"
        )


def _check(need: float, what: str, free: int | None) -> None:
    if free is not None and need > free:
        raise MemoryLimitError(
            f"not enough memory for {what}: got {free / 1e9:.2f} GB free, expected {need / 1e9:.2f} GB"
        )


def _meminfo(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container_room() -> int | None:
    """What a control group still allows; file pages it can drop at any time do not count as used."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - int(used) + int(statistics.get("inactive_file", 0)) if limit.isdigit() else None
