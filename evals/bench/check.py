"""Holding a JSON line of `posttrainllm bench` against what it has to be: exact, complete, and drafted well enough."""

import json
import sys
from pathlib import Path

import click

from posttrainllm.evals.bench.summary import missing_fields

__all__ = ["check", "problems"]

_SETTING = (
    *("benchmark", "model", "draft_model", "dtype", "device", "device_name", "versions", "rows", "draft_ks"),
    *("prompt_tokens", "max_tokens", "repeats", "capacity", "forward_s"),
)


def problems(text: str, min_accept_rate: float) -> list[str]:
    """Find what is wrong with a JSON line.

    Args:
        text: the line.
        min_accept_rate: accept rate that every speculative row of ours has to reach.

    Returns:
        One line each; none when all is well.
    """
    try:
        result = json.loads(text)
        table = result["rows"]
        if result["draft_model"] is None:
            return ["got no draft, expected one: nothing speculative was measured"]
        found = [f"{name} is missing" for name in _SETTING if result.get(name) in (None, [])]
        found += [f"{what} is missing" for what in missing_fields(table)]
        ours = [row for row in table if row["engine"] == "posttrainllm"]
        drafted = [row for row in ours if row["draft_k"]]
        found += [
            f"{row['name']}: {row['equal']} of {row['prompts']} equal the reference" for row in ours if row["failed"]
        ]
        found += [
            f"{row['name']}: got accept rate {row['accept_rate']}, expected {min_accept_rate} or more"
            for row in drafted
            if (row["accept_rate"] or 0.0) < min_accept_rate
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"no result of posttrainllm bench: {type(error).__name__}: {error}"]
    return found


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--accept-rate", default=0.0, show_default=True, help="Least accept rate of a speculative row.")
def check(file: Path, accept_rate: float) -> None:
    """Check the JSON line in FILE; exit 1 with a line for each problem."""
    found = problems(file.read_text(encoding="utf-8"), accept_rate)
    for line in found:
        click.echo(f"error: {line}", err=True)
    if found:
        sys.exit(1)
    click.echo("the result is complete, every speculative output of ours is the reference's")


if __name__ == "__main__":
    check()
