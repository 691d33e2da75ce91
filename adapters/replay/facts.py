"""One step laid open, as numbers and words."""

import math
from typing import Any

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.replay.trace import Header
from posttrainllm.adapters.replay.verify import StepView

__all__ = ["step_facts", "token_text"]


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
        if index < len(explanation["draft_probs"]):
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
        "accepted_by_rule": min(_stood(view), header.limit - ran.length) if ran.finite else ran.accepted,
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
        "q": None if math.isnan(q) else q,  # JSON has no NaN
        "ratio": p / q if q > 0 else None,
        "uniform": explanation["uniforms"][index] if explanation["by_ratio"] else None,
    }


def _stood(view: StepView) -> int:
    """How many proposals stand by the rule, from what the explanation computed; the step has its own count."""
    verdicts = view.explanation["accepts"][: view.explanation["proposed"]]
    return verdicts.index(False) if False in verdicts else len(verdicts)


def _decision(view: StepView, index: int, header: Header, tokenizer: Tokenizer) -> str:
    """Why a position came out as it did."""
    ran, explanation = view.ran, view.explanation
    proposed, stood = explanation["proposed"], _stood(view)
    if not ran.finite:
        return "not finite: nothing is emitted"
    if ran.length + index >= header.limit:
        return "behind the limit"
    if index > stood:
        return "not proposed" if proposed <= index < len(explanation["draft_probs"]) else "not reached"
    draw = token_text(tokenizer, explanation["choice"][index])
    by_ratio = explanation["by_ratio"] and index < proposed
    if index < stood:
        return "accepted: u < p/q" if by_ratio else "accepted: the target's own"
    if by_ratio:
        drawn = token_text(tokenizer, explanation["residual"][index])
        if math.isnan(explanation["draft_probs"][index]):
            return f"refused: the draft has no law; {drawn} from p"
        return f"refused: u >= p/q; {drawn} from max(p-q, 0)"
    if index < proposed:
        return f"refused: the target's is {draw}"
    return f"the target's own: {draw}"


def _text(tokenizer: Tokenizer, number: int) -> str:
    """A token's text; the vocabulary's own piece where it has none, as a special one."""
    return tokenizer.decode([number]) or tokenizer.vocabulary.get(number, "")


def token_text(tokenizer: Tokenizer, number: int) -> str:
    """A token's id and text, for people.

    Args:
        tokenizer: of the target.
        number: the id.

    Returns:
        The id and the quoted text.
    """
    return f"{number} {_text(tokenizer, number)!r}"
