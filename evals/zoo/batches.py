"""Windows of the training text in a seeded order, made ahead of the device by a thread of their own."""

import queue
import threading
from functools import lru_cache
from typing import Any

import attrs
import numpy as np

__all__ = ["Batch", "Batches", "Prefetch"]

_AHEAD = 4  # batches
_Array = np.ndarray[Any, Any]


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """What one gradient is taken of."""

    tokens: _Array
    """int32[rows, sequence + 1]."""
    repeated: _Array | None = None
    """bool[rows, sequence]: tokens but the first that are to be unlearnt; None where the text is to be learnt."""


@attrs.frozen(kw_only=True, eq=False)
class Batches:
    """Batch number i, for any i: a run that resumes asks for the next number."""

    ids: _Array
    """uint16[N]."""
    prose: _Array | None = None
    """uint16[M]: text of its own share; None where all is in `ids`."""
    prose_share: float = 0.0
    """Share of the windows that come from there."""
    rows: int
    sequence: int
    seed: int
    generated: _Array | None = None
    """uint16[M, sequence + 1]: texts that a model wrote."""
    generated_share: float = 0.0
    """Share of the batches that come from there."""
    repeated: _Array | None = None
    """bool[M, sequence]: which of their tokens are to be unlearnt; None where these texts are to be learnt."""

    def batch(self, number: int) -> Batch:
        """Make a batch.

        Args:
            number: from 0 up.

        Returns:
            It.
        """
        # floor((i + 1) s) - floor(i s) is 1 in a share s of all i, evenly spread
        before, after = int(number * self.generated_share), int((number + 1) * self.generated_share)
        if self.generated is not None and after > before:
            return self._generated(before)
        return Batch(tokens=self._text(number - before))

    def _text(self, number: int) -> _Array:
        rows = []
        for index in range(number * self.rows, (number + 1) * self.rows):
            before, after = int(index * self.prose_share), int((index + 1) * self.prose_share)
            if self.prose is not None and after > before:
                rows.append(self._window(self.prose, before))
            else:
                rows.append(self._window(self.ids, index - before))
        return np.stack(rows).astype(np.int32)

    def _window(self, ids: _Array, index: int) -> _Array:
        windows = (len(ids) - self.sequence - 1) // self.sequence  # one less than fit: an epoch starts anywhere in it
        epoch, place = divmod(index, windows)
        start = _order(self.seed, epoch, windows)[place] * self.sequence + _shift(self.seed, epoch, self.sequence)
        found: _Array = ids[start : start + self.sequence + 1]
        return found

    def _generated(self, number: int) -> Batch:
        assert self.generated is not None
        count = len(self.generated)
        places = [divmod(index, count) for index in range(number * self.rows, (number + 1) * self.rows)]
        rows = [_order(self.seed, epoch, count)[place] for epoch, place in places]
        repeated = None if self.repeated is None else self.repeated[rows]
        return Batch(tokens=self.generated[rows].astype(np.int32), repeated=repeated)


class Prefetch:
    """Batches of a range, made by a thread; use as a context manager."""

    def __init__(self, batches: Batches, first: int) -> None:
        self._batches, self._next = batches, first
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Prefetch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            while not self._queue.empty():  # it may wait for a place
                self._queue.get_nowait()
            self._thread.join(0.05)

    def take(self) -> Batch:
        """The next batch."""
        found = self._queue.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._queue.put(self._batches.batch(self._next))
                self._next += 1
        except BaseException as error:  # told to the thread that waits
            self._queue.put(error)


@lru_cache(maxsize=8)  # every row asks for one
def _order(seed: int, epoch: int, count: int) -> _Array:
    """A permutation of range(count)."""
    return np.random.default_rng([seed, epoch, count]).permutation(count)


def _shift(seed: int, epoch: int, sequence: int) -> int:
    """Where an epoch's windows start: other epochs cut the text at other places."""
    return (seed * 7919 + epoch * 104729) % sequence
