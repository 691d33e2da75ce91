"""`python -m posttrainllm.evals.serve_turns`: what it says of two servers' answers."""

import json

import pytest
from click.testing import CliRunner

from posttrainllm.evals import serve_turns
from posttrainllm.evals.serve_turns import Turn, summarize
from posttrainllm.kernel.errors import UsageError


def conversation(*, kept=0.1, other=0.2, text="same"):
    def turns(first, second, cached, text):
        return [
            Turn(text="a", prompt_tokens=100, cached_tokens=0, ttft_s=first),
            Turn(text=text, prompt_tokens=150, cached_tokens=cached, ttft_s=second),
        ]

    return [turns(0.1, kept, 64, text), turns(0.1, other, 0, "same")]


def test_the_drop_is_taken_within_each_conversation():
    found = summarize([conversation(), conversation(kept=0.3, other=0.4), conversation(kept=0.1, other=1.0)])
    first, second = found["rows"]
    assert (first["drop"], first["cached_tokens"]) == (0, 0)
    assert second["drop"] == pytest.approx(0.5)
    assert (second["drop_min"], second["drop_max"]) == (pytest.approx(0.25), pytest.approx(0.9))
    assert (second["prompt_tokens"], second["cached_tokens"]) == (150, 64)
    assert (second["ttft_s"], second["ttft_s_without"]) == (0.1, 0.4)
    assert (found["failed"], second["same"], second["of"]) == (False, 3, 3)


def test_a_reply_that_differs_fails():
    found = summarize([conversation(), conversation(text="other")])
    assert found["failed"]
    assert found["rows"][1]["same"] == 1


@pytest.mark.parametrize("name", ["prompt_tokens", "reply_tokens", "question_tokens", "repeats"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: got 0, expected 1 or more"):
        serve_turns.run(**{name: 0})


@pytest.mark.slow
def test_a_second_turn_is_found_in_what_the_first_one_left():
    options = ["--prompt-tokens", "130", "--reply-tokens", "8", "--question-tokens", "4", "--repeats", "2"]
    done = CliRunner().invoke(serve_turns.command, options)
    assert done.exit_code == 0, (done.output, done.exception)
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["cached_tokens"] for row in result["rows"]] == [0, 128]
    assert [row["same"] for row in result["rows"]] == [2, 2]
