"""Counting what steps did: accept rates, repeated n-grams, equal texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports MLX, and the BLAS must come first
    from posttrainllm.adapters.rows import RowStep

__all__ = ["acceptance", "count_equal", "generated", "repeated_share"]


def acceptance(runs: Sequence[Sequence["RowStep"]], first: int | None = None) -> tuple[int, int]:
    """Count accepted and proposed ids.

    Args:
        runs: the steps of each prompt.
        first: count only steps that start with fewer than this many ids generated; whole steps, see above.

    Returns:
        (accepted, proposed).
    """
    accepted = proposed = 0
    for steps in runs:
        generated = 0
        for step in steps:
            if first is not None and generated >= first:
                break
            accepted, proposed = accepted + step.accepted, proposed + step.proposed
            generated += len(step.tokens)
    return accepted, proposed


def repeated_share(sequences: Sequence[Sequence[int]], n: int = 4) -> float | None:
    """Share of n-grams that occurred earlier in the same sequence, over all sequences.

    Args:
        sequences: ids of each text.
        n: 4 for 4-grams.

    Returns:
        0 to 1; None where no sequence has n ids.
    """
    grams = [[tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)] for ids in sequences]
    total = sum(len(of_one) for of_one in grams)
    return (total - sum(len(set(of_one)) for of_one in grams)) / total if total else None


def count_equal(runs: Sequence[Sequence["RowStep"]], others: Sequence[Sequence["RowStep"]]) -> int:
    """How many prompts have the same ids in both, whatever steps they came in.

    Args:
        runs: the steps of each prompt.
        others: the same prompts, decoded another way.

    Returns:
        0 to the number of prompts.
    """
    return sum(ours == theirs for ours, theirs in zip(generated(runs), generated(others), strict=True))


def generated(runs: Sequence[Sequence["RowStep"]]) -> list[list[int]]:
    """The ids of each prompt, whatever steps they came in."""
    return [[index for step in steps for index in step.tokens] for steps in runs]
