"""Starting MLX once, in the right order: BLAS first, then the import, then the compiler question."""

import importlib.metadata
import logging
import os
import platform
import sys
from pathlib import Path

import attrs

from posttrainllm.adapters.loading.blas import compiler, load_blas
from posttrainllm.adapters.loading.kernel_header import precompile
from posttrainllm.kernel.errors import BackendError

__all__ = ["LOGGER", "Runtime", "compile_obstacle", "start"]

LOGGER = logging.getLogger("posttrainllm")


@attrs.frozen(kw_only=True)
class Runtime:
    """What this process computes with."""

    device: str
    """"cpu" or "gpu"."""
    device_name: str
    mlx_version: str
    versions: dict[str, str]
    """Of posttrainllm, mlx and mlx-lm."""
    blas: str | None
    """Name of the BLAS under the CPU backend; None on a GPU, where it plays no part."""
    fast_float32: bool
    """Whether float32 products on the CPU go through a real BLAS."""
    compiled: bool
    """False where the CPU backend has no C++ compiler: steps then run operation by operation."""

    @property
    def scalar_exp(self) -> bool:
        """Whether MLX's `exp` is a call an element: on x86 CPUs. Compiled or not, so that a step has the same bits."""
        return self.device == "cpu" and platform.machine().lower() in ("x86_64", "amd64")

    @property
    def description(self) -> str:
        """One line for `--version` and bug reports."""
        parts = [f"mlx {self.mlx_version}", f"device {self.device} ({self.device_name})"]
        if self.blas is not None:
            parts.append(f"BLAS {self.blas}")
        if not self.compiled:
            parts.append("uncompiled")
        return ", ".join(parts)


_runtime: Runtime | None = None


def start() -> Runtime:
    """Import MLX and say what it runs on; later calls return the first answer.

    Returns:
        The runtime of this process.

    Raises:
        BackendError: MLX has no backend here.
    """
    global _runtime
    if _runtime is None:
        _runtime = _start()
    return _runtime


def _start() -> Runtime:
    # the CUDA wheel brings its own library: a CPU BLAS under it would only take threads and memory
    blas = None if _cuda_wheel() else load_blas()
    try:
        import mlx.core as mx
    except ImportError as error:
        if sys.platform == "linux":
            hint = "install one backend: pip install 'posttrainllm[cpu]' or 'posttrainllm[cuda13]'"
        else:
            hint = "reinstall it: pip install --force-reinstall mlx"
        raise BackendError(f"MLX cannot be imported ({str(error).splitlines()[0]}); {hint}") from None
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    problems = []
    obstacle = None if on_gpu or sys.platform == "darwin" else compile_obstacle()
    if obstacle is None and not on_gpu and sys.platform == "linux":
        precompile(_kernels(), Path(mx.__file__).parent / "include")
    if obstacle is not None:
        mx.disable_compile()  # mlx-lm's own modules compile small functions too
        problems.append(f"{obstacle}, the CPU backend runs uncompiled and slower")
    if blas is not None and blas.warning and not on_gpu:
        problems.append(blas.warning)
    if problems:
        LOGGER.warning("; ".join(problems))
    return Runtime(
        device="gpu" if on_gpu else "cpu",
        device_name=str(mx.device_info().get("device_name", "unknown")),
        mlx_version=importlib.metadata.version("mlx"),
        versions={name: _version(name) for name in ("posttrainllm", "mlx", "mlx-lm")},
        blas=None if on_gpu or blas is None else blas.name,
        fast_float32=on_gpu or (blas is not None and blas.fast),
        compiled=obstacle is None,
    )


def compile_obstacle() -> str | None:
    """Why MLX cannot build kernels for the CPU, None where it can: it calls g++ and keeps them in the temporary
    directory.
    """
    if compiler() is None:
        return "no C++ compiler (g++)"
    kept = _kernels()
    try:
        if kept.parents[2].is_dir():  # MLX itself falls back to /tmp where there is none
            kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{kept} cannot be made ({error.strerror})"
    return None if not kept.is_dir() or os.access(kept, os.W_OK) else f"{kept} cannot be written to"


def _kernels() -> Path:
    """Where MLX keeps the kernels that it builds for the CPU."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / "mlx" / _version("mlx") / "cpu"


def _cuda_wheel() -> bool:
    names = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
    return any(_version(name) != "not installed" for name in names)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
