"""How many ids the draft draws next, under `--draft-k auto`: from what a step costs and from the row's own history.

The costs are fixed before the first step and never clocked again. The history is what the draft proposed to this very
row and what stood of it, up to the step before the last: the last one may still be under way. So a request gets the
same lengths alone, among others, however many steps are in flight, and in a replay.

Expected ids of a step that draws K of which each stands with probability a: (1 - a^(K+1)) / (1 - a) (Leviathan et al.
2023, arXiv:2211.17192, equation 1). The K with the most expected ids a second is drawn; 0 leaves the draft out.
"""

from collections.abc import Mapping

import attrs

from posttrainllm.kernel.config import Mode

__all__ = ["Curve", "Pace", "Pacer", "choices_up_to", "curve_mode", "expected_ids", "speed_ratio"]

_PRIOR_RATE, _PRIOR_WEIGHT = 0.75, 4.0  # a row begins like a draft that is worth its name, for about one step
_KEPT = 0.85  # of the evidence at each step: about seven steps count
_PROBE_WEIGHT = 2.0  # what old evidence counts at most once the draft is tried again: two ids decide
_FIRST_WAIT, _LONGEST_WAIT = 16, 128  # plain steps before the draft is tried again; doubled each time that it fails


@attrs.frozen(kw_only=True)
class Curve:
    """What a step costs, measured once."""

    draft_ks: tuple[int, ...]
    """The K that steps are compiled for, rising."""
    seconds: tuple[float, ...]
    """Of a step with each of them, all at one width."""
    plain_seconds: float
    """Of a plain step at width 1."""

    def of(self, draft_k: int) -> float:
        """Seconds of a step that draws this many ids."""
        return self.seconds[self.draft_ks.index(draft_k)]


@attrs.frozen(kw_only=True)
class Pace:
    """One row's history as far as it decides: a value, moved on by its methods."""

    stood: float = _PRIOR_RATE * _PRIOR_WEIGHT
    """Proposals that stood, older ones counting less."""
    judged: float = _PRIOR_WEIGHT
    """All that were held against the target, likewise."""
    wait: int = _FIRST_WAIT
    """Plain steps in a row after which the draft is tried again."""
    plain: int = 0
    """Plain steps in a row; the draft's cache is as many ids behind."""
    decided: int = 0
    """Steps whose K is decided."""
    read: tuple[tuple[int, int, int], ...] = ()
    """Of steps read and not counted yet: K, proposed, accepted."""
    counted: int = 0
    """Steps that `stood` and `judged` are of."""

    @property
    def rate(self) -> float:
        """Probability that a proposal stands, given that those before it do."""
        return self.stood / self.judged

    def decide(self, curve: Curve, most: int) -> tuple[int, "Pace"]:
        """Choose the K of the row's next step.

        Args:
            curve: what steps cost.
            most: no K is larger; 0 never drafts.

        Returns:
            K, and the row's pace with that step under way.
        """
        pace = self
        # however many steps have been read: the last one is left out
        while pace.counted < pace.decided - 1:
            assert pace.read, "the step before the last has been read"
            pace = pace._count(*pace.read[0])
        allowed = [k for k in curve.draft_ks if k <= most]
        best = max(allowed, key=lambda k: expected_ids(pace.rate, k) / curve.of(k))
        wait = pace.wait
        if best == 0 and pace.plain >= wait and len(allowed) > 1:
            best, wait = allowed[min(2, len(allowed) - 1)], min(2 * wait, _LONGEST_WAIT)
            pace = pace._forget()
        plain = pace.plain + 1 if best == 0 else 0
        return best, attrs.evolve(pace, wait=wait, plain=plain, decided=pace.decided + 1)

    def after(self, draft_k: int, *, proposed: int, accepted: int) -> "Pace":
        """The pace once a step was read, in the order of the steps.

        Args:
            draft_k: what was decided for it.
            proposed: proposals that could have been emitted.
            accepted: those that were.

        Returns:
            The pace; the step counts from the next but one on.
        """
        return attrs.evolve(self, read=(*self.read, (draft_k, proposed, accepted)))

    def _count(self, draft_k: int, proposed: int, accepted: int) -> "Pace":
        pace = attrs.evolve(self, read=self.read[1:], counted=self.counted + 1)
        if draft_k == 0:
            return pace
        # a draft that can propose nothing (its context ends) is like one that is refused
        refused = accepted < max(proposed, 1)
        return attrs.evolve(
            pace,
            stood=_KEPT * pace.stood + accepted,
            judged=_KEPT * pace.judged + accepted + refused,
            wait=_FIRST_WAIT if accepted else pace.wait,
        )

    def _forget(self) -> "Pace":
        """Old evidence counts little against what a new try shows."""
        weight = min(self.judged, _PROBE_WEIGHT)
        return attrs.evolve(self, stood=self.rate * weight, judged=weight)


