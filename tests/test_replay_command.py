"""`sample --record` and `replay` as a user runs them: exit codes, one-line errors, the explanation."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_cli import invoke, sample

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.replay.reading import read_trace

PROMPT = "def add(a, b):"
LEVIATHAN = ("--temperature", "0.8", "--seed", "7")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A leviathan run of the embedded pair."""
    return record(tmp_path_factory.mktemp("trace") / "leviathan.jsonl", *LEVIATHAN)


def record(file, *options, tokens=40):
    result = sample("--prompt", PROMPT, "--max-tokens", str(tokens), "--record", str(file), "--quiet", *options)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return file


def edit(file, to, line, **changes):
    """A copy of a trace with values of one line changed; a__b names value b inside a."""
    lines = file.read_text().splitlines()
    value = json.loads(lines[line - 1])
    for name, new in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            value[outer] |= {inner: new}
        else:
            value[outer] = new(value[outer]) if callable(new) else new
    to.write_text("\n".join([*lines[: line - 1], json.dumps(value), *lines[line:]]) + "\n")
    return to


def other_id(ids):
    return [ids[0] ^ 1, *ids[1:]]


def replay(*arguments):
    return invoke("replay", *map(str, arguments))


def assert_one_line(result, code, message):
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize("options", [(), ("--uncompiled",)], ids=["compiled", "uncompiled"])
def test_a_leviathan_trace_replays_from_step_0_and_from_the_middle(trace, options):
    count = len(read_trace(trace).steps)
    for first in (0, count // 2):
        result = replay(trace, "--from-step", first, *options)
        assert result.exit_code == 0, result.stdout
        assert result.stderr == ""
        assert f"steps {first} to {count - 1} of {count} as recorded" in result.stdout
        assert ("uncompiled" in result.stdout) == bool(options)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--temperature", "1", "--seed", "1", "--accept-rule", "coupled"),
        ("--no-draft",),
        ("--no-draft", "--plain-width", "5", *LEVIATHAN),
        ("--temperature", "1.2", "--top-k", "20", "--min-p", "0.05", "--seed", "2", "--draft-k", "2"),
        ("--dtype", "bfloat16", *LEVIATHAN),
        ("--forward", "module", *LEVIATHAN),
    ],
    ids=lambda options: " ".join(options) or "greedy",
)
def test_every_kind_of_run_replays(tmp_path, options):
    tokens = 8 if "bfloat16" in options else 24  # its steps take long on a CPU
    file = record(tmp_path / "trace.jsonl", *options, tokens=tokens)
    middle = len(read_trace(file).steps) // 2
    for arguments in ((), ("--from-step", middle, "--steps", 2)):
        result = replay(file, *arguments)
        assert (result.exit_code, result.stderr) == (0, ""), result.stdout


def test_recording_changes_no_byte_of_the_output(tmp_path):
    arguments = ("--prompt", PROMPT, "--max-tokens", "32", "--quiet", *LEVIATHAN)
    assert sample(*arguments, "--record", str(tmp_path / "t.jsonl")).stdout == sample(*arguments).stdout


def test_the_trace_holds_the_ids_that_sample_printed_and_why_it_ended(tmp_path):
    file = tmp_path / "trace.jsonl"
    value = json.loads(sample("--json", "--prompt", PROMPT, "--max-tokens", "30", "--record", str(file)).stdout)
    recorded = read_trace(file)
    assert [index for step in recorded.steps for index in step.emitted] == value["token_ids"]
    assert (recorded.end, value["finish_reason"]) == ("length", "length")
    stopped = tmp_path / "stopped.jsonl"
    text = value["text"][8:11]
    sample("--prompt", PROMPT, "--max-tokens", "30", "--stop", text, "--record", str(stopped))
    assert read_trace(stopped).end == "stop"
    assert replay(stopped).exit_code == 0


@pytest.mark.parametrize("field", ["emitted", "proposals"])
def test_one_changed_token_is_found_at_its_step_and_explained(trace, tmp_path, field):
    step = read_trace(trace).steps[5]
    wrong = edit(trace, tmp_path / "wrong.jsonl", 7, **{field: other_id})
    for options in ((), ("--from-step", "5"), ("--uncompiled",), ("--show", "5")):
        result = replay(wrong, *options)
        assert result.exit_code == 3, result.stderr
        assert result.stderr == ""
        lines = result.stdout.splitlines()
        assert lines[0] == f"step 5 differs: {field}[0], position {step.length} ({wrong}, line 7)"
        assert lines[1].startswith(f"  expected {getattr(step, field)[0] ^ 1} ")
        assert lines[2].startswith(f"  got      {getattr(step, field)[0]} ")
        for word in ("p/q", "margin", "decision", "proposal", "accepted"):
            assert word in result.stdout
    assert replay(wrong, "--steps", "5").exit_code == 0
    assert replay(wrong, "--from-step", "4", "--steps", "1").exit_code == 0


