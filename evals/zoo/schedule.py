"""How long a run lasts, and the learning rate on the way: a cosine behind a warm-up."""

import math

import attrs

__all__ = ["Budget", "rate_at"]


@attrs.frozen(kw_only=True)
class Budget:
    """Steps or minutes, one of the two."""

    steps: int | None = None
    minutes: float | None = None

    def share(self, *, steps_done: int, seconds: float) -> float:
        """How much of it is used.

        Args:
            steps_done: so far.
            seconds: of training so far, the compilation left out.

        Returns:
            0 to 1.
        """
        if self.steps is not None:
            return min(1.0, steps_done / self.steps)
        assert self.minutes is not None
        return min(1.0, seconds / (60 * self.minutes))


def rate_at(share: float, *, peak: float, warm_up: float, floor: float = 0.02) -> float:
    """The learning rate.

    Args:
        share: of the budget that is used.
        peak: highest rate.
        warm_up: share of the budget that it takes to get there.
        floor: share of the peak that is left at the end.

    Returns:
        The rate; never 0.
    """
    if share < warm_up:
        return peak * max(share / warm_up, 0.01)
    done = (share - warm_up) / max(1e-9, 1 - warm_up)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
