"""A decision as people read it."""

import shlex
from collections.abc import Sequence

from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.match.findings import EQUAL, Candidate, Decision
from posttrainllm.adapters.match.measure import MAX_TOKENS, PROMPTS

__all__ = ["command_of", "table"]

_HEAD = ("candidate", "parameters", "tokenizer", "accept rate", "stands", "K", "step cost", "predicted")


def table(decision: Decision, pair: Pair, command: str | None, changes: ModelChanges) -> list[str]:
    """The table, and what follows from it.

    Args:
        decision: of the candidates.
        pair: the target.
        command: of `command_of`; None where no draft pays.
        changes: of the target.

    Returns:
        Lines.
    """
    rows = [_HEAD, *(_row(candidate) for candidate in decision.candidates)]
    widths = [
        max((len(row[column]) for row in rows if len(row) > column + 1), default=0) for column in range(len(_HEAD))
    ]
    widths[-1] = max(widths[-1], len(_HEAD[-1]))
    lines = [_line(row, widths) for row in rows] if decision.candidates else []
    runtime = pair.runtime
    changed = f" {shlex.join(changes.target_options)}" if changes.target_options else ""
    lines.append(
        f"{pair.target.label}{changed}, {runtime.device} ({runtime.device_name}), {pair.target.dtype}; "
        f"T=0, {PROMPTS} prompts x {MAX_TOKENS} tokens"
    )
    lines.append(
        "accept rate: of 4 proposals a step; stands: a proposal where those before it do; step cost: in plain steps"
    )
    winner = decision.winner
    if winner is None:
        return [*lines, f"{decision.reason}: plain decoding is best"]
    return [*lines, f"{winner.name}: predicted {winner.speed_up:.2f} times the speed of plain decoding", f"  {command}"]


def command_of(decision: Decision, model: str | None, *, dtype: str, forward: str, changes: ModelChanges) -> str | None:
    """How to decode with the winner.

    Args:
        decision: of the candidates.
        model: the target as the user named it; None is the embedded one.
        dtype: as the user gave it.
        forward: as the user gave it.
        changes: of the target.

    Returns:
        A command for a shell; None where no draft pays.
    """
    winner = decision.winner
    if winner is None or winner.measured is None:
        return None
    words = ["posttrainllm", "sample", *([] if model is None else [model]), "--draft-model", winner.path]
    words += ["--draft-k", str(winner.measured.best.draft_k)]
    for name, value in (("--dtype", dtype), ("--forward", forward)):
        words += [] if value == "auto" else [name, value]
    return shlex.join([*words, *changes.target_options])


def _row(candidate: Candidate) -> tuple[str, ...]:
    """Cells; the last one of a candidate that was not measured is the reason."""
    first = (candidate.name, _count(candidate.parameters))
    if candidate.tokenizer is not None and candidate.tokenizer != EQUAL:
        return (*first, candidate.tokenizer)
    if candidate.measured is None:
        return (*first, *([] if candidate.tokenizer is None else [EQUAL]), candidate.problem or "")
    measured, best = candidate.measured, candidate.measured.best
    return (
        *first,
        EQUAL,
        *("-" if rate is None else f"{rate:.3f}" for rate in (measured.accept_rate, measured.rate)),
        str(best.draft_k),
        f"{best.cost:.2f}",
        f"{candidate.speed_up:.2f}x",
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = []
    for column, cell in enumerate(row):
        last, left = column == len(row) - 1, column in (0, 2)
        cells.append(cell if last and len(row) < len(_HEAD) else f"{cell:{'<' if left else '>'}{widths[column]}}")
    return "  ".join(cells).rstrip()


def _count(parameters: int | None) -> str:
    if parameters is None:
        return "?"
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
