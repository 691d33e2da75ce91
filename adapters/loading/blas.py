"""A real BLAS under MLX's CPU backend.

MLX's CPU wheel links the reference BLAS, whose matrix products cost in proportion to their rows: verifying K tokens
would cost K tokens. A library loaded with RTLD_GLOBAL before MLX replaces it in place. Two sources are tried:

1. the `scipy-openblas32` wheel, behind a shim of three functions built once by the C++ compiler that MLX needs anyway;
2. a system OpenBLAS (Debian and Ubuntu: `libopenblas0-pthread`).

`POSTTRAINLLM_BLAS` chooses: `auto` (default), `wheel`, `system`, or `off`.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

from posttrainllm.kernel.errors import BackendError

__all__ = ["ENVIRONMENT", "Blas", "compiler", "load_blas"]

ENVIRONMENT = "POSTTRAINLLM_BLAS"
_CHOICES = ("auto", "wheel", "system", "off")


@attrs.frozen(kw_only=True)
class Blas:
    """What multiplies float32 matrices on this process's CPU."""

    name: str
    """For people and results, such as "OpenBLAS 0.3.34 (wheel, 2 threads)"."""
    fast: bool
    """False for the reference BLAS, whose cost grows with every row."""
    warning: str | None = None
    """One line for the user when something better was asked for or is within reach."""


_loaded: Blas | None = None


def load_blas() -> Blas:
    """Put a fast BLAS in front of MLX's own. Call before MLX is imported; later calls return the first answer.

    Returns:
        What is in use. Nothing breaks when no library is found: the reference BLAS stays.

    Raises:
        BackendError: the environment variable has an unknown value.
    """
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def compiler() -> str | None:
    """Path of the C++ compiler that MLX's CPU backend calls, None where there is none."""
    return shutil.which("g++")


def _load() -> Blas:
    choice = os.environ.get(ENVIRONMENT, "auto").lower()
    if choice not in _CHOICES:
        raise BackendError(f"{ENVIRONMENT}: got {choice!r}, expected one of {', '.join(_CHOICES)}")
    if sys.platform == "darwin":
        return Blas(name="Accelerate", fast=True)
    if choice == "off":
        return Blas(name=f"reference ({ENVIRONMENT}=off)", fast=False)
    if "mlx.core" in sys.modules:
        return Blas(
            name="reference", fast=False, warning="mlx was imported before posttrainllm: its slow reference BLAS stays"
        )
    sources = {"wheel": _from_wheel, "system": _from_system}
    problems = []
    for source in sources if choice == "auto" else (choice,):
        try:
            return Blas(name=f"OpenBLAS {sources[source]()}", fast=True)
        except _NotFoundError as error:
            problems.append(str(error))
    return Blas(
        name="reference",
        fast=False,
        warning=f"no fast BLAS ({'; '.join(problems)}): float32 on the CPU will be several times slower",
    )


class _NotFoundError(Exception):
    """Why one source gave nothing."""


def _from_wheel() -> str:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise _NotFoundError("scipy-openblas32 is not installed")
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted(folder.glob("libscipy_openblas*.so"))
    if not libraries:
        raise _NotFoundError(f"scipy-openblas32 has no library in {folder}")
    library = _dlopen(libraries[0], ctypes.DEFAULT_MODE)
    _dlopen(_build_shim(libraries[0]), ctypes.RTLD_GLOBAL)
    return _describe(library, "scipy_openblas_", "wheel")


def _from_system() -> str:
    library = _dlopen(Path("libopenblas.so.0"), ctypes.RTLD_GLOBAL)
    return _describe(library, "openblas_", "system")


def _dlopen(path: Path, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        raise _NotFoundError(f"{path.name}: {error}") from None


def _describe(library: ctypes.CDLL, prefix: str, source: str) -> str:
    config = getattr(library, f"{prefix}get_config")
    config.restype = ctypes.c_char_p
    words = config().decode().split()  # such as "OpenBLAS 0.3.34 DYNAMIC_ARCH NO_AFFINITY Haswell MAX_THREADS=64"
    threads = getattr(library, f"{prefix}get_num_threads")()
    return f"{words[1]} ({source}, {threads} thread{'s' if threads != 1 else ''})"


def _build_shim(library: Path) -> Path:
    """Build the shim once for each library and keep it in the user's cache."""
    source = Path(__file__).with_name("cblas_shim.c")
    # the wheel's version stands in the key: an upgrade under the same path must relink
    version = importlib.metadata.version("scipy-openblas32")
    identity = "\0".join([source.read_text(encoding="utf-8"), str(library), version, platform.machine()])
    name = f"cblas_shim-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrainllm"
    if (cache / name).exists():
        return cache / name
    program = compiler()
    if program is None:
        raise _NotFoundError("the shim for scipy-openblas32 needs g++")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        cache = Path(tempfile.mkdtemp(prefix="posttrainllm-"))
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / name
        flags = ["-x", "c", "-O3", "-shared", "-fPIC", "-o", str(built), str(source), "-x", "none", str(library)]
        done = subprocess.run([program, *flags, f"-Wl,-rpath,{library.parent}"], capture_output=True, text=True)
        if done.returncode != 0:
            raise _NotFoundError(f"the shim for scipy-openblas32 did not build: {done.stderr.strip().splitlines()[-1]}")
        built.replace(cache / name)  # atomic: two processes may build at once
    return cache / name
