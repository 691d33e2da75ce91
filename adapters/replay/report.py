"""What a replay found, for people and as JSON."""

import math
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.replay.facts import step_facts, token_text
from posttrainllm.adapters.replay.trace import Header, Trace
from posttrainllm.adapters.replay.verify import Divergence, Outcome, StepView

__all__ = [
    "as_json",
    "describe_divergence",
    "describe_run",
    "outcome_lines",
    "step_lines",
]

_COLUMNS = ("pos", "proposal", "p", "q", "p/q", "u", "decision", "margin", "emitted")


def describe_run(header: Header, *, compiled: bool) -> str:
    """What was run, in one line.

    Args:
        header: of the trace.
        compiled: whether the steps were compiled here.

    Returns:
        The line.
    """
    if header.drafted:
        how = f"K={header.proposals}" if header.auto is None else f"K=auto up to {header.proposals}"
        how += f", {header.accept_rule}" if header.temperature > 0 else ""
    else:
        how = f"plain at width {header.width}"
    warmth = f"temperature {header.temperature:g}, seed {header.seed}" if header.temperature > 0 else "greedy"
    dtypes = "/".join(dict.fromkeys(header.dtype.values()))
    return f"{how}, {warmth}, {dtypes}, {'compiled' if compiled else 'uncompiled'}"


def outcome_lines(outcome: Outcome, trace: Trace, tokenizer: Tokenizer, *, compiled: bool) -> list[str]:
    """A replay's result without its table.

    Args:
        outcome: of `verify`.
        trace: what was replayed.
        tokenizer: of the target.
        compiled: whether the steps were compiled here.

    Returns:
        Lines.
    """
    run = describe_run(trace.header, compiled=compiled)
    last = outcome.first + outcome.matched - 1
    steps = f"step {last}" if outcome.matched == 1 else f"steps {outcome.first} to {last}"
    if outcome.divergence is None:
        if not outcome.matched:
            return [f"the trace has no step: {run}"]
        return [f"{steps} of {len(trace.steps)} as recorded, {outcome.tokens} ids: {run}"]
    assert outcome.view is not None, "a step that differs is explained"
    return [
        *describe_divergence(outcome.divergence, outcome.view, trace, tokenizer),
        f"{steps} as recorded, {outcome.tokens} ids: {run}" if outcome.matched else f"no step before it; {run}",
    ]


def describe_divergence(divergence: Divergence, view: StepView, trace: Trace, tokenizer: Tokenizer) -> list[str]:
    """Which step differs, where, and how.

    Args:
        divergence: of `compare`.
        view: the step as it ran here.
        trace: what was replayed.
        tokenizer: of the target.

    Returns:
        Lines.
    """
    name = divergence.field if divergence.index is None else f"{divergence.field}[{divergence.index}]"

    def shown(value: Any) -> str:
        is_id = divergence.index is not None and divergence.field in ("window", "proposals", "emitted")
        return token_text(tokenizer, value) if is_id else str(value)

    where = f"position {divergence.position} ({trace.path}, line {divergence.line})"
    return [
        f"step {divergence.step} differs: {name}, {where}",
        f"  expected {shown(divergence.expected)}",
        f"  got      {shown(divergence.got)}",
        *[f"  here     {line}" for line in _entry_lines(_entry(divergence, step_facts(view, trace.header, tokenizer)))],
    ]


def step_lines(facts: dict[str, Any], trace: Trace, tokenizer: Tokenizer) -> list[str]:
    """One step as a table with a row a position, and what its columns leave out.

    Args:
        facts: of `step_facts`.
        trace: what the step is from.
        tokenizer: of the target.

    Returns:
        Lines of some 80 columns, or as narrow as the terminal is.
    """
    header = trace.header
    left = ("proposal", "decision", "emitted")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in _COLUMNS if header.drafted else ("pos", "decision", "margin", "emitted"):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for entry in facts["positions"]:
        cells = {
            "pos": str(entry["position"]),
            "proposal": token_text(tokenizer, entry["proposal"]) if "proposal" in entry else "",
            **{name: _number(entry.get(name)) for name in ("p", "q", "margin")},
            "p/q": _number(entry.get("ratio")),
            "u": _number(entry.get("uniform")),
            "decision": entry["decision"].split(":")[0],
            "emitted": "" if entry["emitted"] is None else token_text(tokenizer, entry["emitted"]),
        }
        table.add_row(*(Text(cells[str(column.header)]) for column in table.columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    with console.capture() as captured:
        console.print(table)
    last = token_text(tokenizer, facts["window"][0])
    decided = [entry for entry in facts["positions"] if entry["decision"].startswith("refused")]
    return [
        f"step {facts['step']}: {facts['length']} ids before it, the last one {last}",
        *(line.rstrip() for line in captured.get().splitlines()),
        f"proposed {facts['proposed']}, accepted {facts['accepted']}, emitted {len(facts['emitted'])}, "
        f"key {facts['key'][0]:08x} {facts['key'][1]:08x}",
        *(f"{entry['position']} {entry['decision']}" for entry in decided),
        *_disagreement(facts),
        "margin: the target's largest logit minus its second"
        + ("; p, q: at temperature 1, they decide nothing" if header.drafted and header.temperature == 0 else ""),
    ]


def _disagreement(facts: dict[str, Any]) -> list[str]:
    """Said when the step and the arithmetic shown here part: in last bits, or because one of them is wrong."""
    if facts["accepted"] == facts["accepted_by_rule"]:
        return []
    return [f"the step accepted {facts['accepted']}; by the values above it would be {facts['accepted_by_rule']}"]


def as_json(divergence: Divergence | None, facts: dict[str, Any] | None) -> dict[str, Any]:
    """The parts that --json prints of a divergence and of a step; non-finite numbers become null.

    Args:
        divergence: of a step, None where it is as recorded.
        facts: of `step_facts`; there when there is a divergence.

    Returns:
        `divergence`, with what the step saw `here` at its position, and `step`.
    """
    found = None
    if divergence is not None and facts is not None:
        found = attrs.asdict(divergence) | {"here": _entry(divergence, facts)}
    cleaned: dict[str, Any] = _finite({"divergence": found, "step": facts})
    return cleaned


def _entry(divergence: Divergence, facts: dict[str, Any]) -> dict[str, Any] | None:
    """What the step saw at the position where it differs; None in front of its first and behind its last."""
    return next((entry for entry in facts["positions"] if entry["position"] == divergence.position), None)


def _entry_lines(entry: dict[str, Any] | None) -> list[str]:
    if entry is None:
        return []
    values = [("p", "p"), ("q", "q"), ("u", "uniform"), ("margin", "margin")]
    numbers = [f"{name} {_number(entry[key])}" for name, key in values if entry.get(key) is not None]
    first, second = (f"{best['id']} {best['text']!r}" for best in entry["best"])
    return [entry["decision"], f"{', '.join(numbers)} ({first} over {second})"]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 10 or value == 0 else f"{value:.4g}"
