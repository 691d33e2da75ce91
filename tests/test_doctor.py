"""`posttrainllm doctor`: every fault that it knows is planted, found, and named with a remedy."""

import json
import logging
import os
import shutil
import subprocess
import sys

import attrs
import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx import nn
from mlx.utils import tree_flatten
from support import plant, tiny_config, tiny_module
from tinygpt_files import save_tinygpt

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.doctor import examine as examine_module
from posttrainllm.adapters.doctor import machine, models
from posttrainllm.adapters.loading import found as found_models
from posttrainllm.adapters.loading import memory
from posttrainllm.adapters.loading.blas import Blas
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.runtime import LOGGER, start

CPU = attrs.evolve(start(), device="cpu", device_name="some CPU", blas="reference", fast_float32=False)
GPU = attrs.evolve(start(), device="gpu", device_name="some GPU", blas=None, fast_float32=True)
linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or start().device != "cpu", reason="the compiler and the BLAS matter on a Linux CPU alone"
)


@pytest.fixture(autouse=True)
def empty_hub_cache(hub_cache):
    """The cache of whoever runs the tests is none of their business."""
    return hub_cache


def doctor(*options):
    return CliRunner().invoke(cli, ["doctor", *options])


def report(code=0):
    """Findings by name, after holding each against what every finding owes."""
    done = doctor("--json")
    assert done.exit_code == code, done.stdout + done.stderr
    return checked(done.stdout, code)


def checked(text, code):
    value = json.loads(text)
    assert value["runs"] == (code == 0)
    for finding in value["findings"]:
        assert (finding["status"] == "ok") == (finding["why"] is None) == (finding["remedy"] is None), finding
    return {finding["name"]: finding for finding in value["findings"]}


def in_process(code, *, before="", **environment):
    """The same from a process of its own, since a BLAS and a compiler are looked for once."""
    program = f"import sys\n{before}\nfrom posttrainllm.adapters.cli import cli\ncli.main(['doctor', '--json'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_CACHE": "/nonexistent", **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    return checked(done.stdout, code)


# where all is well


def test_a_machine_on_which_decoding_runs_is_told_so():
    done = doctor()
    assert done.exit_code == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for words in (
        "versions: posttrainllm",
        "device: ",
        "compiler: ",
        "BLAS: ",
        "memory: ",
        "cache: ",
        "decoding: 8 tok",
    ):
        assert any(words in line for line in lines), words
    assert any("embedded target-16m: llama, context 1024, vocabulary 4096" in line for line in lines)
    assert any("embedded draft-3m: llama, context 1024, vocabulary 4096" in line for line in lines)
    assert any("hub's cache: no model" in line for line in lines)


def test_json_says_the_same_in_one_object():
    found = report()
    assert found["device"]["facts"]["device"] == start().device
    assert found["versions"]["facts"]["versions"]["mlx"] == start().mlx_version
    assert found["embedded target-16m"]["facts"]["context"] == 1024
    assert found["decoding"]["facts"] == {"tokens": 8}


def test_warnings_are_as_loud_afterwards_as_before():
    LOGGER.setLevel(logging.NOTSET)
    report()
    assert LOGGER.level == logging.NOTSET


# faults of the machine


