"""Whether the draft makes decoding faster: from what the steps gave, and what they cost."""

from collections.abc import Mapping

import attrs

from posttrainllm.adapters.adaptive import Curve, speed_ratio

__all__ = ["Payoff", "in_doubt", "payoff"]

_CLEARLY = 0.95  # nearer to 1 the clock alone would decide
_ENOUGH_STEPS = 16


@attrs.frozen(kw_only=True)
class Payoff:
    """The rate against that of plain decoding at width 1."""

    ratio: float
    """More than 1 where the draft makes it faster."""
    tokens_per_step: float
    """Ids that a step emitted, on the average."""
    step_seconds: float
    """Of such a step, by the costs."""
    plain_seconds: float
    """Of a plain step at width 1."""
    auto: bool
    """Whether K was chosen from step to step."""
    drafted: float
    """Share of the steps that drew something."""

    @property
    def pays(self) -> bool:
        """Whether plain decoding would not be clearly faster."""
        return self.ratio >= _CLEARLY

    @property
    def hint(self) -> str | None:
        """One line, where the draft does not pay."""
        if self.pays:
            return None
        advice = (
            f"--draft-k auto drew from it in {self.drafted:.1%} of the steps, and a window wide enough for it costs in "
            "all of them; --no-draft decodes plainly"
            if self.auto
            else "--draft-k auto drafts only where it pays, --no-draft decodes plainly"
        )
        return (
            f"the draft does not pay here: {self.tokens_per_step:.2f} tokens a step of "
            f"{1e3 * self.step_seconds:.1f} ms, where a plain step takes {1e3 * self.plain_seconds:.1f} ms: "
            f"{self.ratio:.2f} times the speed of plain decoding, by costs taken with half of the context in use; "
            f"{advice}"
        )


def in_doubt(steps: Mapping[int, int], tokens: int) -> bool:
    """Whether it is worth finding out what steps cost: where less than half of what a step might emit is emitted.

    Args:
        steps: how many there were of each K.
        tokens: ids that they emitted.

    Returns:
        False, too, where there are too few steps to say anything.
    """
    count = sum(steps.values())
    most = sum(number * (draft_k + 1) for draft_k, number in steps.items())
    return count >= _ENOUGH_STEPS and 2 * tokens < most + count


def payoff(curve: Curve, steps: Mapping[int, int], tokens: int, *, auto: bool) -> Payoff | None:
    """Hold what was decoded against the costs.

    Args:
        curve: what steps cost.
        steps: how many there were of each K.
        tokens: ids that they emitted.
        auto: whether K was chosen from step to step.

    Returns:
        None where nothing can be said.
    """
    count, ratio = sum(steps.values()), speed_ratio(curve, steps, tokens)
    if ratio is None or count < _ENOUGH_STEPS:
        return None
    return Payoff(
        ratio=ratio,
        tokens_per_step=tokens / count,
        step_seconds=tokens / count * curve.plain_seconds / ratio,
        plain_seconds=curve.plain_seconds,
        auto=auto,
        drafted=(count - steps.get(0, 0)) / count,
    )
