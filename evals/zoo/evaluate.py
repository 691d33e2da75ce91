"""Held-out loss by source, in nats a token and bits a character."""

import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import mlx.core as mx
import numpy as np

from posttrainllm.evals.zoo.data import HeldOut

__all__ = ["Score", "held_out_scores", "overall"]


@attrs.frozen(kw_only=True)
class Score:
    """Of one source."""

    name: str
    tokens: int
    characters: int
    nats: float
    """Of all tokens."""

    @property
    def nats_per_token(self) -> float:
        """Mean loss."""
        return self.nats / self.tokens

    @property
    def bits_per_character(self) -> float:
        """What tokenizers do not change; the ends of texts are paid for, too."""
        return self.nats / math.log(2) / self.characters


def held_out_scores(
    nats: Callable[[mx.array, mx.array], mx.array], sources: Sequence[HeldOut], *, rows: int, sequence: int
) -> list[Score]:
    """Score every source in windows that do not overlap; each token but the first is predicted once.

    Args:
        nats: (int32[rows, sequence + 1], float32[rows, sequence] of 0 or 1) to the sum of losses.
        sources: what to score.
        rows: of a batch.
        sequence: tokens of a window.

    Returns:
        Scores in the order of the sources.
    """
    found = []
    for source in sources:
        total = 0.0
        for tokens, counted in _windows(source.ids, rows, sequence):
            total += float(nats(mx.array(tokens), mx.array(counted)).item())
        found.append(Score(name=source.name, tokens=len(source.ids) - 1, characters=source.characters, nats=total))
    return found


def overall(scores: Sequence[Score], kind: str, packages: Sequence[str] | None = None) -> Score | None:
    """Sources added up.

    Args:
        scores: of sources named "package kind".
        kind: which, "" for all.
        packages: which, None for all.

    Returns:
        Their sum; None where there are none.
    """
    chosen = [
        score
        for score in scores
        if score.name.endswith(kind) and (packages is None or score.name.split()[0] in packages)
    ]
    if not chosen:
        return None
    return Score(
        name=kind or "all",
        tokens=sum(score.tokens for score in chosen),
        characters=sum(score.characters for score in chosen),
        nats=sum(score.nats for score in chosen),
    )


def _windows(ids: "np.ndarray", rows: int, sequence: int) -> Iterator[tuple["np.ndarray", "np.ndarray"]]:
    predicted = len(ids) - 1
    block = rows * sequence
    for start in range(0, predicted, block):
        counted = (np.arange(start, start + block) < predicted).astype(np.float32).reshape(rows, sequence)
        padded = np.zeros(block + 1, np.int32)
        piece = ids[start : start + block + 1]
        padded[: len(piece)] = piece
        yield np.stack([padded[row * sequence : (row + 1) * sequence + 1] for row in range(rows)]), counted
