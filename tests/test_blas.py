"""The BLAS under the CPU backend, each case in a process of its own: a library cannot be unloaded."""

import os
import subprocess
import sys

import pytest

from posttrainllm.adapters.loading.blas import ENVIRONMENT, compiler
from posttrainllm.adapters.runtime import start

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="macOS links Accelerate: there is nothing to load"),
    pytest.mark.skipif(start().device != "cpu", reason="on a GPU the BLAS plays no part"),
]

REPORT = """
from posttrainllm.adapters.runtime import start
runtime = start()
import mlx.core as mx
import numpy as np
generator = np.random.default_rng(0)
for m, n, k in ((1, 7, 5), (5, 384, 384), (64, 2048, 1024)):
    a, b = (generator.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    np.testing.assert_allclose(np.array(mx.array(a) @ mx.array(b)), a @ b, rtol=1e-4, atol=1e-4)
    transposed = np.array(mx.array(a.T.copy()).T @ mx.array(b.T.copy()).T)
    np.testing.assert_allclose(transposed, a @ b, rtol=1e-4, atol=1e-4)
c = (generator.standard_normal((4, 6)) + 1j * generator.standard_normal((4, 6))).astype(np.complex64)
np.testing.assert_allclose(np.array(mx.array(c) @ mx.array(c.T.copy())), c @ c.T, rtol=1e-4, atol=1e-4)
print(runtime.blas, "|", runtime.fast_float32, "|", runtime.compiled)
"""


def run(code: str = REPORT, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env={**os.environ, **environment}
    )


WIDTHS = """
from posttrainllm.adapters.runtime import start
start()
import mlx.core as mx
import numpy as np
generator = np.random.default_rng(1)
for n, k in ((1, 5), (4, 8), (5, 3), (67, 67), (64, 300), (384, 1000), (1024, 384), (1100, 2048)):
    rows = generator.standard_normal((72, k)).astype(np.float32)
    weights = generator.standard_normal((n, k)).astype(np.float32)
    exact = rows.astype(np.float64) @ weights.T
    for matrix in (mx.array(weights).T, mx.array(weights.T.copy())):
        product = lambda part: np.array(mx.array(part) @ matrix)
        single = np.concatenate([product(rows[index : index + 1]) for index in range(72)])
        np.testing.assert_allclose(single, exact, rtol=1e-3, atol=1e-3)
        for width in (2, 3, 4, 5, 6, 9, 33, 64, 65, 72):
            for first in (0, 3, 72 - width):
                part = product(rows[first : first + width])[: 72 - first]
                assert np.array_equal(part, single[first : first + width]), (n, k, width, first)
"""


@pytest.mark.skipif(compiler() is None, reason="the shim needs a compiler")
def test_a_row_of_a_float32_product_has_the_same_bits_whatever_its_place_and_however_many_rows_there_are():
    done = run(WIDTHS)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(compiler() is None, reason="the shim needs a compiler")
def test_a_cache_that_is_read_only_is_no_obstacle(tmp_path):
    code = (
        "import tempfile\nfrom posttrainllm.adapters.loading import blas\n"
        "original = tempfile.TemporaryDirectory\n"
        "def refuse(*a, **k): raise PermissionError(13, 'Permission denied')\n"
        "tempfile.TemporaryDirectory = refuse\nprint(blas.load_blas().name)\n"
    )
    done = run(code, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OpenBLAS ")


@pytest.fixture
def empty_path(tmp_path):
    """A PATH with no compiler on it."""
    (tmp_path / "bin").mkdir()
    return str(tmp_path / "bin")


@pytest.mark.skipif(compiler() is None, reason="the shim needs a compiler")
@pytest.mark.parametrize("choice", ["auto", "wheel"])
def test_the_wheels_openblas_is_loaded_and_multiplies_right(choice, tmp_path):
    done = run(**{ENVIRONMENT: choice, "XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OpenBLAS ")
    assert "(wheel," in done.stdout
    assert done.stderr == ""
    assert len(list((tmp_path / "posttrainllm" / "blas").glob("cblas_shim-*.so"))) == 1


def test_it_can_be_switched_off():
    done = run(**{ENVIRONMENT: "off"})
    assert done.stdout.startswith(f"reference ({ENVIRONMENT}=off) | False")
    assert done.stderr == ""


def test_an_unknown_choice_is_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "posttrainllm.adapters", "sample", "--prompt", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, ENVIRONMENT: "fast"},
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {ENVIRONMENT}: got 'fast', expected one of auto, wheel, system, off\n"


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = run(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_mlx_imported_first_keeps_its_own_blas_and_says_so():
    done = run("import mlx.core\n" + REPORT)
    assert done.stdout.startswith("reference | False")
    assert "mlx was imported before posttrainllm" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_compiler_everything_runs_uncompiled_after_one_warning_line(empty_path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "posttrainllm.adapters", "sample", "--prompt", "x", "--max-tokens", "4", "--quiet"],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PATH": empty_path, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    warnings = done.stderr.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: no C++ compiler (g++)")
    assert not list(tmp_path.glob("mlx/*/cpu/*.so"))
