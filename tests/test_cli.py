import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from posttrainllm.adapters.cli import cli

PROMPT = "def add(a, b):"


def invoke(*arguments: str, stdin: str | bytes | None = None):
    return CliRunner().invoke(cli, list(arguments), input=stdin)


def sample(*arguments: str, **options):
    return invoke("sample", *arguments, **options)


def run_process(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "posttrainllm.adapters", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def sample_json(*arguments: str):
    result = sample("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_text_goes_to_stdout_and_statistics_to_stderr():
    result = sample("--prompt", PROMPT, "--max-tokens", "16")
    assert result.exit_code == 0
    assert result.stdout.endswith("\n")
    assert "accepted" not in result.stdout
    for words in ("draft accepted", "tok/s", "first token", "peak MLX memory"):
        assert words in result.stderr


def test_quiet_prints_the_text_alone():
    result = sample("--prompt", PROMPT, "--max-tokens", "16", "--quiet")
    assert result.stderr == ""
    assert result.stdout.strip()


def test_verbose_adds_a_forecast_of_the_memory():
    result = sample("--prompt", PROMPT, "--max-tokens", "4", "--verbose")
    line = next(line for line in result.stderr.splitlines() if line.startswith("memory: weights"))
    assert re.search(r"\(target 0\.0(63|31), draft 0\.0(11|05|06)\)", line)  # 15.7M and 2.75M parameters
    assert "B=1, C=256" in line
    assert "free beside the weights" in line


def test_verbose_says_which_forward_computes_and_a_switch_takes_mlx_lms():
    arguments = ("--prompt", PROMPT, "--max-tokens", "8", "--verbose")
    ours, theirs = sample(*arguments), sample(*arguments, "--forward", "module")
    assert re.search("^forward: target (cpu|fused|cuda), draft (cpu-draft|fused|cuda)$", ours.stderr, re.MULTILINE)
    assert re.search("^forward: target module, draft module$", theirs.stderr, re.MULTILINE)
    assert ours.stdout == theirs.stdout  # eight ids without a near-tie


def test_json_holds_the_whole_contract():
    value = sample_json("--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0.8", "--seed", "7")
    assert set(value) == {
        *("text", "token_ids", "finish_reason", "usage", "timings", "peak_memory_bytes", "seed", "model"),
        *("draft_model", "draft_k", "plain_width", "accept_rule", "sampling", "device", "dtype", "blas"),
        *("versions", "speculative"),
    }
    usage, timings = value["usage"], value["timings"]
    assert set(usage) == {
        *("prompt_tokens", "completion_tokens", "total_tokens", "draft_proposed", "draft_accepted", "accept_rate"),
    }
    assert set(timings) == {
        *("prefill_s", "ttft_s", "decode_s", "decode_tokens_per_s", "steps", "tokens_per_step"),
    }
    assert usage["completion_tokens"] == len(value["token_ids"]) == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert usage["accept_rate"] == usage["draft_accepted"] / usage["draft_proposed"]
    assert timings["tokens_per_step"] == 24 / timings["steps"]
    assert value["seed"] == 7
    assert value["finish_reason"] == "length"
    assert value["speculative"] == {"enabled": True, "reason": None}
    assert value["draft_k"] == 4
    assert value["accept_rule"] == "leviathan"


def test_a_draft_changes_nothing_but_the_speed():
    arguments = ("--prompt", PROMPT, "--max-tokens", "48")
    drafted = sample_json(*arguments)
    reference = sample_json(*arguments, "--no-draft", "--plain-width", "5")
    assert drafted["token_ids"] == reference["token_ids"]
    assert drafted["text"] == reference["text"]
    assert reference["speculative"] == {"enabled": False, "reason": "the draft was switched off"}
    assert reference["usage"]["accept_rate"] is None


def test_coupled_sampling_equals_plain_sampling_with_the_same_seed():
    arguments = ("--prompt", PROMPT, "--max-tokens", "48", "--temperature", "1", "--seed", "11")
    drafted = sample_json(*arguments, "--accept-rule", "coupled")
    plain = sample_json(*arguments, "--no-draft", "--plain-width", "5")
    assert drafted["token_ids"] == plain["token_ids"]


def test_the_prompt_comes_from_stdin_or_a_file(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    texts = [
        sample("--max-tokens", "8", "--quiet", *extra, **options).stdout
        for extra, options in (
            (("--prompt", PROMPT), {}),
            (("--prompt-file", str(file)), {}),
            ((), {"stdin": PROMPT}),
        )
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_stop_string_ends_the_text():
    free = sample_json("--prompt", PROMPT, "--max-tokens", "40")
    stop = free["text"][10:14]
    value = sample_json("--prompt", PROMPT, "--max-tokens", "40", "--stop", stop, "--stop", "\x00never")
    assert value["text"] == free["text"][: free["text"].index(stop)]
    assert value["finish_reason"] == "stop"


def test_chat_without_a_template_says_so_and_uses_a_plain_one():
    result = sample("--chat", "--prompt", "hello", "--max-tokens", "4")
    assert result.exit_code == 0
    assert "no chat template" in result.stderr


def test_a_model_alone_decodes_plainly(tiny_checkpoint):
    result = sample(str(tiny_checkpoint), "--prompt", PROMPT, "--max-tokens", "4")
    assert "no speculation: no draft model was given" in result.stderr


ONE_LINE_ERRORS = [
    (2, ["--draft-k", "0"], "--draft-k: got 0, expected 1 to 32"),
    (2, ["--draft-k", "1000"], "--draft-k: got 1000, expected 1 to 32"),
    (2, ["--draft-k", "four"], "--draft-k: got 'four', expected 1 to 32, auto or auto:N"),
    (2, ["--temperature", "-1"], "--temperature: got -1.0, expected 0, or 0.0001 to 10000"),
    (2, ["--temperature", "nan"], "temperature: got nan"),
    (2, ["--top-p", "2"], "top-p: got 2.0, expected more than 0, at most 1"),
    (2, ["--top-k", "-5"], "top-k: got -5"),
    (2, ["--min-p", "1.1"], "min-p: got 1.1"),
    (2, ["--max-tokens", "0"], "max-tokens: got 0"),
    (2, ["--seed", "-1"], "seed: got -1"),
    (2, ["--seed", str(2**70)], "seed: got"),
    (2, ["--stop", ""], "stop: got"),
    (2, ["--accept-rule", "typical"], "typical"),
    (2, ["--dtype", "int4"], "int4"),
    (2, ["--plain-width", "5"], "--plain-width: got 5 with a draft, expected --no-draft"),
    (2, ["--no-draft", "--plain-width", "0"], "--plain-width: got 0, expected 1 to 33"),
    (2, ["--no-draft", "--draft-model", "x"], "got both a draft model and --no-draft"),
    (2, ["--bogus"], "No such option"),
    (2, ["--prompt-file", "also"], "got both --prompt and --prompt-file"),
    (2, ["--stop", "\udcff"], "--stop: got"),
    (2, [""], "MODEL: got '', expected the path of a directory"),
    (1, ["/no/such/model"], "expected a model directory"),
    (1, ["/" + "a" * 5000], "File name too long"),
    (1, ["--draft-model", "/no/such/model"], "expected a model directory"),
]


@pytest.mark.parametrize(("code", "arguments", "message"), ONE_LINE_ERRORS, ids=lambda value: str(value)[:40])
def test_bad_input_is_one_line_on_stderr(code, arguments, message):
    result = sample("--prompt", PROMPT, *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "got an empty prompt"), (b"caf\xe9", "byte 3 is 0xe9, expected UTF-8")],
)
def test_a_prompt_file_must_be_utf8_text(tmp_path, data, message):
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    for result in (sample("--prompt-file", str(file)), sample(stdin=data)):
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_missing_prompt_file_is_named():
    result = sample("--prompt-file", "/no/such/file")
    assert result.exit_code == 2
    assert "/no/such/file" in result.stderr


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    result = sample("--prompt", "word " * 3000)
    assert result.exit_code == 1
    assert "expected fewer than the context of 1024" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_command_is_one_line():
    result = invoke("simple")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_version_names_mlx_device_and_blas(runtime):
    output = invoke("--version").stdout
    assert f"mlx {runtime.mlx_version}" in output
    assert f"device {runtime.device}" in output
    if runtime.blas:
        assert runtime.blas in output


def test_help_lists_the_commands_with_a_line_each():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "sample" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in ("bench", "chat", "convert", "gate", "match", "replay", "sample", "serve")),
    ],
)
def test_help_imports_neither_mlx_nor_mlx_lm(arguments):
    code = (
        "import sys\nfrom posttrainllm.adapters.cli import cli\n"
        f"try:\n    cli.main({arguments!r})\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "bad = {name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm', 'transformers', 'numpy'}\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_prints_what_was_decoded_and_exits_with_130():
    command = [sys.executable, "-u", "-m", "posttrainllm.adapters", "sample", "--prompt", PROMPT, "--max-tokens", "900"]
    process = subprocess.Popen(
        [*command, "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a job in the background of a script, such as CI, would inherit that Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first = process.stdout.read(1)  # decoding has begun
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (first + rest).decode("utf-8").endswith("\n")
    assert b"finish: cancelled" in errors
    assert b"Traceback" not in errors


def test_ctrl_c_under_json_still_prints_one_object():
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from posttrainllm.adapters.completion import Completion\n"
        "original, steps = Completion.absorb, []\n"
        "def absorb(self, step):\n"
        "    steps.append(step)\n"
        "    if len(steps) == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return original(self, step)\n"
        "Completion.absorb = absorb\n"
        "sys.argv = ['posttrainllm', 'sample', '--prompt', 'x', '--json']\n"
        "from posttrainllm.adapters.cli import main\nmain()\n"
    )
    code = "from posttrainllm.adapters.runtime import start\nstart()\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert json.loads(done.stdout)["finish_reason"] == "cancelled"


def test_a_reader_that_goes_away_ends_the_run_quietly():
    command = (
        f"{sys.executable} -m posttrainllm.adapters sample --prompt x --max-tokens 300 --ignore-eos --quiet | head -c 5"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.stderr == b""
    assert len(done.stdout) == 5


def test_output_is_whole_characters_whatever_the_locale():
    done = run_process("sample", "--prompt", "# 日本", "--max-tokens", "8", env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr


def test_without_a_backend_one_line_names_both_extras():
    code = (
        "import sys\nsys.modules['mlx.core'] = None\nfrom posttrainllm.adapters.cli import main\n"
        "sys.argv = ['posttrainllm', 'sample', '--prompt', 'x']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    if sys.platform == "linux":
        assert "'posttrainllm[cpu]' or 'posttrainllm[cuda13]'" in done.stderr


def shell(line: str, **environment: str) -> subprocess.CompletedProcess:
    line = line.replace("SAMPLE", f"{sys.executable} -m posttrainllm sample --prompt def --max-tokens 6")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as users run it
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=120, env={**buffered, **environment}
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="nothing here is always full, as on macOS")
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_full_disk_is_one_line(options):
    done = shell(f"SAMPLE {options} >/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write the output: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_standard_error_does_not_stop_decoding():
    done = shell("SAMPLE 2>&-")
    assert done.returncode == 0
    assert done.stdout.strip()


def test_a_standard_input_that_cannot_be_read_is_one_line():
    done = shell(f"{sys.executable} -m posttrainllm sample 0>/dev/null")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_long_prompt_is_one_line_in_a_process_of_its_own():
    done = shell(f"{sys.executable} -m posttrainllm sample --prompt-file <(yes word | head -n 3000)")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


def test_a_temporary_directory_that_cannot_hold_kernels_means_running_uncompiled():
    done = shell("SAMPLE --quiet", TMPDIR="/proc")
    assert done.returncode == 0, done.stderr
    if sys.platform == "linux" and "cannot be" in done.stderr:
        assert len(done.stderr.splitlines()) == 1


def test_the_seed_of_a_sampled_text_is_printed():
    done = sample("--prompt", PROMPT, "--max-tokens", "8", "--temperature", "0.9", "--seed", "12345")
    assert "temperature 0.9 | seed 12345" in done.stderr


@pytest.mark.parametrize("options", ["", "--json", "--quiet"])
def test_a_closed_standard_output_is_one_line(options):
    done = shell(f"SAMPLE {options} >&-")
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the output: standard output is closed\n"


def test_a_closed_standard_input_changes_nothing_where_a_prompt_is_given():
    done = shell("SAMPLE --quiet <&-")
    assert done.returncode == 0, done.stderr
    assert done.stdout == shell("SAMPLE --quiet").stdout


@pytest.mark.parametrize("path", ["a/" + "b" * 5000, "c" * 300])
def test_a_path_that_is_too_long_is_no_fault_of_the_output(path):
    result = sample(path, "--prompt", "x")
    assert result.exit_code == 1
    assert "File name too long" in result.stderr
    assert "output" not in result.stderr


@pytest.mark.parametrize("command", ["sample", "chat"])
def test_a_system_message_that_is_no_text_is_a_usage_error(command):
    done = shell(f"{sys.executable} -m posttrainllm {command} --system $'x\\xff' </dev/null")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --system: got an empty text or bytes that are no UTF-8")
