import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from posttrainllm.adapters.chat.conversation import Conversation
from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.generation import Generation
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.kernel.errors import CheckpointError, MemoryLimitError

SMALL = ("--max-tokens", "12")


def chat(lines, *arguments):
    return CliRunner().invoke(cli, ["chat", *SMALL, *arguments], input="".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def chat_checkpoint(tiny_checkpoint, tmp_path_factory):
    """A checkpoint whose template shows everything it is given."""
    path = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("chat") / "model")
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}{% if style %}[{{ style }}]{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_every_reply_continues_the_whole_conversation(monkeypatch):
    asked = []

    def spy(self, tokenizer):
        asked.append([dict(message) for message in self.messages])
        return tokenizer.encode("def f(x):")

    monkeypatch.setattr(Conversation, "encode", spy)
    result = chat(["first", "second", "/reset", "third"])
    assert result.exit_code == 0
    assert [message["content"] for message in asked[1]][::2] == ["first", "second"]
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]
    assert asked[1][1]["content"] in result.stdout
    assert [message["content"] for message in asked[2]] == ["third"]


def test_the_accept_rate_follows_each_reply():
    result = chat(["def f(x):", "more"])
    lines = [line for line in result.stderr.splitlines() if "draft accepted" in line]
    assert len(lines) == 2
    assert all("context" in line and "of 1024" in line for line in lines)
    assert "draft accepted" not in chat(["def f(x):"], "--quiet").stderr


def test_a_reply_is_what_sample_gives_for_the_same_conversation():
    said = chat(["def f(x):"]).stdout
    sampled = CliRunner().invoke(cli, ["sample", "--chat", "--quiet", "--prompt", "def f(x):", *SMALL]).stdout
    assert said == sampled


@pytest.mark.parametrize("name", ["sample", "chat"])
def test_system_message_and_template_arguments_reach_the_template(chat_checkpoint, monkeypatch, name):
    prompts = []
    original = Generation.__init__

    def spy(self, pair, ids, *arguments, **options):
        prompts.append(pair.tokenizer.decode(ids))
        original(self, pair, ids, *arguments, **options)

    monkeypatch.setattr(Generation, "__init__", spy)
    options = ["--system", "be brief", "--chat-template-args", '{"style": "plain"}', *SMALL]
    if name == "sample":
        CliRunner().invoke(cli, ["sample", str(chat_checkpoint), "--chat", "--prompt", "hello", *options])
    else:
        CliRunner().invoke(cli, ["chat", str(chat_checkpoint), *options], input="hello\n")
    assert prompts == ["<system:be brief><user:hello>[plain]"]


@pytest.mark.parametrize("name", ["sample", "chat"])
@pytest.mark.parametrize("value", ["{", "[1]", "3", "", "{" * 100_000], ids=["torn", "list", "number", "empty", "deep"])
def test_template_arguments_that_are_no_object_are_a_usage_error(name, value):
    extra = ["--chat", "--prompt", "x"] if name == "sample" else []
    result = CliRunner().invoke(cli, [name, *extra, "--chat-template-args", value])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --chat-template-args: got")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "conversation", "chat_template"])
def test_template_arguments_that_are_not_the_users_to_set_are_named(name):
    result = CliRunner().invoke(cli, ["chat", "--chat-template-args", json.dumps({name: True})], input="hello\n")
    assert result.exit_code == 2
    assert f"--chat-template-args: got {name!r}, expected arguments other than" in result.stderr


@pytest.mark.parametrize(
    "option", [("--system", "x"), ("--chat-template-args", '{"a": 1}'), ("--chat-template-args", "{}")]
)
def test_sample_takes_them_with_chat_alone(option):
    result = CliRunner().invoke(cli, ["sample", "--prompt", "x", *option])
    assert result.exit_code == 2
    assert "without --chat" in result.stderr


def test_commands_are_no_messages():
    result = chat(["/help", "/nonsense now", "", "   ", "/exit", "never read"])
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "/reset forgets" in result.stderr
    assert "error: got '/nonsense', expected one of /help /reset /exit" in result.stderr


def test_a_conversation_that_outgrows_the_context_loses_only_the_message_that_did_not_fit():
    result = chat(["def f(x):", "word " * 2000, "return"])
    assert result.exit_code == 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "expected fewer than the context of 1024" in errors[0]
    assert "/reset starts anew" in errors[0]
    assert result.stderr.count("draft accepted") == 2


def test_a_template_that_refuses_the_system_message_is_one_line_and_no_crash(chat_checkpoint, monkeypatch):
    def refuse(self, tokenizer):
        raise CheckpointError("its chat template cannot be used: no system message")

    monkeypatch.setattr(Conversation, "encode", refuse)
    result = CliRunner().invoke(cli, ["chat", str(chat_checkpoint), "--system", "x"], input="hello\nagain\n")
    assert result.exit_code == 0
    assert result.stderr.count("error: its chat template cannot be used") == 2


def test_interrupting_a_reply_keeps_what_was_said_of_it(monkeypatch):
    spoken = []
    original = Generation.__iter__

    def interrupted(self):
        for count, chunk in enumerate(original(self)):
            if count == 1 and not spoken:
                spoken.append(True)
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(Generation, "__iter__", interrupted)
    replies = []
    monkeypatch.setattr(Conversation, "reply", lambda self, text: replies.append(text))
    result = chat(["def f(x):", "def g(x):"])
    assert result.exit_code == 0
    assert "finish: cancelled" in result.stderr
    assert len(replies) == 2
    assert replies[0]


def test_a_reply_stopped_before_its_first_word_leaves_no_empty_turn(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Generation, "__iter__", interrupted)
    kept = []
    monkeypatch.setattr(Conversation, "reply", lambda self, text: kept.append(text))
    monkeypatch.setattr(Conversation, "take_back", lambda self: kept.append("taken back"))
    assert chat(["def f(x):"]).exit_code == 0
    assert kept == ["taken back"]


def test_memory_that_runs_out_ends_no_conversation(monkeypatch):
    def refuse(self):
        raise MemoryLimitError("not enough memory for the caches")

    monkeypatch.setattr(Forecast, "check", refuse)
    result = chat(["def f(x):", "def g(x):"])
    assert result.exit_code == 0
    assert result.stderr.count("error: not enough memory for the caches; the message was not taken") == 2


def test_bytes_that_are_no_text_end_a_piped_conversation_with_one_line():
    result = CliRunner().invoke(cli, ["chat", *SMALL], input=b"\xff\xfe\n")
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if not line.startswith("warning:")]
    assert errors == ["error: standard input: got bytes that are no UTF-8, expected text"]


def test_on_a_terminal_it_prompts_answers_and_leaves_at_the_end_of_input():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "posttrainllm", "chat", *SMALL], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes, times: int = 1) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while seen.count(text) < times:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)

    try:
        wait_for(b"> ")
        os.write(ours, b"def f(x):\n")
        wait_for(b"finish: length")
        wait_for(b"> ", times=2)
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
