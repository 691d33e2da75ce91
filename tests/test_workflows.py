"""The workflows: what they run exists, and nothing runs that is not pinned, bounded and without rights."""

import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from posttrainllm.adapters.cli import cli

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
JOBS = [
    pytest.param(job, id=f"{file.stem}: {name}")
    for file in FILES
    for name, job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].items()
]


def commands_of(job):
    """Words of every command, and of each part of a pipe."""
    for step in job["steps"]:
        for line in step.get("run", "").splitlines():
            for part in line.split(" | "):
                yield shlex.split(part)


@pytest.mark.parametrize("job", JOBS)
def test_every_command_of_a_job_exists_with_its_options(job):
    seen = []
    for program, *arguments in commands_of(job):
        if program == "make":
            assert set(arguments) <= set(TARGETS), arguments
            seen += arguments
        elif program == ".venv/bin/posttrainllm":
            command = cli.get_command(click.Context(cli), arguments[0])
            command.make_context(arguments[0], arguments[1:])  # it refuses what it does not know
            seen.append(arguments[0])
        else:
            assert program == "tee"
    assert {"test", "gate"} <= set(seen)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_ends_and_what_it_takes_from_elsewhere_is_pinned(job):
    assert 0 < job["timeout-minutes"] <= 60
    assert "permissions" not in job  # those of the file
    for step in job["steps"]:
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_may_read_the_code_and_nothing_else_and_a_newer_run_ends_an_older_one(file):
    text = file.read_text(encoding="utf-8")
    value = yaml.safe_load(text)
    assert value["permissions"] == {"contents": "read"}
    assert value["concurrency"]["cancel-in-progress"] is True
    assert value["defaults"]["run"]["shell"] == "bash"  # else `gate | tee` would pass where the gate fails
    for line in text.splitlines():
        if "uses: " in line:
            assert re.search(r" # v\d+\.\d+\.\d+$", line), line
    assert not re.search(r"\$\{\{\s*(secrets|github\.event)", text)  # nothing that a pull request could fill in


def test_both_systems_and_the_oldest_python_are_run():
    (linux,) = [job.values[0] for job in JOBS if "linux" in job.id]
    (macos,) = [job.values[0] for job in JOBS if "macos" in job.id]
    assert linux["runs-on"].startswith("ubuntu-")
    assert linux["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert macos["runs-on"] in ("macos-14", "macos-15")  # arm64: Metal
