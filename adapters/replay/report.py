"""What a replay found, for people and as JSON."""

import math
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.replay.trace import Header, Trace
from posttrainllm.adapters.replay.verify import Divergence, Outcome, StepView

__all__ = [
    "as_json",
    "console",
    "describe_divergence",
    "describe_run",
    "outcome_lines",
    "step_facts",
    "step_table",
]

_COLUMNS = ("position", "proposal", "p", "q", "p/q", "u", "decision", "margin", "emitted")


def describe_run(header: Header, *, compiled: bool) -> str:
    """What was run, in one line.

    Args:
        header: of the trace.
        compiled: whether the steps were compiled here.

    Returns:
        The line.
    """
    if header.drafted:
        how = f"K={header.proposals}"
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
    steps = f"{outcome.matched} {'step' if outcome.matched == 1 else 'steps'}"
    which = f" ({outcome.first} to {last}, {outcome.tokens} ids)" if outcome.matched else ""
    if outcome.divergence is None:
        return [f"{steps} of {len(trace.steps)} replayed{which}, every one as recorded: {run}"]
    return [
        *describe_divergence(outcome.divergence, trace, tokenizer),
        f"{steps} before it as recorded{which}: {run}" if outcome.matched else f"no step before it was run: {run}",
    ]


def describe_divergence(divergence: Divergence, trace: Trace, tokenizer: Tokenizer) -> list[str]:
    """Which step differs, where, and how.

    Args:
        divergence: of `compare`.
        trace: what was replayed.
        tokenizer: of the target.

    Returns:
        Lines.
    """
    name = divergence.field if divergence.index is None else f"{divergence.field}[{divergence.index}]"

    def shown(value: Any) -> str:
        is_id = divergence.index is not None and divergence.field in ("window", "proposals", "emitted")
        return _token(tokenizer, value) if is_id else str(value)

    where = f"position {divergence.position} ({trace.path}, line {divergence.line})"
    return [
        f"step {divergence.step} differs: {name}, {where}",
        f"  expected {shown(divergence.expected)}",
        f"  got      {shown(divergence.got)}",
    ]


def step_facts(view: StepView, header: Header, tokenizer: Tokenizer) -> dict[str, Any]:
    """One step as it ran here: what was proposed, why each proposal stood or fell, what was emitted.

    Args:
        view: of `view_step`.
        header: of the trace.
        tokenizer: of the target.

    Returns:
        The facts for JSON, and for the table. A position has the keys of a proposal where there is one.
    """
    ran, explanation = view.ran, view.explanation
    positions = []
    for index in range(len(explanation["choice"])):
        entry: dict[str, Any] = {"position": ran.length + index}
        if index < header.proposals:
            entry |= _proposal(view, index, tokenizer)
        best = explanation["best"][index]
        entry["margin"] = explanation["margin"][index]
        entry["best"] = [{"id": number, "text": _text(tokenizer, number)} for number in best]
        entry["target_draw"] = explanation["choice"][index]
        entry["decision"] = _decision(view, index, header, tokenizer)
        entry["emitted"] = ran.tokens[index] if index < len(ran.tokens) else None
        positions.append(entry)
    return {
        "step": view.record.step,
        **{name: getattr(ran, name) for name in ("length", "window", "proposed", "accepted", "finite", "key", "mode")},
        "emitted": [{"id": number, "text": _text(tokenizer, number)} for number in ran.tokens],
        "positions": positions,
    }


def _proposal(view: StepView, index: int, tokenizer: Tokenizer) -> dict[str, Any]:
    explanation, number = view.explanation, view.ran.window[index + 1]
    p, q = explanation["target_probs"][index], explanation["draft_probs"][index]
    return {
        "proposal": number,
        "text": _text(tokenizer, number),
        "p": p,
        "q": q,
        "ratio": p / q if q > 0 else None,
        "uniform": explanation["uniforms"][index] if explanation["by_ratio"] else None,
    }


def _decision(view: StepView, index: int, header: Header, tokenizer: Tokenizer) -> str:
    """Why a position came out as it did."""
    ran, explanation = view.ran, view.explanation
    verdicts = explanation["accepts"][: explanation["proposed"]]
    stood = verdicts.index(False) if False in verdicts else len(verdicts)
    if not ran.finite:
        return "logits not finite: nothing emitted"
    if ran.length + index >= header.limit:
        return "behind the limit"
    if index > stood:
        return "not proposed" if len(verdicts) <= index < header.proposals else "not reached"
    draw = _token(tokenizer, explanation["choice"][index])
    by_ratio = explanation["by_ratio"] and index < len(verdicts)
    if index < stood:
        return "accepted: u < p/q" if by_ratio else "accepted: the target's own"
    if by_ratio:
        return f"refused: u >= p/q; {_token(tokenizer, explanation['residual'][index])} from max(p-q, 0)"
    if index < len(verdicts):
        return f"refused: the target's is {draw}"
    return f"the target's own: {draw}"


def step_table(facts: dict[str, Any], trace: Trace, tokenizer: Tokenizer) -> Table:
    """One step as a table with a row a position.

    Args:
        facts: of `step_facts`.
        trace: what the step is from.
        tokenizer: of the target.

    Returns:
        The table, for a console of 100 columns or more.
    """
    header = trace.header
    last = _token(tokenizer, facts["window"][0])
    title = f"step {facts['step']}: {facts['length']} ids before it, the last one {last}"
    counts = f"proposed {facts['proposed']}, accepted {facts['accepted']}, emitted {len(facts['emitted'])}"
    caption = f"{counts} | key {facts['key'][0]:08x} {facts['key'][1]:08x} | margin: best target logit minus second"
    if header.drafted and header.temperature == 0:
        caption += " | p, q: softmax at temperature 1, for information"
    table = Table(title=Text(title), caption=Text(caption), title_justify="left", caption_justify="left")
    left = ("proposal", "decision", "emitted")
    for name in _COLUMNS if header.drafted else ("position", "decision", "margin", "emitted"):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for entry in facts["positions"]:
        cells = {
            "position": str(entry["position"]),
            "proposal": _token(tokenizer, entry["proposal"]) if "proposal" in entry else "",
            **{name: _number(entry.get(name)) for name in ("p", "q", "margin")},
            "p/q": _number(entry.get("ratio")),
            "u": _number(entry.get("uniform")),
            "decision": entry["decision"],
            "emitted": "" if entry["emitted"] is None else _token(tokenizer, entry["emitted"]),
        }
        table.add_row(*(Text(cells[str(column.header)]) for column in table.columns))
    return table


def as_json(divergence: Divergence | None, facts: dict[str, Any] | None) -> dict[str, Any]:
    """The parts that --json prints of a divergence and of a step; non-finite numbers become null.

    Args:
        divergence: of a step, None where it is as recorded.
        facts: of `step_facts`.

    Returns:
        `divergence` and `step`.
    """
    cleaned: dict[str, Any] = _finite(
        {"divergence": None if divergence is None else attrs.asdict(divergence), "step": facts}
    )
    return cleaned


def console() -> Console:
    """Standard output; as wide as the table wants where it is no terminal."""
    wide = Console(highlight=False, soft_wrap=False)
    return wide if wide.is_terminal else Console(highlight=False, width=140)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"


def _text(tokenizer: Tokenizer, number: int) -> str:
    """A token's text; the vocabulary's own piece where it has none, as a special one."""
    return tokenizer.decode([number]) or tokenizer.vocabulary.get(number, "")


def _token(tokenizer: Tokenizer, number: int) -> str:
    return f"{number} {_text(tokenizer, number)!r}"
