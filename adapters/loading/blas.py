"""A real BLAS under MLX's CPU backend.

MLX's CPU wheel links the reference BLAS, whose matrix products cost in proportion to their rows: verifying K tokens
would cost K tokens. A library loaded with RTLD_GLOBAL before MLX replaces it in place. That library is a shim of ours
(cblas_shim.c says why), built once by the C++ compiler that MLX needs anyway, with an OpenBLAS behind it:

1. that of the `scipy-openblas32` wheel;
2. a system one (Debian and Ubuntu: `libopenblas0-pthread`).

`POSTTRAINLLM_BLAS` chooses: `auto` (default), `wheel`, `system`, or `off`.
"""

import atexit
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

from posttrainllm.adapters.user_cache import user_cache
from posttrainllm.kernel.errors import BackendError

__all__ = ["ENVIRONMENT", "Blas", "compiler", "load_blas", "loaded_shim"]

ENVIRONMENT = "POSTTRAINLLM_BLAS"
_CHOICES = ("auto", "wheel", "system", "off")
# products and sums are to be fused alike in every variant of a loop: the bits of a row rest on it
_FLAGS = ("-x", "c", "-O3", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")


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
_shim: ctypes.CDLL | None = None


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


def loaded_shim() -> ctypes.CDLL | None:
    """The shim of this process, None where another BLAS multiplies."""
    return _shim


def compiler() -> str | None:
    """Path of the C++ compiler that MLX's CPU backend calls, None where there is none."""
    return shutil.which("g++")


def _load() -> Blas:
    choice = (os.environ.get(ENVIRONMENT) or "auto").lower()
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
        warning=f"no fast BLAS ({'; '.join(problems)}): decoding on the CPU will be several times slower",
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
    return _load_behind_shim(str(libraries[0]), "scipy_", "wheel")


def _from_system() -> str:
    return _load_behind_shim("libopenblas.so.0", "", "system")


def _load_behind_shim(name: str, prefix: str, source: str) -> str:
    """Load OpenBLAS for itself and the shim for all; the text names both."""
    global _shim
    library = _dlopen(name, ctypes.DEFAULT_MODE)
    # read when OpenMP is loaded: threads that wait should sleep soon, or they take the CPUs from whoever they wait for
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    shim = _dlopen(str(_build_shim()), ctypes.RTLD_GLOBAL)
    config = getattr(library, f"{prefix}openblas_get_config")
    config.restype = ctypes.c_char_p
    threads = getattr(library, f"{prefix}openblas_get_num_threads")()
    functions = [getattr(library, f"{prefix}{name}") for name in ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")]
    functions.append(getattr(library, f"{prefix}openblas_set_num_threads"))
    shim.shim_bind(*(ctypes.cast(function, ctypes.c_void_p) for function in functions), threads)
    _shim = shim
    version = config().decode().split()[1]  # of words such as "OpenBLAS 0.3.34 DYNAMIC_ARCH NO_AFFINITY Haswell"
    return f"{version} ({source}, {threads} thread{'s' if threads != 1 else ''})"


def _dlopen(name: str, mode: int) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name, mode=mode)
    except OSError as error:
        reason = str(error).removeprefix(f"{name}: ")
        raise _NotFoundError(f"{Path(name).name}: {reason}") from None


def _build_shim() -> Path:
    """Build the shim once and keep it in the user's cache, or for this process where there is none."""
    source = Path(__file__).with_name("cblas_shim.c")
    texts = [file.read_text(encoding="utf-8") for file in (source, source.with_name("cblas_halves.h"))]
    identity = "\0".join([*texts, *_FLAGS, platform.machine()])
    name = f"cblas_shim-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    cache = user_cache("blas")
    try:
        if cache is not None and not (cache / name).exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _compile(source, Path(folder) / name).replace(cache / name)  # atomic: two processes may build at once
    except OSError:  # it cannot be written to
        cache = None
    return _compile(source, Path(_process_folder()) / name) if cache is None else cache / name


def _process_folder() -> str:
    try:
        folder = tempfile.mkdtemp(prefix="posttrainllm-")
    except OSError as error:
        raise _NotFoundError(f"the shim in front of OpenBLAS has no place to be built: {error}") from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(source: Path, target: Path) -> Path:
    program = compiler()
    if program is None:
        raise _NotFoundError("the shim in front of OpenBLAS needs g++")
    command = [program, *_FLAGS, "-o", str(target), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise _NotFoundError(f"{program} does not run: {error.strerror}") from None
    if done.returncode != 0:
        problem = (done.stderr.strip() or "no message").splitlines()[-1]
        raise _NotFoundError(f"the shim in front of OpenBLAS did not build: {problem}")
    return target
