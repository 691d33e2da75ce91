"""Holding a JSON line of a throughput measurement against what it has to be: exact, complete, drafted well enough."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from posttrainllm.evals.bench.summary import missing_fields

__all__ = ["check", "problems"]

_SETTING = (
    *("benchmark", "model", "draft_model", "dtype", "device", "device_name", "versions", "rows", "draft_ks"),
    *("prompt_tokens", "max_tokens", "repeats", "capacity", "forward_s"),
)


_SERVING = (
    *("benchmark", "server", "rows", "accept_rate", "failed", "draft_k", "parallel"),
    *("prompt_tokens", "max_tokens", "repeats"),
)
_SERVING_ROW = ("name", "tok_s", "tok_s_range", "ratio", "ratio_range", "decode_tok_s", "prompts", "equal")


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
        if result["benchmark"] == "serve-throughput":
            return _serving_problems(result, min_accept_rate)
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


def _serving_problems(result: dict[str, Any], min_accept_rate: float) -> list[str]:
    """The same of `posttrainllm.evals.serve_throughput`."""
    found = [f"{name} is missing" for name in _SERVING if result.get(name) in (None, [])]
    table, mean = result["rows"], result["accept_rate"]["mean"]
    found += [f"{row['name']}: {name} is missing" for row in table for name in _SERVING_ROW if row.get(name) is None]
    if result["failed"]:
        row = table[1]
        found.append(f"{row['name']}: {row['equal']} of {row['prompts']} texts are those of {table[0]['name']}")
    if (mean or 0.0) < min_accept_rate:
        found.append(f"got a mean accept rate of {mean}, expected {min_accept_rate} or more")
    return found


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--accept-rate", default=0.0, show_default=True, help="Least accept rate.")
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
