"""Probes: what a token's logits depend on beside its own history.

Exactness rests on three of them being 0 in the shapes of a run: the place in the window, the row, the neighbours. The
others say how much bits move when a shape changes, which is what makes width 1 a different computation.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from posttrainllm.adapters.gate.findings import NO_NUMBER, Probe
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.scoring import Ids, Scorer
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.prefill import prefill_chunk

__all__ = ["MOST_CACHES", "histories", "least_capacity", "probe"]

MOST_CACHES = 6
"""Room that the probes need, in caches of the target of B rows: where both widths are fed, each has an old and a new
one beside the one that both start from (5.2 were measured at B=16, C=2048)."""

_FILLED, _FED = 24, 48  # ids of a history: so many are filled at once, so many are then fed at both widths
_FILLER = 1  # any id: what follows a token must not matter


def least_capacity(width: int) -> int:
    """Cache slots that the probes need: what is filled, a window behind it, and the scratch slot."""
    return _FILLED + width + 1


def histories(sequences: Sequence[Sequence[int]], shape: Shape, context: int) -> Ids:
    """Histories of one length for all rows; a short one is repeated.

    Args:
        sequences: ids of one or more texts.
        shape: of the run.
        context: positions of the model.

    Returns:
        [B, N].
    """
    windows = max(1, min(_FED, context - _FILLED) // shape.width)
    rows = [np.resize(np.array(ids, dtype=np.int32), _FILLED + windows * shape.width) for ids in sequences]
    return np.stack([rows[index % len(rows)] for index in range(shape.rows)])


def probe(pair: Pair, ids: Ids, shape: Shape, *, advance: Callable[[], None] = lambda: None) -> tuple[Probe, ...]:
    """Run every probe on the target.

    Args:
        pair: its target is probed.
        ids: [B, N] from `histories`.
        shape: of the run.
        advance: called after each forward.

    Returns:
        One probe a question, "width" first.
    """
    scorer = Scorer(pair.target, capacity=shape.capacity, compiled=pair.runtime.compiled, advance=advance)
    chunk = prefill_chunk(pair.runtime.device)
    probing = _Probing(scorer, ids, shape, chunk, pair.vocab_size)
    found = [
        ("width", f"the width of the forward: 1 or {shape.width}", probing.width(), False),
        ("place", f"the place in a window of {shape.width}", probing.place(), True),
        ("row", f"the row, of {shape.rows}", probing.row(), True),
        ("neighbours", "the other rows' histories", probing.neighbours(), True),
        ("batch", f"the number of rows: 1 or {shape.rows}", probing.batch(), False),
        ("capacity", f"the capacity: {shape.capacity} or {2 * shape.capacity}", probing.capacity(), False),
        ("chunk", f"the prefill chunk: {chunk} or {chunk // 4}", probing.chunk(), False),
    ]
    return tuple(
        Probe(name=name, change=change, difference=difference, must_be_zero=must)
        for name, change, difference, must in found
    )


class _Probing:
    """The histories, the cache of their beginning, and one window behind it to compare with."""

    def __init__(self, scorer: Scorer, ids: Ids, shape: Shape, chunk: int, vocab_size: int) -> None:
        self._scorer, self._ids, self._shape, self._chunk, self._vocab_size = scorer, ids, shape, chunk, vocab_size
        # rows at different positions, as in decoding
        self._start = (_FILLED - np.arange(shape.rows) % 4).astype(np.int32)
        self._window = self._window_of(ids)
        self._kv = scorer.filled(ids, _FILLED, _FILLED)
        self._logits, _ = scorer.window(self._window, self._kv, self._start)

    def _window_of(self, ids: Ids) -> Ids:
        columns = self._start[:, None] + np.arange(self._shape.width)
        return np.take_along_axis(ids, columns, axis=1)

    def width(self) -> float:
        W, worst = self._shape.width, 0.0
        narrow = self._scorer.forced(self._ids, 1, kv=self._kv, start=_FILLED)
        for logits in self._scorer.forced(self._ids, W, kv=self._kv, start=_FILLED):
            alone = mx.concatenate([next(narrow) for _ in range(W)], axis=1)  # W x [B, 1, V] -> [B, W, V]
            worst = max(worst, self._difference(logits, alone))
        return worst

    def place(self) -> float:
        kv, worst = self._kv, 0.0
        for column in range(self._shape.width):
            window = np.full_like(self._window, _FILLER)
            window[:, 0] = self._window[:, column]
            alone, kv = self._scorer.window(window, kv, self._start + np.int32(column))
            worst = max(worst, self._difference(alone[:, 0], self._logits[:, column]))
        return worst

    def row(self) -> float:
        worst = 0.0
        for shift in {1, self._shape.rows // 2}:
            kv = self._scorer.filled(np.roll(self._ids, shift, axis=0), _FILLED, _FILLED)
            moved, _ = self._scorer.window(np.roll(self._window, shift, axis=0), kv, np.roll(self._start, shift))
            back = mx.concatenate([moved[shift:], moved[:shift]])
            worst = max(worst, self._difference(back, self._logits))
        return worst

    def neighbours(self) -> float:
        others = (self._vocab_size - 1 - self._ids).astype(np.int32)
        worst = 0.0
        for row in {0, self._shape.rows - 1}:
            mixed = others.copy()
            mixed[row] = self._ids[row]
            kv = self._scorer.filled(mixed, _FILLED, _FILLED)
            logits, _ = self._scorer.window(self._window_of(mixed), kv, self._start)
            worst = max(worst, self._difference(logits[row], self._logits[row]))
        return worst

    def batch(self) -> float:
        return max(self._difference(self._alone(row), self._logits[row]) for row in {0, self._shape.rows - 1})

    def capacity(self) -> float:
        return self._difference(self._alone(0, capacity=2 * self._shape.capacity), self._alone(0))

    def chunk(self) -> float:
        return self._difference(self._alone(0, chunk=self._chunk // 4), self._alone(0))

    def _difference(self, ours: mx.array, theirs: mx.array) -> float:
        """Largest absolute difference of the logits that decoding reads; NO_NUMBER where one of them is none."""
        columns = slice(self._vocab_size)  # padding beyond is cut off
        largest = float(np.array(mx.max(mx.abs(ours[..., columns] - theirs[..., columns]))))
        return largest if np.isfinite(largest) else NO_NUMBER

    def _alone(self, row: int, *, capacity: int | None = None, chunk: int | None = None) -> mx.array:
        """Logits [W, V] of one row in a batch of one."""
        kv = self._scorer.filled(self._ids[row : row + 1], _FILLED, chunk or self._chunk, capacity=capacity)
        logits, _ = self._scorer.window(self._window[row : row + 1], kv, self._start[row : row + 1])
        return logits[0]
