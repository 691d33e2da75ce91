"""docs/operators.md and docs/deploy: what stands there exists, parses, and holds."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from serving import ServerProcess
from test_cli import invoke
from test_serve_configuration import parsed

from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.loading.changes import UNCHANGED
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.replay.describe import fingerprints_of
from posttrainllm.adapters.serve import boot, lifecycle
from posttrainllm.adapters.serve.command import serve

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OPERATORS = (DOCS / "operators.md").read_text(encoding="utf-8")
UNIT = DOCS / "deploy" / "posttrainllm.service"
PROGRAM = "/opt/posttrainllm/.venv/bin/posttrainllm"


# determinism


def test_every_test_that_a_promise_names_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", OPERATORS)
    assert len(named) > 20
    for file, name in named:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}::{name}"


@pytest.mark.slow
def test_a_server_that_is_started_again_gives_the_same_answers_under_the_same_fingerprint(tmp_path):
    """Greedy, by both rules with a seed, scored, chosen among several, and a prompt that was kept the first time."""
    options = ("--gate", "off", "--slots", "2", "--max-context", "251")
    prompt = "def moon_phase(day_of_cycle):\n    " + "# a line that fills a chunk of the prompt\n    " * 6
    bodies = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1, "seed": 5},
        {"temperature": 1, "seed": 5, "accept_rule": "coupled"},
        {"temperature": 0.8, "seed": 6, "n": 2, "top_p": 0.9, "frequency_penalty": 0.5},
    ]
    found = []
    for _ in range(2):
        with ServerProcess(tmp_path, *options) as server:
            answers = [server.post("/v1/completions", {"prompt": prompt, "max_tokens": 32, **body}) for body in bodies]
            found.append([(answer.json()["choices"], answer.json()["system_fingerprint"]) for answer in answers])
            assert answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert server.stop() == 0
    assert found[0] == found[1]
    assert len({choice["text"] for choices, _ in found[0] for choice in choices}) >= 4  # they do not agree by chance


def fingerprint(pair: Pair, **changes) -> str:
    shape = attrs.evolve(Shape(rows=2, capacity=256, draft_k=4), **changes)
    options = boot.ServeOptions(
        model=None,
        draft_model=None,
        speculate=True,
        draft_k=DraftLength(most=4),
        dtype="auto",
        forward="auto",
        accept_rule="leviathan",
        slots=2,
        changes=UNCHANGED,
        max_context=251,
        max_tokens_limit=None,
        queue=64,
        prefix_cache_mb=0,
        gate="off",
        api_key=None,
        served_model_name=None,
        request_timeout_s=None,
        body_timeout_s=30,
        record_dir=None,
    )
    return boot._settings(options, pair, 251, shape, fingerprints_of(pair)).fingerprint


def test_what_bits_depend_on_is_in_the_fingerprint(embedded_pair):
    def running(**changes):
        return attrs.evolve(embedded_pair, runtime=attrs.evolve(embedded_pair.runtime, **changes))

    def target(**changes):
        return attrs.evolve(embedded_pair, target=attrs.evolve(embedded_pair.target, **changes))

    def drafted(**changes):
        return attrs.evolve(embedded_pair, draft=attrs.evolve(embedded_pair.draft, **changes))

    runtime, curve = embedded_pair.runtime, Curve(draft_ks=(0, 4), seconds=(0.01, 0.02), plain_seconds=0.01)
    others = [
        *(fingerprint(embedded_pair, **{name: 7}) for name in ("rows", "capacity", "draft_k")),
        fingerprint(embedded_pair, curves={"greedy": curve}),
        fingerprint(embedded_pair, curves={"greedy": attrs.evolve(curve, plain_seconds=0.02)}),
        fingerprint(target(name=embedded_pair.draft.name)),
        fingerprint(
            attrs.evolve(embedded_pair, draft=attrs.evolve(embedded_pair.draft, name=embedded_pair.target.name))
        ),
        fingerprint(target(dtype="bfloat16")),
        fingerprint(target(variant="another")),
        fingerprint(running(blas="OpenBLAS 9 (1 thread)")),
        fingerprint(running(device="gpu")),
        fingerprint(running(device_name="another")),
        fingerprint(running(compiled=not runtime.compiled)),
        *(fingerprint(running(versions={**runtime.versions, name: "0.0"})) for name in runtime.versions),
    ]
    assert {"posttrainllm", "mlx", "mlx-lm"} <= runtime.versions.keys()
    assert fingerprint(embedded_pair) == fingerprint(embedded_pair)
    assert len({fingerprint(embedded_pair), *others}) == 1 + len(others)


# configuration and the unit


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", OPERATORS, re.DOTALL)


def test_the_errors_shown_are_those_that_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = blocks("console")[0].splitlines()
    shown = [line for line in lines if line.startswith("error: ")]
    for text, line in zip(("max_context = 1\n", "port = '80'\n"), shown, strict=True):
        (tmp_path / "serve.toml").write_text(text)
        assert invoke("serve", "--config", "serve.toml").stderr == f"{line}\n"


def test_the_configuration_to_begin_with_starts_a_server_commented_lines_and_all(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(lifecycle, "serve_until_stopped", lambda *values, **named: seen.append((values, named)) or 0)
    text = (DOCS / "deploy" / "serve.toml").read_text(encoding="utf-8")
    key = tmp_path / "key"
    key.write_text("k\n")
    opened = re.sub(r"^# (?=[a-z-]+ = )", "", text, flags=re.MULTILINE).replace("/etc/posttrainllm/api-key", str(key))
    path = tmp_path / "serve.toml"
    for content in (text, opened):
        path.write_text(content, encoding="utf-8")
        result = invoke("serve", "--config", str(path), "--port", "0")
        assert result.exit_code == 0, result.stderr
    (values, named) = seen[-1]
    assert (values[0].api_key, values[0].draft_k.auto, named["cors_origins"]) == ("k", True, ("https://app.example",))
    assert parsed("--config", str(path))["port"] == 8090


def sections(text: str) -> dict[str, list[str]]:
    """`key=value` lines of a unit, by key: a key may come twice."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_what_there_is_and_stops_no_sooner_than_the_drain_ends(tmp_path):
    unit = sections(UNIT.read_text(encoding="utf-8"))
    program, command, *arguments = shlex.split(unit["ExecStart"][0])
    assert (program, command) == (PROGRAM, "serve")
    config = tmp_path / "serve.toml"
    shutil.copy(DOCS / "deploy" / "serve.toml", config)
    arguments = [argument.replace("/etc/posttrainllm/serve.toml", str(config)) for argument in arguments]
    assert serve.make_context("serve", arguments).params["api_key_file"] == "${CREDENTIALS_DIRECTORY}/api-key"
    assert unit["LoadCredential"] == ["api-key:/etc/posttrainllm/api-key"]
    assert int(unit["TimeoutStopSec"][0]) > lifecycle._DRAIN_S + lifecycle._CUT_S
    assert unit["RestartPreventExitStatus"] == ["2 3"]
    assert set(re.findall(r"XDG_CACHE_HOME=(\S+)", unit["Environment"][0])) == {"/var/cache/posttrainllm"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path):
    """It warns of keys that it does not know, and still exits with 0."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
