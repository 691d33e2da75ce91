"""The measurement of a start: that it measures what it says; no test asserts a time."""

import json

from click.testing import CliRunner

from posttrainllm.evals import startup
from posttrainllm.evals.startup import command


def test_it_reports_every_row_and_the_phases_of_a_start(monkeypatch):
    monkeypatch.setattr(startup, "_rows", lambda mlx_lm: {"a row": lambda: 0.5})
    result = CliRunner().invoke(command, ["--runs", "1"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["seconds"] == {"a row": [0.5]}
    assert len(value["phases_ms"]) == 9
    assert all(milliseconds[0] > 0 for milliseconds in value["phases_ms"].values())
    assert "a row" in result.stdout.splitlines()[0]
