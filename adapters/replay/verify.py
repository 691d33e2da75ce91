"""Running a trace again and finding the first step that is not the recorded one."""

from typing import Any

import attrs

from posttrainllm.adapters.replay.replayer import Replayer
from posttrainllm.adapters.replay.trace import StepRecord, Trace
from posttrainllm.adapters.rows import RowStep

__all__ = ["Divergence", "Outcome", "StepView", "compare", "verify", "view_step"]


@attrs.frozen(kw_only=True)
class Divergence:
    """The first thing in a step that is not what the trace says."""

    step: int
    line: int
    """Of the file."""
    field: str
    """Of `StepRecord`."""
    index: int | None
    """Where in a list; None for a single value, or where one list is shorter."""
    position: int
    """Absolute position of the token that it is about."""
    expected: Any
    """In the trace."""
    got: Any
    """Here."""


@attrs.frozen(kw_only=True)
class StepView:
    """One step as it ran here, with what it saw and decided."""

    record: StepRecord
    ran: RowStep
    explanation: dict[str, Any]
    """Of `Replayer.explain`."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What a replay found."""

    first: int
    matched: int
    """Steps from `first` on that are the recorded ones."""
    tokens: int
    """Ids that they emitted."""
    divergence: Divergence | None
    view: StepView | None
    """Of the step that diverges."""


def verify(replayer: Replayer, trace: Trace, *, first: int = 0, count: int | None = None) -> Outcome:
    """Run steps again until one differs.

    Args:
        replayer: of this trace.
        trace: what was recorded.
        first: step to start at, its caches refilled; 0 to the number of steps.
        count: how many to run; None runs all.

    Returns:
        How many matched, and the first that did not, explained.

    Raises:
        PosttrainllmError: as `Replayer`.
    """
    replayer.seek(first)
    last = len(trace.steps) if count is None else min(first + count, len(trace.steps))
    tokens = 0
    for record in trace.steps[first:last]:
        ran = replayer.run(record)
        found = compare(record, ran, trace)
        if found is not None:
            view = _explained(replayer, record, ran)
            return Outcome(first=first, matched=record.step - first, tokens=tokens, divergence=found, view=view)
        tokens += len(ran.tokens)
    return Outcome(first=first, matched=last - first, tokens=tokens, divergence=None, view=None)


def view_step(replayer: Replayer, trace: Trace, step: int) -> tuple[StepView, Divergence | None]:
    """Run one step and lay it open.

    Args:
        replayer: of this trace.
        trace: what was recorded.
        step: which, 0 to the number of steps - 1.

    Returns:
        The step, and how it differs from the trace if it does.

    Raises:
        PosttrainllmError: as `Replayer`.
    """
    record = trace.steps[step]
    replayer.seek(step)
    ran = replayer.run(record)
    return _explained(replayer, record, ran), compare(record, ran, trace)


def compare(record: StepRecord, ran: RowStep, trace: Trace) -> Divergence | None:
    """Hold a step that ran here against its record.

    Args:
        record: of the trace.
        ran: the same step here.
        trace: what the record is from.

    Returns:
        The first difference, in the order in which a step comes about; None when there is none.
    """
    drafted = trace.header.drafted
    pairs: list[tuple[str, Any, Any, int]] = [  # name, expected, got, position of the first entry
        ("key", record.key, ran.key, ran.length),
        ("length", record.length, ran.length, ran.length),
        ("draft_k", record.draft_k, ran.draft_k, ran.length),
        ("window", record.window[:1], ran.window[:1], ran.length - 1),
        ("proposals", record.proposals, ran.window[1:] if drafted else (), ran.length),
        ("proposed", record.proposed, ran.proposed, ran.length),
        ("window", record.window, ran.window, ran.length - 1),
        ("finite", record.finite, ran.finite, ran.length),
        ("accepted", record.accepted, ran.accepted, ran.length),
        ("emitted", record.emitted, ran.tokens, ran.length),
    ]
    if record.margins is not None:
        pairs.append(("margins", record.margins, ran.margins, ran.length))
    for name, expected, got, position in pairs:
        if expected == got:
            continue
        index = None
        if isinstance(expected, tuple):
            together = range(min(len(expected), len(got)))
            index = next((place for place in together if expected[place] != got[place]), None)
            ahead = len(together) if index is None else index
        else:
            ahead = min(expected, got) if name == "accepted" else 0
        return Divergence(
            step=record.step,
            line=trace.line_of(record.step),
            field=name,
            index=index,
            position=position + (0 if name == "key" else ahead),
            expected=_plain(expected, index),
            got=_plain(got, index),
        )
    return None


def _plain(value: Any, index: int | None) -> Any:
    """The entry at an index, or the whole as JSON has it."""
    if index is not None:
        return value[index]
    return list(value) if isinstance(value, tuple) else value


def _explained(replayer: Replayer, record: StepRecord, ran: RowStep) -> StepView:
    """The step again, from the state before it."""
    replayer.seek(record.step)
    return StepView(record=record, ran=ran, explanation=replayer.explain(record, ran.window))
