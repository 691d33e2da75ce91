import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from posttrainllm.adapters.loading import kernel_header
from posttrainllm.adapters.loading.kernel_header import HEADER, precompile

INCLUDE = Path(mx.__file__).parent / "include"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or kernel_header.compiler() is None or not (INCLUDE / HEADER).is_file(),
    reason="needs g++, and MLX's headers",
)


def built(kernels: Path, include: Path = INCLUDE) -> list[str]:
    """What lies beside the kernels once the compiler has ended."""
    building = precompile(kernels, include)
    assert building is not None
    building.join()
    return sorted(path.name for path in (kernels / HEADER).parent.iterdir())


def test_a_kernel_is_built_with_the_compiled_header(tmp_path):
    """As MLX builds one: `-H` marks with an exclamation mark what was taken in compiled form."""
    assert built(tmp_path) == ["compiled_preamble.h.gch"]
    (tmp_path / "kernel.cpp").write_text(f'#include "{HEADER}"\nextern "C" float half(float x) {{ return x / 2; }}\n')
    flags = [*kernel_header._FLAGS, "-shared", f"-I{INCLUDE}"]
    command = ["g++", "-H", *flags, str(tmp_path / "kernel.cpp"), "-o", str(tmp_path / "kernel.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = [line.split()[0] for line in done.stderr.splitlines() if line.endswith((HEADER, ".gch"))]
    assert read == ["!"]


def test_its_flags_are_those_that_mlx_calls_the_compiler_with():
    """GCC takes a compiled header with its own flags alone, and says nothing where it does not."""
    library = next((INCLUDE.parent / "lib").glob("libmlx.so"))
    assert f"g++ {' '.join(kernel_header._FLAGS)} -shared".encode() in library.read_bytes()


def test_a_compiler_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "include" / HEADER).parent.mkdir(parents=True)
    (tmp_path / "include" / HEADER).write_text("#error no\n")
    (tmp_path / "kernels").mkdir()
    assert built(tmp_path / "kernels", tmp_path / "include") == []


def test_where_kernels_are_nothing_is_built(tmp_path):
    (tmp_path / "libkernel.so").touch()
    assert precompile(tmp_path, INCLUDE) is None


def test_without_mlxs_headers_or_a_folder_nothing_is_built(tmp_path):
    assert precompile(tmp_path, tmp_path) is None
    assert precompile(tmp_path / "none", INCLUDE) is None
    assert list(tmp_path.iterdir()) == []
