"""A start imports what it needs: neither mlx-lm nor transformers for a Llama-shaped model with a tokenizer.json."""

import json
import signal
import subprocess
import sys

import pytest

HEAVY = {"mlx_lm", "transformers"}
REPORT = (
    "import atexit, sys\n"
    "atexit.register(lambda: print('imported', sorted({name.partition('.')[0] for name in sys.modules} & "
    f"{HEAVY | {'jinja2', 'huggingface_hub'}!r}), file=sys.stderr))\n"
)
CLI = REPORT + "from posttrainllm.adapters.cli import cli\ncli.main(sys.argv[1:])\n"
PROMPT = ("--prompt", "def add(a, b):", "--max-tokens", "4", "--quiet")


def imported(code, *arguments, stdin=""):
    """Which of the heavy packages a process has imported by its end."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return reported(done.stderr)


def reported(text):
    line = next(line for line in text.splitlines() if line.startswith("imported "))
    return set(json.loads(line.removeprefix("imported ").replace("'", '"')))


def test_sample_on_the_embedded_pair_imports_neither_mlx_lm_nor_transformers():
    assert imported(CLI, "sample", *PROMPT) == set()


def test_sample_through_the_module_imports_mlx_lm():
    assert imported(CLI, "sample", "--forward", "module", *PROMPT) >= HEAVY


def test_a_chat_needs_a_template_and_no_transformers():
    assert imported(CLI, "chat", "--max-tokens", "4", stdin="hello\n") & HEAVY == set()


def test_a_server_imports_neither_mlx_lm_nor_transformers():
    options = ("--port", "0", "--gate", "off", "--draft-k", "2", "--max-context", "128")
    command = [sys.executable, "-c", CLI, "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        log = []
        for line in server.stderr:
            log.append(line)
            if " serving " in line:
                server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0, log
    assert reported("".join(log)) & HEAVY == set()


def test_the_python_api_imports_neither(tiny_checkpoint):
    code = REPORT + "import posttrainllm\npair = posttrainllm.load(model=sys.argv[1])\n"
    code += "posttrainllm.generate(pair=pair, prompt='a', max_tokens=2)"
    assert imported(code, str(tiny_checkpoint)) & HEAVY == set()


@pytest.mark.parametrize("name", ["gate", "bench", "replay"])
def test_the_help_of_the_other_commands_imports_neither(name):
    assert imported(CLI, name, "--help") & HEAVY == set()
