"""Shared fixtures. The runtime starts first: the BLAS has to be loaded before any test module imports MLX."""

import gc
import hashlib
import os
import tempfile
from pathlib import Path

import pytest

from posttrainllm.adapters.runtime import Runtime, start

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # MLX keeps the kernels that it builds there, and one process may load what another has half written
    checkout = hashlib.sha256(str(Path(__file__).resolve()).encode()).hexdigest()[:8]
    apart = Path(tempfile.gettempdir()) / f"posttrainllm-tests-{os.getuid()}-{checkout}-{worker}"
    apart.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(apart)

RUNTIME = start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """What a fuzzed file makes somebody print may be no Unicode, which a worker process cannot send."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end; looking at them costs each collection of garbage 0.1 s and more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return RUNTIME


@pytest.fixture(scope="session")
def embedded_pair():
    from posttrainllm.adapters.loading.pair import load_pair

    return load_pair()


@pytest.fixture(scope="session")
def embedded_pair_bfloat16():
    from posttrainllm.adapters.loading.pair import load_pair

    return load_pair(dtype="bfloat16")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """Directory of a random two-layer Llama with the embedded tokenizer."""
    from support import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "target", seed=1)


@pytest.fixture(scope="session")
def tiny_draft_checkpoint(tmp_path_factory):
    from support import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "draft", seed=2, layers=1)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The hub's cache of this process, which is empty."""
    import huggingface_hub.constants
    import huggingface_hub.utils._cache_manager as manager

    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    if hasattr(manager, "HF_HUB_CACHE"):
        monkeypatch.setattr(manager, "HF_HUB_CACHE", str(folder))
    return folder
