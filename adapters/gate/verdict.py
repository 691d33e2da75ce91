"""From findings to a verdict."""

from collections.abc import Sequence

from posttrainllm.adapters.gate.findings import SEVERITY, Divergence, Findings, Verdict

__all__ = ["beyond_limit", "first_difference", "judge", "worst"]


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first id that differs, the shorter one's end included; None where they are equal."""
    for index, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def judge(title: str, findings: Findings) -> tuple[Verdict, str]:
    """The verdict and its reason.

    Args:
        title: the path's, for the reason.
        findings: what was measured.

    Returns:
        "identical": equal to the reference and to width 1. "width-identical": equal to the reference, and every
        difference from width 1 is a near-tie. "broken": anything else; the reason names the place.
    """
    for what, differences in (
        ("T=0", findings.reference_differences),
        ("T>0 with the coupled rule", findings.coupled_differences),
    ):
        if differences:
            return "broken", f"{title}, {what}, against the reference: {_place(differences[0])}"
    if findings.drawn_short:
        return "broken", (
            f"{title}, T>0 with the leviathan rule: {findings.drawn_short} of {findings.drawn} requests ended before "
            "their limit"
        )
    refuted = [law for law in findings.laws if not law.holds]
    if refuted:
        law = max(refuted, key=lambda law: law.kl / law.epsilon)
        where = "all ids of a step" if law.place is None else f"id {law.place} of a step"
        return "broken", (
            f"{title}, T>0 with the leviathan rule: {where}, ordered by {law.order}: KL divergence from the target's "
            f"law {law.kl:.4f} over {law.draws} draws, expected at most {law.epsilon:.4f}"
        )
    beyond = beyond_limit(findings)
    if beyond:
        return "broken", (
            f"{title}, T=0, against width 1: {_place(beyond[0])}: no near-tie, "
            f"expected a margin of at most {findings.margin_limit:.3g}"
        )
    if findings.usual_differences:
        return "width-identical", "equal to the reference; each difference from width 1 is a near-tie"
    return "identical", "equal to the reference and to width 1"


def beyond_limit(findings: Findings) -> list[Divergence]:
    """The differences from width 1 that are no near-ties."""
    limit = findings.margin_limit
    return [d for d in findings.usual_differences if d.margin is None or not d.margin <= limit]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The most severe of one or more verdicts."""
    return max(verdicts, key=SEVERITY.index)


def _place(difference: Divergence) -> str:
    margin = "" if difference.margin is None else f", top-2 margin {difference.margin:.3g}"
    return (
        f"prompt {difference.prompt}, position {difference.position} (generated id {difference.index}): "
        f"got {difference.got} {difference.got_text!r}, expected {difference.expected} {difference.expected_text!r}"
        f"{margin}"
    )