class Pacer:
    """The paces of an engine's rows.

    Args:
        rows: B.
        curves: by mode, "greedy" and "sampled"; those that its requests need.
    """

    def __init__(self, rows: int, curves: Mapping[Mode, Curve]) -> None:
        self._curves = dict(curves)
        self._rows: list[tuple[Curve, int] | None] = [None] * rows
        self._paces = [Pace() for _ in range(rows)]

    def enter(self, row: int, mode: Mode, most: int) -> None:
        """A request begins in a row.

        Args:
            row: 0 <= row < B.
            mode: the smallest step that serves it.
            most: how many ids the draft may propose to it.
        """
        self._rows[row], self._paces[row] = (self._curves[curve_mode(mode)], most), Pace()

    def leave(self, row: int) -> None:
        """A row is idle."""
        self._rows[row] = None

    def decide(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Choose for every row, once a step.

        Returns:
            K of each row, and how many ids its draft's cache has to catch up with first; 0 for an idle row.
        """
        lengths, behind = [], []
        for row, entered in enumerate(self._rows):
            if entered is None:
                lengths.append(0)
                behind.append(0)
                continue
            before = self._paces[row].plain
            draft_k, self._paces[row] = self._paces[row].decide(*entered)
            lengths.append(draft_k)
            behind.append(before if draft_k else 0)
        return tuple(lengths), tuple(behind)

    def read(self, row: int, draft_k: int, *, proposed: int, accepted: int) -> None:
        """A step of a row was read, in the order of the steps.

        Args:
            row: 0 <= row < B.
            draft_k: what was decided for it.
            proposed: proposals that could have been emitted.
            accepted: those that were.
        """
        self._paces[row] = self._paces[row].after(draft_k, proposed=proposed, accepted=accepted)


def curve_mode(mode: Mode) -> Mode:
    """The mode whose curve a step goes by: filters cost every K the same."""
    return "greedy" if mode == "greedy" else "sampled"


def choices_up_to(most: int) -> tuple[int, ...]:
    """The K that are compiled.

    Args:
        most: the largest, 1 or more.

    Returns:
        0, the powers of two below the largest, and the largest; rising.
    """
    return (0, *(2**power for power in range(most.bit_length()) if 2**power < most), most)


def expected_ids(rate: float, draft_k: int) -> float:
    """Ids that a step is expected to emit.

    Args:
        rate: probability that a proposal stands, given that those before it do.
        draft_k: K.

    Returns:
        1 to K + 1.
    """
    return draft_k + 1.0 if rate >= 1 else (1 - rate ** (draft_k + 1)) / (1 - rate)


def speed_ratio(curve: Curve, steps: Mapping[int, int], tokens: int) -> float | None:
    """How much faster decoding was than it would have been plainly at width 1, by the measured costs.

    Args:
        curve: what steps cost.
        steps: how many there were of each K.
        tokens: ids that they emitted.

    Returns:
        The ratio of the rates; None where nothing was decoded, or a K has no cost.
    """
    if not tokens or not all(draft_k in curve.draft_ks for draft_k in steps):
        return None
    return tokens * curve.plain_seconds / sum(count * curve.of(draft_k) for draft_k, count in steps.items())