def test_json_holds_the_divergence_and_the_step(trace, tmp_path):
    wrong = edit(trace, tmp_path / "wrong.jsonl", 7, emitted=other_id)
    result = replay(wrong, "--json")
    assert (result.exit_code, result.stderr) == (3, "")
    value = json.loads(result.stdout)
    assert set(value) == {
        *("trace", "differences", "steps", "end", "torn", "compiled", "from_step", "matched", "tokens", "divergence"),
        "step",
    }
    step = read_trace(trace).steps[5]
    found = value["divergence"]
    here = found.pop("here")
    assert found == {
        **{"step": 5, "line": 7, "field": "emitted", "index": 0, "position": step.length},
        **{"expected": step.emitted[0] ^ 1, "got": step.emitted[0]},
    }
    assert here == value["step"]["positions"][0]
    assert set(here) == {
        *("position", "proposal", "text", "p", "q", "ratio", "uniform", "margin", "best", "target_draw", "decision"),
        "emitted",
    }
    assert here["decision"].startswith("accepted") == (here["uniform"] < here["p"] / here["q"])
    assert value["matched"] == 5
    sound = json.loads(replay(trace, "--json").stdout)
    assert (sound["divergence"], sound["step"], sound["differences"]) == (None, None, [])
    assert sound["matched"] == sound["steps"]
    assert sound["tokens"] == 40


