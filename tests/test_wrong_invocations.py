"""Wrong invocations of every command, as users make them: one line each, with what was got and what is expected.

What single commands refuse in depth is tested with them; here are those that name the wrong thing or nothing.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support import save_tiny_llama

from posttrainllm.adapters.cli import cli

IS_ROOT = os.geteuid() == 0
MODEL = "expected a model directory, a .tinygpt or GGUF file, or owner/name"
SAMPLE = ("sample", "--prompt", "a")
CASES = [
    (2, [*SAMPLE, ""], "MODEL: got '', expected the path of a directory or an id of the hub"),
    (1, [*SAMPLE, "nowhere"], f"nowhere: got nothing there, {MODEL}"),
    (1, [*SAMPLE, "file"], f"file: got a file, {MODEL}"),
    (1, [*SAMPLE, "empty"], "empty: config.json is missing"),
    (1, [*SAMPLE, "loop"], f"loop: got nothing there, {MODEL}"),
    (1, [*SAMPLE, "text.gguf"], "text.gguf: magic: got b'some', expected b'GGUF'"),
    (1, [*SAMPLE, "vocab_size"], "vocab_size/config.json: vocab_size: got 0, expected a whole number from 1 up"),
    (1, [*SAMPLE, "hidden_size"], "hidden_size/config.json: hidden_size: got 'x', expected a whole number from 1 up"),
    (2, [*SAMPLE, "--no-draft", "--draft-model", "d"], "got both a draft model and --no-draft (speculate=False), "),
    (2, [*SAMPLE, "--no-draft", "--draft-model", "auto"], "got both --draft-model auto and --no-draft (speculate="),
    (2, [*SAMPLE, "--record", ""], "--record: got an empty text, expected a file to write"),
    (2, ["sample", "--prompt-file", "empty"], "--prompt-file: empty: Is a directory"),
    (2, ["chat", "--draft-k", "auto:0"], "--draft-k: got 'auto:0', expected 1 to 32, auto or auto:N"),
    (1, ["chat", "empty"], "empty: config.json is missing"),
    (2, ["gate", "file"], "got MODEL without --draft-model, expected both: "),
    (2, ["gate", "--prompts-file", "file"], "--prompts-file: file, line 1: got no JSON: "),
    (2, ["bench", "--prompts-file", "empty"], "--prompts-file: empty: Is a directory"),
    (2, ["bench", "--prompts-file", "file"], "--prompts-file: file: expected a JSON object a line, with a `text` that"),
    (2, ["bench", "--rows", "0"], "--rows: got 0, expected 1 to 8 each: "),
    (2, ["match", "--candidates", "file"], "--candidates: file: got a file, expected a model or a directory of models"),
    (2, ["match", "--candidates", ""], "--candidates: got an empty text, expected a directory of models"),
    (1, ["match", "empty"], "empty: config.json is missing"),
    (1, ["match", "--adapter-path", "empty"], "empty: adapter_config.json is missing"),
    (2, ["replay", ""], "FILE: got an empty text, expected a trace"),
    (2, ["replay", "file", ""], "MODEL: got an empty text, expected the path of a directory or an id of the hub"),
    (2, ["replay", "file", "--adapter-path", ""], "--adapter-path: got an empty text, expected an adapter's directory"),
    (1, ["replay", "file"], "file: line 1: got 'some text', expected a JSON object"),
    (2, ["serve", "--record-dir", "file"], "--record-dir: file: File exists"),
    (1, ["serve", "empty"], "empty: config.json is missing"),
    (2, ["convert", "", "--out", "new"], "MODEL: got an empty text, expected a GGUF file or a model directory"),
    (2, ["convert", "model", "--out", "", "--layers", "1"], "--out: got an empty text, expected a directory to write"),
    (1, ["convert", "model", "--out", "loop", "--layers", "1"], "loop: cannot be written: Not a directory"),
    (2, ["export-mlx", "", "--out", "new"], "FILE: got an empty text, expected a .tinygpt file"),
    (2, ["export-mlx", "file", "--out", ""], "--out: got an empty text, expected a directory to write"),
    (1, ["export-mlx", "nowhere", "--out", "new"], "nowhere: got nothing there, expected a .tinygpt file"),
    (1, ["export-mlx", "file", "--out", "new"], "file: got a file of another kind, expected a .tinygpt file"),
    (1, ["export-mlx", "model", "--out", "new"], "model: got a directory, expected a .tinygpt file"),
    (
        1,
        ["export-mlx", "text.gguf", "--out", "new"],
        "text.gguf: got a GGUF file, which `posttrainllm convert` ",
    ),
    (2, ["doctor", "file"], "Got unexpected extra argument (file)"),
    (2, ["zoo", "train"], "Missing argument 'PRESET'. Choose from: toy, "),
    (2, ["zoo", "train", "toy", "--corpus", "c", "--out", "o"], "got neither --minutes nor --steps, expected one of"),
    (
        2,
        ["zoo", "train", "toy", "--corpus", "c", "--out", "o", "--steps", "1", "--minutes", "1"],
        "got both --minutes and --steps, expected one of the two",
    ),
    (
        1,
        ["zoo", "tokenizer", "--corpus", "file", "--out", "new"],
        "file: got no MANIFEST.json, expected a folder of `zoo corpus`",
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files and directories that are not what they are taken for."""
    place = tmp_path_factory.mktemp("place")
    save_tiny_llama(place / "model", seed=1)
    (place / "file").write_text("some text\n")
    (place / "text.gguf").write_text("some text")
    (place / "prompts.jsonl").write_text('{"text": "a short one"}\n')
    (place / "empty").mkdir()
    (place / "loop").symlink_to("loop")
    for name, value in (("vocab_size", 0), ("hidden_size", "x")):
        config = shutil.copytree(place / "model", place / name) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    return place


@pytest.mark.parametrize(("code", "arguments", "message"), CASES, ids=[" ".join(case[1])[:60] for case in CASES])
def test_a_wrong_invocation_is_one_line(place, monkeypatch, code, arguments, message):
    monkeypatch.chdir(place)
    done = CliRunner().invoke(cli, arguments, prog_name="posttrainllm")
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert (done.exit_code, done.stdout) == (code, "")
    assert not (place / "new").exists()


def test_prompts_that_are_too_short_for_a_measurement_are_counted(place, monkeypatch):
    monkeypatch.chdir(place)
    done = CliRunner().invoke(cli, ["bench", "--prompts-file", "prompts.jsonl"])
    expected = "--prompt-tokens: got 64, expected no more than the prompts have: 0 of 1 are as long and differ, "
    expected += "and 2 are needed"
    assert (done.exit_code, done.stderr) == (2, f"error: {expected}\n")


@pytest.mark.skipif(IS_ROOT and shutil.which("setpriv") is None, reason="root reads everything unless it gives that up")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_named_once(place, tmp_path, name):
    model = shutil.copytree(place / "model", tmp_path / "model")
    (model / name).chmod(0)
    rights = "-dac_override,-dac_read_search"
    command = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if IS_ROOT else []
    command += [sys.executable, "-m", "posttrainllm.adapters", *SAMPLE, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {model}")
    assert done.stderr.endswith("Permission denied\n")
    assert done.stderr.count(name) == 1
    assert len(done.stderr.splitlines()) == 1
