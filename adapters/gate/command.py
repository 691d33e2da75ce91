"""`posttrainllm gate`: parse, call, print."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import click

from posttrainllm.adapters.gate.prompts import read_prompts
from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.options import check_draft_k, model_options
from posttrainllm.kernel.errors import UsageError

if TYPE_CHECKING:  # they import MLX, and --help must not
    from posttrainllm.adapters.gate.findings import GateResult
    from posttrainllm.adapters.gate.run import Progress

__all__ = ["FAILED", "checked", "gate"]

FAILED = 3
"""Exit status where the output is not what was promised."""


@click.command()
@model_options()
@click.option("--draft-k", type=int, default=4, show_default=True, help="Tokens the draft proposes a step, 1 to 32.")
@click.option(
    "--prompts", type=int, metavar="N", help="Take the first N prompts. Default: all, 100 of the package's set."
)
@click.option("--prompts-file", metavar="FILE", help="JSON lines with a `text`. Default: the package's set.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens to generate a prompt.")
@click.option("--strict", is_flag=True, help="Exit with 3 also where only width 1 differs, at near-ties.")
@click.option("--fresh", is_flag=True, help="Run although a verdict is on file.")
@click.option("--report", is_flag=True, help="Print a block to paste into a bug report.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def gate(*, strict: bool, report: bool, as_json: bool, **options: Any) -> None:
    """Prove on this machine that a draft changes nothing but the speed.

    Decodes prompts with the draft and without, and compares: identical, width-identical (only near-ties differ from
    width 1) or broken. MODEL is named as for `sample`; without it, the embedded pair. The verdict is kept,
    and `sample` heeds a broken one.
    """
    if report and as_json:
        raise UsageError("got both --report and --json, expected one of them")
    result, key, cached = checked(**options)
    from posttrainllm.adapters.gate.report import bug_report, summary

    if as_json:
        click.echo(json.dumps({"cached": cached, "key": key, **result.to_dict()}, ensure_ascii=False))
    else:
        click.echo("\n".join(bug_report(result, key) if report else summary(result, key, cached=cached)))
    wrong = result.forward is not None and not result.forward.holds
    if wrong or result.verdict == "broken" or (strict and result.verdict != "identical"):
        sys.exit(FAILED)


def checked(
    *,
    model: str | None = None,
    draft_model: str | None = None,
    draft_k: int = 4,
    prompts: int | None = None,
    prompts_file: str | None = None,
    max_tokens: int = 128,
    dtype: str = "auto",
    forward: str = "auto",
    changes: ModelChanges = UNCHANGED,
    fresh: bool = False,
) -> tuple["GateResult", dict[str, Any], bool]:
    """Find the verdict on file, or reach one and keep it.

    Args:
        model: directory of the target; None is the embedded one.
        draft_model: directory of the draft.
        draft_k: K, 1 to 32.
        prompts: how many; None for all.
        prompts_file: None for the package's set, whose prompts are cut where they do not fit; those of a file are not.
        max_tokens: ids to generate a prompt.
        dtype: one of DTYPES.
        forward: one of FORWARDS.
        changes: adapters, and how keys and values are kept.
        fresh: whether to run in any case.

    Returns:
        The result, its key, and whether it was on file.

    Raises:
        PosttrainllmError: see `posttrainllm.kernel.errors`.
    """
    check_draft_k(draft_k)
    if max_tokens < 1:
        raise UsageError(f"--max-tokens: got {max_tokens}, expected 1 or more")
    if model is not None and draft_model is None:  # said before gigabytes are read
        raise UsageError("got MODEL without --draft-model, expected both: the gate compares decoding with a draft")
    texts = read_prompts(prompts_file, prompts)
    from posttrainllm.adapters.loading.pair import load_pair

    with _progress_bar() as advance:
        pair = load_pair(model, draft_model, dtype=dtype, forward=forward, changes=changes)
        from posttrainllm.adapters.gate.cache import read_result, trace_file, write_result
        from posttrainllm.adapters.gate.forwards import compare_with_module
        from posttrainllm.adapters.gate.key import gate_key
        from posttrainllm.adapters.gate.plan import plan
        from posttrainllm.adapters.gate.run import run_gate

        planned = plan(pair, texts, draft_k=draft_k, max_tokens=max_tokens, cut=prompts_file is None)
        key = gate_key(pair, planned)
        found = None if fresh else read_result(key)
        if found is not None:
            return found, key, True
        result = run_gate(pair, planned, progress=advance, trace_file=trace_file(key))
        check = compare_with_module(pair, [request.prompt for request in planned.requests], planned.shape)
        result = attrs.evolve(result, forward=check)
    problem = write_result(key, result)
    if problem is not None:
        click.echo(f"warning: the verdict is not kept: {problem}", err=True)
    return result, key, False


@contextmanager
def _progress_bar() -> Iterator["Progress"]:
    """Show what is decoded on a terminal's standard error, and nothing elsewhere."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description:32}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    shown = sys.stderr is not None and sys.stderr.isatty()
    with progress.Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("loading", total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield advance
