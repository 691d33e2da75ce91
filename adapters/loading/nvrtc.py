"""CUDA source to a cubin, by the compiler that MLX brings, kept on disk."""

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import attrs

from posttrainllm.adapters.messages import collapsed
from posttrainllm.adapters.user_cache import write_whole
from posttrainllm.kernel.errors import BackendError

__all__ = ["Gpu", "compile_cuda", "gpu"]

_ELF = b"\x7fELF"
# of enum CUdevice_attribute
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES = 16, 75, 76, 97


@attrs.frozen(kw_only=True)
class Gpu:
    """What a kernel has to know of the device."""

    multiprocessors: int
    major: int
    """Of the compute capability."""
    minor: int
    shared_bytes: int
    """Shared memory that one block may ask for."""


@functools.cache
def gpu() -> Gpu | None:
    """The first CUDA device; None where there is no driver or no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuInit(0) != 0:
        return None
    found = []
    for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0) != 0:
            return None
        found.append(value.value)
    return Gpu(multiprocessors=found[0], major=found[1], minor=found[2], shared_bytes=found[3])


def compile_cuda(source: str, options: Sequence[str], folder: Path | None) -> bytes:
    """Compile, or take what an earlier process compiled from the same source.

    Args:
        source: one translation unit without includes.
        options: of NVRTC.
        folder: where results are kept; made when missing, passed by when it cannot be written. None keeps none.

    Returns:
        The cubin.

    Raises:
        BackendError: there is no NVRTC, or it refuses the source.
    """
    nvrtc = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = "\0".join([source, *options, f"{major.value}.{minor.value}"])
    if folder is None:
        return _compile(nvrtc, source, options)
    kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        found = kept.read_bytes()
    except OSError:
        found = b""
    if found.startswith(_ELF):  # a file torn by a power failure is made anew
        return found
    cubin = _compile(nvrtc, source, options)
    write_whole(kept, cubin)  # where it is not kept, the next process compiles again
    return cubin


@functools.cache
def _library() -> ctypes.CDLL:
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):  # MLX has loaded the one it was built for
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise BackendError("CUDA kernels: got no libnvrtc, expected the one that mlx-cuda installs")


def _compile(nvrtc: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        size = ctypes.c_size_t()
        if status != 0:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            text = collapsed(log.value.decode(errors="replace"), 400)
            raise BackendError(f"CUDA kernels: NVRTC says: {text}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(status: int) -> None:
    if status != 0:
        raise BackendError(f"CUDA kernels: got status {status} from NVRTC, expected 0")
