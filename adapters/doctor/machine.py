"""What this machine decodes with: device, MLX, compiler, BLAS, memory, the folder where results are kept."""

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

from posttrainllm.adapters.doctor.findings import Finding
from posttrainllm.adapters.loading.blas import ENVIRONMENT, Blas, compiler
from posttrainllm.adapters.runtime import Runtime
from posttrainllm.adapters.user_cache import user_cache

__all__ = ["blas_finding", "cache_finding", "compiler_finding", "device_finding", "memory_finding", "mlx_finding"]

_GIB = 2**30
_BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")  # distributions that bring MLX's library
_LITTLE_BYTES = _GIB  # below it no model but the embedded ones will fit


def mlx_finding(runtime: Runtime) -> Finding:
    """MLX, its backend, and the packages beside it."""
    backends = [name for name in _BACKENDS if _installed(name)]
    versions = ", ".join(f"{name} {version}" for name, version in runtime.versions.items())
    facts = {"versions": dict(runtime.versions), "backends": backends}
    found = f"{versions}; backend {' and '.join(backends) or 'of the mlx package'}"
    if len(backends) > 1:
        return Finding(
            name="versions",
            status="slow",
            found=found,
            why="they install the same library file, and the later one has overwritten the other",
            remedy=f"pip uninstall {' '.join(backends)}, then install one",
            facts=facts,
        )
    return Finding(name="versions", status="ok", found=found, facts=facts)


def device_finding(runtime: Runtime) -> Finding:
    """What MLX computes on, and whether a GPU beside it is idle."""
    found = f"{runtime.device} ({runtime.device_name})"
    facts = {"device": runtime.device, "device_name": runtime.device_name}
    if runtime.device == "cpu" and sys.platform == "linux" and _nvidia_gpu():
        return Finding(
            name="device",
            status="slow",
            found=found,
            why="there is an NVIDIA GPU, and the installed backend of MLX computes on the CPU",
            remedy="in a new environment: pip install 'posttrainllm[cuda13]'",
            facts=facts,
        )
    if runtime.device == "cpu" and sys.platform == "darwin":
        return Finding(
            name="device",
            status="slow",
            found=found,
            why="MLX found no Metal device",
            remedy="run it with a native (arm64) Python, outside a virtual machine",
            facts=facts,
        )
    return Finding(name="device", status="ok", found=found, facts=facts)


def compiler_finding(runtime: Runtime, obstacle: str | None) -> Finding:
    """Whether MLX's CPU backend can build kernels.

    Args:
        runtime: of this process.
        obstacle: of `compile_obstacle`.

    Returns:
        The finding; a GPU's backend needs no compiler.
    """
    program = compiler()
    found = program or "none"
    facts = {"compiler": program, "compiled": runtime.compiled}
    if runtime.device != "cpu" or obstacle is None:
        needed = "" if runtime.device == "cpu" else ", not needed on a GPU"
        return Finding(name="compiler", status="ok", found=f"{found}{needed}", facts=facts)
    if program is None:
        remedy = "install g++: apt install g++, or dnf install gcc-c++"
    else:
        remedy = "set TMPDIR to a directory that can be written to"
    return Finding(
        name="compiler",
        status="slow",
        found=found,
        why=f"{obstacle}: every step runs operation by operation",
        remedy=remedy,
        facts=facts,
    )


def blas_finding(runtime: Runtime, blas: Blas | None) -> Finding:
    """What multiplies matrices on the CPU, and where it comes from.

    Args:
        runtime: of this process.
        blas: of `load_blas`; None where the device is a GPU.

    Returns:
        The finding.
    """
    if blas is None or runtime.device != "cpu":
        return Finding(name="BLAS", status="ok", found="not needed on a GPU", facts={"blas": None, "fast": True})
    facts = {"blas": blas.name, "fast": blas.fast}
    if blas.fast:
        return Finding(name="BLAS", status="ok", found=blas.name, facts=facts)
    chosen = os.environ.get(ENVIRONMENT, "auto").lower()
    if chosen == "off":
        remedy = f"unset {ENVIRONMENT}"
    elif compiler() is None:
        remedy = "install g++, which builds the shim in front of OpenBLAS"
    elif chosen == "system":
        remedy = f"apt install libopenblas0-pthread, or unset {ENVIRONMENT}"
    else:
        remedy = "pip install 'posttrainllm[cpu]', which brings scipy-openblas32; or apt install libopenblas0-pthread"
    why = "products in float32 cost in proportion to their rows, so that verifying K tokens costs K tokens"
    if blas.warning:
        why = f"{blas.warning}; {why}"
    return Finding(name="BLAS", status="slow", found=blas.name, why=why, remedy=remedy, facts=facts)


def memory_finding(free: int | None, need: float) -> Finding:
    """Whether there is memory to decode in.

    Args:
        free: bytes that the device can still take; None where nothing says.
        need: bytes of the embedded pair's weights, once cast.

    Returns:
        The finding.
    """
    facts = {"free_bytes": free, "embedded_bytes": int(need)}
    if free is None:
        return Finding(name="memory", status="note", found="unknown", why="nothing says", remedy="none", facts=facts)
    found = f"{free / _GIB:.2f} GiB free"
    remedy = "end other processes, or raise the container's limit"
    if free < need:
        why = f"the embedded pair takes {need / _GIB:.2f} GiB"
        return Finding(name="memory", status="broken", found=found, why=why, remedy=remedy, facts=facts)
    if free < _LITTLE_BYTES:
        why = "hardly more than the embedded pair will fit"
        return Finding(name="memory", status="note", found=found, why=why, remedy=remedy, facts=facts)
    return Finding(name="memory", status="ok", found=found, facts=facts)


def cache_finding() -> Finding:
    """Whether what is built and measured can be kept for the next run."""
    folder = user_cache("doctor")
    root = None if folder is None else folder.parent
    facts = {"cache": None if root is None else str(root)}
    problem = "the user has no home" if root is None else _unwritable(root)
    if problem is None:
        return Finding(name="cache", status="ok", found=str(root), facts=facts)
    return Finding(
        name="cache",
        status="slow",
        found=str(root or "none"),
        why=f"{problem}: the BLAS's shim, kernels, verdicts and costs are made anew in every run",
        remedy="set XDG_CACHE_HOME to a directory that can be written to",
        facts=facts,
    )


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written there; what is missing counts by the nearest folder that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no directory"
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
