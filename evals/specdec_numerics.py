"""`python -m posttrainllm.evals.specdec_numerics`: the gate in several dtypes, and the rows of a table.

It runs what `posttrainllm gate` runs, one dtype after the other, prints each summary, then the rows that stand in
docs/techniques/precision.md, and one JSON object on the last line.
"""

import json
import shlex
import sys
from typing import Any

import click

from posttrainllm.adapters.change_options import change_options
from posttrainllm.adapters.gate.command import FAILED, checked
from posttrainllm.adapters.loading.pair import DTYPES
from posttrainllm.evals.entry import run_command

__all__ = ["command"]


@click.command(help="Run the numerics gate in one dtype or several; print table rows and, on the last line, JSON.")
@click.argument("model", required=False)
@click.option("--draft-model", metavar="PATH", help="Directory of the draft. Default: the embedded one without MODEL.")
@click.option("--draft-k", type=int, default=4, show_default=True, help="Tokens the draft proposes a step.")
@click.option("--prompts", type=int, metavar="N", help="Take the first N prompts. Default: all.")
@click.option("--prompts-file", metavar="FILE", help="JSON lines with a `text`. Default: the package's set.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens to generate a prompt.")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="May be given several times.")
@change_options()
@click.option("--fresh", is_flag=True, help="Run although a verdict is on file.")
def command(*, dtypes: tuple[str, ...], **options: Any) -> None:
    """Run, print; exit status 3 when a verdict is broken."""
    from posttrainllm.adapters.gate.report import summary, table_row

    rows, values, broken = [], [], False
    for dtype in dtypes or ("auto",):
        result, key, cached = checked(dtype=dtype, **options)
        click.echo("\n".join([*summary(result, key, cached=cached), ""]))
        rows += [table_row(path, key, _gate_command(options, dtype)) for path in result.paths]
        values.append({"cached": cached, "key": key, **result.to_dict()})
        broken |= result.verdict == "broken"
    click.echo("\n".join([*rows, "", json.dumps(values, ensure_ascii=False)]))
    if broken:
        sys.exit(FAILED)


def _gate_command(options: dict[str, Any], dtype: str) -> str:
    """The command that reaches the same verdict alone."""
    words = ["posttrainllm", "gate"]
    if options["model"] is not None:
        words.append(options["model"])
    for name, usual in (("draft_model", None), ("draft_k", 4), ("prompts", None), ("prompts_file", None)):
        if options[name] != usual:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    if options["max_tokens"] != 128:
        words += ["--max-tokens", str(options["max_tokens"])]
    words += options["changes"].options
    return shlex.join([*words, "--dtype", dtype])


if __name__ == "__main__":
    run_command(command)