def test_show_prints_one_step_as_a_table(trace):
    step = read_trace(trace).steps[3]
    result = replay(trace, "--show", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("step 3 as recorded: K=4, leviathan, temperature 0.8, seed 7")
    assert lines[2].startswith(f"step 3: {step.length} ids before it")
    (head,) = [line for line in lines if line.startswith("pos")]
    assert head.split() == ["pos", "proposal", "p", "q", "p/q", "u", "decision", "margin", "emitted"]
    rows = [line for line in lines if line.split()[:1] in [[str(step.length + index)] for index in range(5)]]
    for index, proposal in enumerate(step.proposals):
        assert rows[index].split()[:2] == [str(step.length + index), str(proposal)]
    assert max(map(len, lines)) <= 100
    plain = json.loads(replay(trace, "--show", "3", "--json").stdout)
    assert [entry["id"] for entry in plain["step"]["emitted"]] == list(step.emitted)


ELSEWHERE = [
    ({"device": "gpu"}, "device: got cpu, expected gpu"),
    ({"device_name": "Z80"}, "expected Z80"),
    ({"blas": None}, "expected none"),
    ({"versions__mlx": "0.1.0"}, "mlx: got 0.32.4, expected 0.1.0"),
    ({"versions__posttrainllm": "9.9.9"}, "posttrainllm: got 0.1.0, expected 9.9.9"),
    ({"fingerprints__draft": "sha256:" + "0" * 64}, "draft model: got sha256:e35029c34fdb..., expected sha256:0000"),
    ({"fingerprints__tokenizer": "sha256:" + "0" * 64}, "tokenizer: got sha256:"),
    ({"vocab_size": 4095}, "ids that may be emitted: got 4096, expected 4095"),
    ({"variants__draft": "another"}, "draft forward: got "),
]


@pytest.mark.parametrize(("changes", "message"), ELSEWHERE, ids=lambda value: str(value)[:30])
def test_a_trace_from_elsewhere_is_refused_and_compared_anyway(trace, tmp_path, changes, message):
    if "device" in changes and json.loads(trace.read_text().splitlines()[0])["device"] != "cpu":
        pytest.skip("runs on a GPU itself")
    other = edit(trace, tmp_path / "other.jsonl", 1, **changes)
    refused = replay(other)
    assert_one_line(refused, 1, f"{other}: recorded elsewhere: ")
    assert message.split(": got")[0] in refused.stderr
    assert "--anyway compares all the same" in refused.stderr
    anyway = replay(other, "--anyway", "--steps", "3")
    assert anyway.exit_code == 0
    assert all(line.startswith("warning: ") for line in anyway.stderr.splitlines())
    assert len(json.loads(replay(other, "--anyway", "--json", "--steps", "1").stdout)["differences"]) == 1


def test_several_differences_stand_in_one_line(trace, tmp_path):
    other = edit(trace, tmp_path / "other.jsonl", 1, device_name="Z80", versions__mlx="0.1.0")
    result = replay(other)
    assert_one_line(result, 1, "; mlx: got ")
    assert "device_name: got" in result.stderr


def test_another_model_is_refused_and_diverges_anyway(tmp_path, tiny_checkpoint, tiny_draft_checkpoint):
    target = shutil.copytree(tiny_checkpoint, tmp_path / "target")
    file = record(tmp_path / "t.jsonl", str(target), "--draft-model", str(tiny_draft_checkpoint), *LEVIATHAN, tokens=12)
    assert replay(file).exit_code == 0
    moved = target.rename(tmp_path / "moved")
    assert_one_line(replay(file), 1, f"{target}: got nothing there, expected the target model; name it as MODEL")
    assert replay(file, moved).exit_code == 0
    assert replay(file, moved, "--draft-model", tiny_draft_checkpoint, "--from-step", "1").exit_code == 0
    assert_one_line(replay(file, moved, "--draft-model", moved), 1, "draft model: got sha256:")
    result = replay(file, moved, "--draft-model", moved, "--anyway")
    assert result.exit_code == 3
    assert "step 0 differs: proposals[0], position" in result.stdout
    assert_one_line(replay(file, tmp_path), 1, "got no file to hash")


def test_what_was_written_before_a_kill_replays(tmp_path):
    file = tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "posttrainllm.adapters", "sample", "--prompt", PROMPT, "--max-tokens", "900"]
    process = subprocess.Popen([*command, "--ignore-eos", "--quiet", "--record", str(file)], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until and (not file.exists() or file.read_bytes().count(b"\n") < 12):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert read_trace(file).end is None
    result = replay(file)
    assert result.exit_code == 0, result.stdout
    with file.open("ab") as stream:
        stream.write(b'{"step":99,"len')
    torn = replay(file, "--from-step", "5")
    assert torn.exit_code == 0
    assert torn.stderr == f"notice: {file}: line {len(read_trace(file).steps) + 2} breaks off and is left out\n"


def test_a_run_ended_by_ctrl_c_replays(tmp_path):
    file = tmp_path / "trace.jsonl"
    command = [sys.executable, "-u", "-m", "posttrainllm.adapters", "sample", "--prompt", PROMPT, "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "900", "--record", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job would ignore it
    )
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert read_trace(file).end == "cancelled"
    assert replay(file).exit_code == 0


def test_a_trace_without_a_step_has_nothing_to_replay(trace, tmp_path):
    file = tmp_path / "header.jsonl"
    file.write_text(trace.read_text().splitlines()[0] + "\n")
    result = replay(file)
    assert result.exit_code == 0
    assert result.stdout.startswith("the trace has no step")
    assert_one_line(replay(file, "--show", "0"), 2, "--show: got 0, expected a trace with a step in it")


BAD_OPTIONS = [
    (2, ["--from-step", "-1"], "--from-step: got -1, expected 0 to "),
    (2, ["--from-step", "99"], "--from-step: got 99, expected 0 to "),
    (2, ["--steps", "0"], "--steps: got 0, expected 1 or more"),
    (2, ["--show", "99"], "--show: got 99, expected 0 to "),
    (2, ["--show", "1", "--from-step", "1"], "got --show with --from-step or --steps"),
    (2, ["--show", "x"], "'x' is not a valid integer"),
    (1, ["/no/such/model"], "/no/such/model: got nothing there, expected the target model; name it as MODEL"),
    (1, ["--draft-model", "/no/such"], "expected the draft model; name it as --draft-model"),
]


@pytest.mark.parametrize(("code", "arguments", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_option_is_one_line(trace, code, arguments, message):
    assert_one_line(replay(trace, *arguments), code, message)


def test_bad_files_are_one_line(trace, tmp_path):
    assert_one_line(replay(tmp_path / "missing"), 1, "No such file or directory")
    assert_one_line(replay(tmp_path), 1, "Is a directory")
    (tmp_path / "text").write_bytes(b"caf\xe9\n")
    assert_one_line(replay(tmp_path / "text"), 1, "line 1: got 'caf\ufffd', expected a JSON object")
    assert_one_line(
        replay(edit(trace, tmp_path / "a", 4, accepted=9)), 1, f"{tmp_path}/a: line 4: accepted: got 9, expected 0 to 4"
    )
    for name in ("shapes__B", "shapes__C"):
        huge = edit(trace, tmp_path / "b", 1, **{name: 2**31 - 1})
        assert_one_line(replay(huge), 1, "GB")
    plain = record(tmp_path / "plain.jsonl", "--no-draft", tokens=4)
    assert_one_line(replay(plain, "--draft-model", "x"), 2, "--draft-model: got x for a trace of a run without a draft")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("/no/such/trace", "/no/such/trace: cannot be written: No such file"),
        pytest.param(
            *("/dev/full", "No space left on device"),
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full, as on macOS"),
        ),
    ],
)
def test_a_trace_that_cannot_be_written_is_one_line(file, message):
    assert_one_line(sample("--prompt", PROMPT, "--max-tokens", "4", "--record", file), 1, message)


def test_the_commands_help_says_what_the_exit_status_means_and_imports_no_mlx():
    code = (
        "import sys\nfrom posttrainllm.adapters.cli import cli\n"
        "try:\n    cli.main(['replay', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "bad = {name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm', 'transformers', 'numpy'}\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Exit status: 0" in done.stdout


def test_a_prompt_that_is_refused_leaves_an_earlier_trace_alone(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("kept")
    result = CliRunner().invoke(cli, ["sample", "--prompt", "word " * 4000, "--record", str(file)])
    assert result.exit_code == 1
    assert file.read_text() == "kept"
    shorter = CliRunner().invoke(cli, ["sample", "--prompt", "def", "--max-tokens", "2", "--record", str(file)])
    assert shorter.exit_code == 0
    assert file.read_text().startswith('{"trace":"posttrainllm"')


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (0, {"dtype": {"target": "int8", "draft": "float32"}}, "line 1: dtype.target: got 'int8', expected one of"),
        (0, {"device": "\ud800"}, "line 1: device: got"),
        (0, {"device_name": "a\nb"}, "line 1: device_name: got"),
        (1, {"margins": [10**400] * 9}, "line 2: margins: got"),
        (-1, {"end": "banana"}, "end: got 'banana', expected one of length, stop, cancelled"),
    ],
)
def test_values_that_no_run_writes_are_refused_with_their_line(tmp_path, line, changes, message):
    file = tmp_path / "trace.jsonl"
    CliRunner().invoke(cli, ["sample", "--prompt", "def", "--max-tokens", "8", "--record", str(file)])
    lines = file.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | changes)
    file.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(cli, ["replay", str(file)])
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_trace_without_its_end_replays_with_a_notice_and_counts_that_disagree_are_refused(tmp_path):
    file = tmp_path / "trace.jsonl"
    CliRunner().invoke(cli, ["sample", "--prompt", "def", "--max-tokens", "16", "--record", str(file)])
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n")
    result = CliRunner().invoke(cli, ["replay", str(file)])
    assert result.exit_code == 0
    assert "has no end" in result.stderr
    step = next(value for value in map(json.loads, lines[1:]) if value["accepted"])
    number = 1 + step["step"]
    lines[number] = json.dumps(step | {"proposed": 0})
    file.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(cli, ["replay", str(file), "--from-step", str(number)])
    assert result.exit_code == 1
    assert "expected counts that agree" in result.stderr


def test_a_trace_is_replayed_by_the_forward_that_recorded_it(tmp_path):
    ours = record(tmp_path / "ours.jsonl", tokens=8)
    theirs = record(tmp_path / "module.jsonl", "--forward", "module", tokens=8)
    assert read_trace(theirs).header.variants == {"target": "module", "draft": "module"}
    assert "module" not in read_trace(ours).header.variants.values()
    assert replay(ours).exit_code == replay(theirs).exit_code == 0
    claimed = edit(ours, tmp_path / "claimed.jsonl", 1, variants={"target": "module", "draft": "fused"})
    assert_one_line(replay(claimed), 1, "target forward: got ")


def test_a_trace_from_before_forwards_were_named_is_replayed_by_those_of_here(trace, tmp_path):
    lines = trace.read_text().splitlines()
    header = json.loads(lines[0])
    del header["variants"]
    older = tmp_path / "older.jsonl"
    older.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert replay(older).exit_code == 0
