"""The measurement of a start: that it measures what it says; no test asserts a time."""

import json
import sys

import click
import pytest
from click.testing import CliRunner

from posttrainllm.evals import startup
from posttrainllm.evals.startup import command, first_text_s


def test_the_clock_stops_at_text_and_not_at_what_stands_before_it():
    code = "print('====', flush=True); print({!r}, end='', flush=True)"
    assert first_text_s([sys.executable, "-c", code.format("text")], behind=b"====\n") > 0
    with pytest.raises(click.ClickException, match="no text"):
        first_text_s([sys.executable, "-c", code.format("")], behind=b"====\n")


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)", "print('x', flush=True); raise SystemExit(3)"])
def test_a_process_that_prints_nothing_or_fails_is_an_error(code):
    with pytest.raises(click.ClickException):
        first_text_s([sys.executable, "-c", code])


def test_it_reports_every_row_and_the_phases_of_a_start(monkeypatch):
    monkeypatch.setattr(startup, "_rows", lambda mlx_lm: {"a row": lambda: 0.5})
    result = CliRunner().invoke(command, ["--runs", "1"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["seconds"] == {"a row": [0.5]}
    assert len(value["phases_ms"]) == 9
    assert all(milliseconds[0] > 0 for milliseconds in value["phases_ms"].values())
    assert "a row" in result.stdout.splitlines()[0]
