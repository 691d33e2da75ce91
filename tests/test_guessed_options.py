"""Who types what mlx-lm, llama.cpp, vLLM or Ollama call an option or a command is told what it is here."""

import re
from difflib import get_close_matches

import click
import pytest
from click.testing import CliRunner

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.guessed_options import GUESSED, GUESSED_COMMANDS

COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))}
OPTIONS = {name: {text for param in found.params for text in param.opts} for name, found in COMMANDS.items()}


def said(*arguments):
    done = CliRunner().invoke(cli, arguments, prog_name="posttrainllm")
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["sample", "--temp", "0.7"], "--temp: it is --temperature here"),
        (["sample", "--temp=0.7"], "--temp: it is --temperature here"),
        (["chat", "--n-predict", "64"], "--n-predict: it is --max-tokens here"),
        (["sample", "-n", "64"], "-n: it is --max-tokens here"),
        (["sample", "-n64"], "-n: it is --max-tokens here"),
        (["sample", "--num-draft-tokens", "3"], "--num-draft-tokens: it is --draft-k here"),
        (["gate", "-md", "draft"], "-md: it is --draft-model here"),
        (["serve", "--speculative-config", "{}"], "--speculative-config: it is --draft-model and --draft-k here"),
        (["serve", "--max-model-len", "512"], "--max-model-len: it is --max-context here"),
        (["sample", "-c", "512"], "-c: no context is set, it holds the prompt and --max-tokens"),
        (["serve", "-np", "4"], "-np: it is --slots here"),
        (["serve", "--temp", "1"], "--temp: every request has its own temperature"),
        (["serve", "--top-k", "1"], "--top-k: every request has its own top_k"),
        (["sample", "--top_k", "1"], "--top_k: it is --top-k here"),
        (["sample", "--max_tokens=4"], "--max_tokens: it is --max-tokens here"),
        (["sample", "--model", "m"], "--model: the model stands without an option, as in `posttrainllm sample MODEL`"),
        (["serve", "-hf", "a/b"], "-hf: the model stands without an option, as in `posttrainllm serve MODEL`"),
        (
            ["zoo", "evaluate", "--model", "m"],
            "--model: the model stands without an option, as in `posttrainllm zoo evaluate MODEL`",
        ),
        (["sample", "-ngl", "99", "-c", "4"], "-ngl: every layer is on the device that MLX runs on"),
        (["bench", "-p", "64"], "-p: it is --prompt-tokens here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_guessed_option_is_told_what_it_is_here(arguments, answer):
    assert said(*arguments) == f"error: no such option {answer}"


@pytest.mark.parametrize(
    "arguments",
    [["sample", "--bogus"], ["sample", "-cnv"], ["doctor", "--model", "m"], ["gate", "--temp", "1"], ["--temp"]],
    ids=" ".join,
)
def test_where_nothing_fits_clicks_own_line_stands(arguments):
    assert said(*arguments).startswith("error: No such option")


def test_every_name_that_an_answer_gives_is_an_option_of_some_command():
    every = set().union(*OPTIONS.values())
    for guessed, answers in GUESSED.items():
        for name in re.findall(r"--[a-z-]+", " ".join(answers)):
            assert name in every, guessed


def test_no_row_stands_for_an_option_of_ours_or_repeats_what_click_suggests():
    for guessed, answers in GUESSED.items():
        fitting = [options for options in OPTIONS.values() if answers[0] in options]
        long = guessed.startswith("--")  # of one letter click suggests nothing
        suggested = [get_close_matches(guessed, options) if long else [] for options in fitting]
        assert not fitting or any(found != [answers[0]] for found in suggested), guessed
        for name, options in OPTIONS.items():
            assert guessed not in options or answers[0] not in options, (name, guessed)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["generate", "--prompt", "a"], '"generate": it is sample here'),
        (["server"], '"server": it is serve here'),
        (["sampel"], '"sampel": did you mean sample?'),
        (["zoo", "trian"], '"trian": did you mean train?'),
        (["a\x1b[31m"], '"a\\u001b[31m": expected one of ' + ", ".join(COMMANDS)),
        ([""], '"": expected one of ' + ", ".join(COMMANDS)),
        (["zoo", "xyzzy"], '"xyzzy": expected one of corpus, evaluate, list, tokenizer, train'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_guessed_command_is_told_what_it_is_here(arguments, answer):
    assert said(*arguments) == f"error: no such command {answer}"


def test_no_guessed_command_hides_one_and_each_is_answered_with_one_there_is():
    for guess, answer in GUESSED_COMMANDS.items():
        assert guess not in COMMANDS
        first, *rest = answer.split()
        assert first in COMMANDS
        assert all(name in COMMANDS[first].list_commands(click.Context(COMMANDS[first])) for name in rest)


def test_what_looks_like_an_option_is_not_taken_for_a_command():
    assert said("--", "--version=3") == "error: Option '--version' does not take a value."
