"""What is known of a candidate, and what was decided."""

from typing import Any

import attrs

from posttrainllm.adapters.adaptive import expected_ids

__all__ = ["EQUAL", "NOT_SMALLER", "Candidate", "Decision", "Measured", "StepTime"]

EQUAL = "equal"
"""Of a tokenizer: every id means the same to both."""
NOT_SMALLER = "not smaller than the target"
"""How the problem of a candidate begins that could not pay: such a draft costs what it saves, at least."""
_NEAR = 0.95  # nearer than that the clock alone would decide
_DIGITS = 3


@attrs.frozen(kw_only=True)
class StepTime:
    """What a step costs that proposes K ids, and what a plain one does, clocked in turns."""

    draft_k: int
    """K."""
    seconds: float
    """Of such a step."""
    plain_seconds: float
    """Of a plain step at width 1, in the same shapes."""

    @property
    def cost(self) -> float:
        """Of the step, in plain steps."""
        return self.seconds / self.plain_seconds


@attrs.frozen(kw_only=True)
class Measured:
    """What decoding with a candidate showed."""

    accepted: int
    """Proposals that stood."""
    proposed: int
    """All, K of 4."""
    judged: int
    """Those that were held against the target: behind the first one of a step that is refused nothing is."""
    steps: tuple[StepTime, ...]
    """One or more, each of another K."""

    @property
    def accept_rate(self) -> float | None:
        """As everywhere: accepted of proposed; None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def rate(self) -> float | None:
        """Probability that a proposal stands, given that those before it do; None where nothing was proposed."""
        return self.accepted / self.judged if self.judged else None

    def speed_up(self, step: StepTime) -> float:
        """Speed against plain decoding (Leviathan et al. 2023, equation 1 over what such a step costs).

        Args:
            step: one of the steps.

        Returns:
            More than 1 where the draft pays; 0 where it proposes nothing.
        """
        return 0.0 if self.rate is None else expected_ids(self.rate, step.draft_k) / step.cost

    @property
    def best(self) -> StepTime:
        """The smallest K whose speed-up is near the highest: it wastes less where fewer proposals stand."""
        top = max(map(self.speed_up, self.steps))
        near = (
            step for step in self.steps if self.speed_up(step) >= _NEAR * top and (self.speed_up(step) > 1) == (top > 1)
        )
        return min(near, key=lambda step: step.draft_k)


@attrs.frozen(kw_only=True)
class Candidate:
    """One row of the table."""

    name: str
    path: str
    """What `--draft-model` takes."""
    parameters: int | None = None
    bytes: int | None = None
    """Of its weights in memory; None where its files cannot be used."""
    tokenizer: str | None = None
    """EQUAL, or the first difference; None where it was not looked at."""
    problem: str | None = None
    """Why nothing was measured, one line; None where something was, or the tokenizer says why."""
    measured: Measured | None = None

    @property
    def speed_up(self) -> float | None:
        """Predicted, at its best K; None where nothing was measured."""
        return None if self.measured is None else self.measured.speed_up(self.measured.best)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {name: getattr(self, name) for name in ("name", "path", "parameters", "bytes", "tokenizer", "problem")}
        if self.measured is None:
            nothing = ("accept_rate", "proposal_stands", "best_k", "cost_ratio", "speed_up")
            return {**found, **dict.fromkeys(nothing), "steps": []}
        measured, best = self.measured, self.measured.best
        return {
            **found,
            "accept_rate": _rounded(measured.accept_rate),
            "proposal_stands": _rounded(measured.rate),
            "accepted_proposed_judged": [measured.accepted, measured.proposed, measured.judged],
            "best_k": best.draft_k,
            "cost_ratio": _rounded(best.cost),
            "speed_up": _rounded(measured.speed_up(best)),
            "steps": [
                {
                    **attrs.asdict(step),
                    "cost_ratio": _rounded(step.cost),
                    "speed_up": _rounded(measured.speed_up(step)),
                }
                for step in measured.steps
            ],
        }


@attrs.frozen(kw_only=True)
class Decision:
    """Which draft, or why none."""

    candidates: tuple[Candidate, ...]
    """The fastest first, then those that could not be measured."""
    fresh: int
    """How many were measured now; the others were on file."""

    @property
    def winner(self) -> Candidate | None:
        """The one with the highest predicted speed-up; None where that is not above 1."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and (first.speed_up or 0) > 1 else None

    @property
    def reason(self) -> str | None:
        """Why no draft is best, one line; None where there is a winner."""
        if self.winner is not None:
            return None
        if all((candidate.problem or "").startswith(NOT_SMALLER) for candidate in self.candidates):
            return "no model here is smaller than the target" if self.candidates else "there is no candidate"
        first = self.candidates[0]
        if first.speed_up is not None:
            return (
                f"no draft pays here: the best, {first.name}, is predicted at {first.speed_up:.2f} times plain decoding"
            )
        equal = [candidate for candidate in self.candidates if candidate.tokenizer == EQUAL]
        if equal:
            return f"no candidate with an equal tokenizer can be used: {equal[0].name}: {equal[0].problem}"
        looked_at = sum(candidate.tokenizer is not None for candidate in self.candidates)
        if looked_at:
            return f"no candidate has an equal tokenizer ({looked_at} looked at)"
        smaller = next(one for one in self.candidates if not (one.problem or "").startswith(NOT_SMALLER))
        return f"no candidate can be used: {smaller.name}: {smaller.problem}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
