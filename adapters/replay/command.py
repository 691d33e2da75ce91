"""`posttrainllm replay`: read, refuse what is from elsewhere, run again, report."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from posttrainllm.adapters.checks import check_not_empty
from posttrainllm.adapters.status_line import status_line
from posttrainllm.kernel.errors import TraceError, UsageError

if TYPE_CHECKING:  # they import MLX, and --help must not
    from posttrainllm.adapters.loading.pair import Pair
    from posttrainllm.adapters.replay.trace import Trace

__all__ = ["replay"]

_DIFFERS = 3


@click.command()
@click.argument("file")
@click.argument("model", required=False)
@click.option(
    "--draft-model", metavar="PATH", help="Directory or hub id of the draft when it is not where the trace says."
)
@click.option("--adapter-path", metavar="PATH", help="Directory or hub id of the target's adapter when it has moved.")
@click.option("--draft-adapter-path", metavar="PATH", help="The same for the draft's.")
@click.option("--from-step", type=int, metavar="N", help="Start at step N, its caches refilled. Default: 0.")
@click.option("--steps", type=int, metavar="M", help="Run M steps. Default: all.")
@click.option("--uncompiled", is_flag=True, help="Run operation by operation instead of compiled.")
@click.option("--show", type=int, metavar="STEP", help="Run this step alone and print what it saw and decided.")
@click.option("--anyway", is_flag=True, help="Compare also where models, machine or versions are not the trace's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def replay(
    *,
    file: str,
    model: str | None,
    draft_model: str | None,
    adapter_path: str | None,
    draft_adapter_path: str | None,
    from_step: int | None,
    steps: int | None,
    uncompiled: bool,
    show: int | None,
    anyway: bool,
    as_json: bool,
) -> None:
    """Run the trace FILE again, step by step, and stop at the first step that is not the recorded one.

    FILE is what `sample --record` wrote. MODEL is the target's directory when it is not where the trace says.

    Exit status: 0 when every step is as recorded, 3 at the first that is not, which is explained; 1 when the trace
    cannot be read or is from elsewhere; 2 for a bad option.
    """
    from posttrainllm.adapters.replay.reading import read_trace

    if show is not None and (from_step is not None or steps is not None):
        raise UsageError("got --show with --from-step or --steps, expected one or the other")
    check_not_empty("FILE", file, "a trace")
    for option, value in (("MODEL", model), ("--draft-model", draft_model)):
        check_not_empty(option, value, "the path of a directory or an id of the hub")
    for option, value in (("--adapter-path", adapter_path), ("--draft-adapter-path", draft_adapter_path)):
        check_not_empty(option, value, "an adapter's directory or an id of the hub")
    trace = read_trace(file)
    _check_range(trace, from_step, steps, show)
    if trace.torn is not None and not as_json:
        click.echo(f"notice: {file}: line {trace.torn} breaks off and is left out", err=True)
    elif trace.end is None and not as_json:
        click.echo(f"notice: {file}: has no end: the run was killed, or the file is cut", err=True)
    with status_line(enabled=not as_json) as status:
        pair, differing = _load(trace, (model, draft_model), (adapter_path, draft_adapter_path), anyway)
        for phrase in () if as_json else differing:
            click.echo(f"warning: {phrase}", err=True)
        compiled = trace.header.compiled and pair.runtime.compiled and not uncompiled
        status.update("replaying; what is not compiled yet takes some seconds more")
        with _compilation(enabled=compiled or not pair.runtime.compiled):
            report, lines, differs = _replay(pair, trace, compiled, from_step or 0, steps, show)
    if as_json:
        click.echo(json.dumps({"trace": file, "differences": differing, **report}, ensure_ascii=False))
    else:
        click.echo("\n".join(lines))
    if differs:
        sys.exit(_DIFFERS)


def _replay(
    pair: "Pair", trace: "Trace", compiled: bool, first: int, count: int | None, show: int | None
) -> tuple[dict[str, Any], list[str], bool]:
    """The JSON object, the lines, and whether something differs."""
    from posttrainllm.adapters.replay import report as format_
    from posttrainllm.adapters.replay.facts import step_facts
    from posttrainllm.adapters.replay.replayer import Replayer
    from posttrainllm.adapters.replay.verify import verify, view_step

    replayer, tokenizer = Replayer(pair, trace, compiled=compiled), pair.tokenizer
    counts: dict[str, Any] = {"steps": len(trace.steps), "end": trace.end, "torn": trace.torn, "compiled": compiled}
    if show is None:
        outcome = verify(replayer, trace, first=first, count=count)
        view, divergence = outcome.view, outcome.divergence
        lines = format_.outcome_lines(outcome, trace, tokenizer, compiled=compiled)
        counts |= {"from_step": first, "matched": outcome.matched, "tokens": outcome.tokens}
    else:
        view, divergence = view_step(replayer, trace, show)
        lines = [] if divergence is None else format_.describe_divergence(divergence, view, trace, tokenizer)
        verdict = "as recorded" if divergence is None else "as it ran here"
        lines.append(f"step {show} {verdict}: {format_.describe_run(trace.header, compiled=compiled)}")
        counts |= {"from_step": show, "matched": int(divergence is None), "tokens": len(view.ran.tokens)}
    facts = None if view is None else step_facts(view, trace.header, tokenizer)
    if facts is not None:
        lines += ["", *format_.step_lines(facts, trace, tokenizer)]
    return counts | format_.as_json(divergence, facts), lines, divergence is not None


def _load(
    trace: "Trace", models: tuple[str | None, str | None], moved: tuple[str | None, str | None], anyway: bool
) -> tuple["Pair", list[str]]:
    """The trace's models, and what is not as it was there; refused unless anyway."""
    from posttrainllm.adapters.replay.environment import adapter_paths, differences, load_recorded, model_paths
    from posttrainllm.adapters.runtime import start

    paths, adapters = model_paths(trace.header, *models), adapter_paths(trace.header, *moved)
    differing = differences(trace.header, start(), paths, adapters)
    if differing and not anyway:
        raise _elsewhere(trace, differing)
    pair, more = load_recorded(trace.header, paths, adapters)
    if more and not anyway:
        raise _elsewhere(trace, more)
    return pair, differing + more


def _elsewhere(trace: "Trace", differing: list[str]) -> TraceError:
    return TraceError(f"{trace.path}: recorded elsewhere: {'; '.join(differing)}; --anyway compares all the same")


def _check_range(trace: "Trace", from_step: int | None, steps: int | None, show: int | None) -> None:
    count = len(trace.steps)
    for name, value in (("from-step", from_step), ("show", show)):
        if value is not None and not 0 <= value < count:
            held = f"0 to {count - 1}" if count else "a trace with a step in it"
            raise UsageError(f"--{name}: got {value}, expected {held}")
    if steps is not None and steps < 1:
        raise UsageError(f"--steps: got {steps}, expected 1 or more")


@contextmanager
def _compilation(*, enabled: bool) -> Iterator[None]:
    """Uncompiled means all of it: the models of mlx-lm compile small functions of their own."""
    import mlx.core as mx

    if enabled:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
