"""MLX's header of CPU kernels in compiled form.

MLX's CPU backend calls g++ once for each kernel, and three quarters of that time go into reading one header. GCC takes
a precompiled form of a header where one lies beside the source, if it was made by the same compiler with the same
flags, and else reads the header as ever: what is built here can only save time.
"""

import os
import subprocess
import threading
from pathlib import Path

from posttrainllm.adapters.loading.blas import compiler

__all__ = ["HEADER", "precompile"]

HEADER = "mlx/backend/cpu/compiled_preamble.h"
_FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")  # MLX's own
# by a shell that outlives this process: nothing half-written stays, and readers never see any
_BUILD = '"$@" -o "$BUILT" && mv -f "$BUILT" "$KEPT" || rm -f "$BUILT"'


def precompile(kernels: Path, include: Path) -> threading.Thread | None:
    """Begin to compile the header in the background, in a first run alone: later ones find their kernels.

    Args:
        kernels: the folder in which MLX keeps what it builds; where there is none, nothing is begun.
        include: MLX's own headers.

    Returns:
        A thread that ends with the compiler; None where there is nothing to do or nothing to do it with.
    """
    program, kept = compiler(), kernels / f"{HEADER}.gch"
    if program is None or not kernels.is_dir() or not (include / HEADER).is_file():
        return None
    if kept.exists() or any(kernels.glob("*.so")):
        return None
    environment = os.environ | {"KEPT": str(kept), "BUILT": f"{kept}.{os.getpid()}"}
    command = [program, *_FLAGS, "-x", "c++-header", f"-I{include}", str(include / HEADER)]
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)  # beside the kernels' sources
        building = subprocess.Popen(
            ["sh", "-c", _BUILD, "sh", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # kernels are built without it
        return None
    waiting = threading.Thread(target=building.wait, name="kernel header", daemon=True)
    waiting.start()
    return waiting