@linux_cpu
def test_no_compiler(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    found = in_process(0, PATH=str(tools), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert found["compiler"]["status"] == found["BLAS"]["status"] == "slow"
    assert "no C++ compiler (g++)" in found["compiler"]["why"]
    assert "install g++" in found["compiler"]["remedy"]
    assert "install g++" in found["BLAS"]["remedy"]
    assert found["decoding"]["status"] == "ok"


@linux_cpu
def test_a_temporary_directory_in_which_mlx_can_keep_nothing(tmp_path):
    (tmp_path / "mlx").write_text("in the way")
    found = in_process(0, TMPDIR=str(tmp_path))
    assert found["compiler"]["status"] == "slow"
    assert str(tmp_path / "mlx") in found["compiler"]["why"]
    assert "set TMPDIR" in found["compiler"]["remedy"]


@linux_cpu
def test_a_blas_that_is_switched_off_and_a_cache_that_cannot_be_written_to(tmp_path):
    (tmp_path / "cache").write_text("in the way")
    found = in_process(0, POSTTRAINLLM_BLAS="off", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert found["BLAS"]["status"] == found["cache"]["status"] == "slow"
    assert found["BLAS"]["remedy"] == "unset POSTTRAINLLM_BLAS"
    assert "is no directory" in found["cache"]["why"]
    assert "set XDG_CACHE_HOME" in found["cache"]["remedy"]


@linux_cpu
def test_a_blas_that_nobody_knows_keeps_decoding_from_running():
    found = in_process(1, POSTTRAINLLM_BLAS="fast")
    assert list(found) == ["BLAS"]
    assert found["BLAS"]["status"] == "broken"
    assert "POSTTRAINLLM_BLAS: got 'fast', expected one of auto" in found["BLAS"]["why"]


def test_an_mlx_that_cannot_be_imported():
    found = in_process(1, before="sys.modules['mlx.core'] = None")
    assert list(found) == ["MLX"]
    assert found["MLX"]["status"] == "broken"
    assert "MLX cannot be imported" in found["MLX"]["why"]
    assert "pip install" in found["MLX"]["remedy"]


@pytest.mark.parametrize(
    ("choice", "remedy"),
    [("auto", "scipy-openblas32"), ("wheel", "scipy-openblas32"), ("system", "apt install libopenblas0-pthread, or")],
)
def test_a_blas_that_is_not_installed(choice, remedy, monkeypatch):
    monkeypatch.setenv("POSTTRAINLLM_BLAS", choice)
    monkeypatch.setattr(machine, "compiler", lambda: "/usr/bin/g++")
    finding = machine.blas_finding(CPU, Blas(name="reference", fast=False, warning="no fast BLAS (not installed)"))
    assert finding.status == "slow"
    assert finding.why.startswith("no fast BLAS (not installed); products in float32")
    assert remedy in finding.remedy


def test_a_gpu_needs_neither_blas_nor_compiler():
    assert machine.blas_finding(GPU, None).status == "ok"
    assert machine.compiler_finding(GPU, "no C++ compiler (g++)").status == "ok"


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such GPUs elsewhere")
def test_a_gpu_beside_a_backend_for_the_cpu(monkeypatch):
    monkeypatch.setattr(machine, "_nvidia_gpu", lambda: True)
    finding = machine.device_finding(CPU)
    assert finding.status == "slow"
    assert "an NVIDIA GPU" in finding.why
    assert "posttrainllm[cuda13]" in finding.remedy
    assert machine.device_finding(GPU).status == "ok"


def test_a_mac_without_metal(monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert "no Metal device" in machine.device_finding(CPU).why


def test_two_backends_in_one_environment(monkeypatch):
    monkeypatch.setattr(machine, "_installed", lambda name: name in ("mlx-cpu", "mlx-cuda-13"))
    finding = machine.mlx_finding(CPU)
    assert (finding.status, finding.facts["backends"]) == ("slow", ["mlx-cpu", "mlx-cuda-13"])
    assert finding.remedy.startswith("pip uninstall mlx-cpu mlx-cuda-13")


def test_too_little_memory_for_the_embedded_pair(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**6)
    found = report(1)
    assert found["memory"]["status"] == "broken"
    assert "other processes" in found["memory"]["remedy"]
    assert "not enough memory for the weights" in found["decoding"]["why"]
    assert machine.memory_finding(2**29, 10**8).status == "note"
    assert machine.memory_finding(2**40, 10**8).status == "ok"


def test_a_torn_installation(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    for name in found_models.EMBEDDED:
        shutil.copytree(embedded_path(name), folder / name)
    weights = next((folder / "draft-3m").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    monkeypatch.setattr(found_models, "embedded_path", lambda name: folder / name)
    found = report(1)
    assert found["embedded draft-3m"]["status"] == "broken"
    assert "torn: got" in found["embedded draft-3m"]["why"]
    assert "--force-reinstall" in found["embedded draft-3m"]["remedy"]
    assert found["embedded target-16m"]["status"] == "ok"


def test_a_decoding_that_fails_for_a_reason_nobody_knows(monkeypatch):
    def fails(**arguments):
        raise RuntimeError("kernel\nnot found")

    monkeypatch.setattr("posttrainllm.adapters.facade.generate", fails)
    found = report(1)
    assert found["decoding"]["why"] == "RuntimeError: kernel not found"
    text = doctor()
    assert text.exit_code == 1
    assert "broken  decoding: does not run" in text.stdout


# models


def test_models_of_the_hub_are_listed_with_what_they_are(empty_hub_cache, tiny_checkpoint):
    plant(empty_hub_cache, "someone/tiny", tiny_checkpoint)
    torn = plant(empty_hub_cache, "someone/torn", tiny_checkpoint)
    (torn / "config.json").unlink()
    found = report()
    tiny = found["someone/tiny"]
    assert (tiny["facts"]["context"], tiny["facts"]["vocabulary"], tiny["status"]) == (512, 4096, "ok")
    assert found["someone/torn"]["status"] == "note"
    assert "config.json is missing" in found["someone/torn"]["why"]
    assert "download it again" in found["someone/torn"]["remedy"]
    assert "hub's cache" not in found


def test_a_quantised_model_on_a_cpu(tmp_path, tiny_checkpoint):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    module = tiny_module(tiny_config(), seed=1)
    nn.quantize(module, group_size=32, bits=4)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    slow = models.model_finding("it", path, CPU, None)
    assert (slow.status, slow.facts["quantized"]) == ("slow", True)
    assert "quantised products on a CPU" in slow.why
    assert "--no-draft" in slow.remedy
    assert models.model_finding("it", path, GPU, None).status == "ok"


def test_a_family_without_a_forward_of_ours(tmp_path, tiny_checkpoint):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    finding = models.model_finding("it", path, CPU, None)
    assert finding.status == "slow"
    assert "no forward of ours" in finding.why


def test_a_model_that_does_not_fit(tiny_checkpoint):
    finding = models.model_finding("it", tiny_checkpoint, CPU, 1000)
    assert finding.status == "note"
    assert "does not fit" in finding.why
    assert models.model_finding("it", tiny_checkpoint, CPU, 10**12).status == "ok"


def test_a_native_checkpoint_is_described_too(tmp_path):
    finding = models.model_finding("it", save_tinygpt(tmp_path / "model.tinygpt"), CPU, None)
    assert (finding.status, finding.facts["context"], finding.facts["vocabulary"]) == ("ok", 64, 256)


def test_a_cache_of_the_hub_that_cannot_be_read(monkeypatch):
    import huggingface_hub

    def fails():
        raise ValueError("a file\nin the way")

    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", fails)
    (finding,) = models.hub_findings(CPU, None)
    assert finding.status == "note"
    assert "a file in the way" in finding.why


def test_nothing_is_left_out_of_the_order():
    names = [finding.name for finding in examine_module.examine()]
    assert names[:6] == ["versions", "device", "compiler", "BLAS", "memory", "cache"]
    assert names[-1] == "decoding"
