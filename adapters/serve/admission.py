"""The bounded line between those who ask and the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from posttrainllm.adapters.serve.errors import busy, stopped
from posttrainllm.adapters.serve.jobs import Job
from posttrainllm.kernel.errors import UsageError

__all__ = ["Admission"]

_LONGEST_RETRY_S = 60
_SLEEP_S = 1.0


class Admission:
    """First in, first out. Every method may be called from any thread.

    Args:
        slots: B; so many choices can be in rows.
        queue: so many more may wait.
    """

    def __init__(self, *, slots: int, queue: int) -> None:
        self._slots, self._queue = slots, queue
        self._waiting: deque[Job] = deque()
        self._in_rows = self._reserved = 0
        self._mean_s = 1.0  # of a choice in its row; what Retry-After is reckoned from
        self._changed = threading.Condition()
        self._closed: Exception | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many choices are in rows, and how many wait or are being encoded."""
        with self._changed:
            return self._in_rows, len(self._waiting) + self._reserved

    @property
    def closed(self) -> Exception | None:
        """Why nothing is taken any more; None while it is."""
        return self._closed

    @contextmanager
    def room(self, count: int) -> Iterator[Callable[[Sequence[Job]], None]]:
        """Keep room for the choices of a request while its prompts are encoded.

        Args:
            count: how many.

        Yields:
            What lets all of them wait for rows, to be called once; without that the room is given back.

        Raises:
            UsageError: they can never fit.
            ApiError: there is no room now (429), or the server has stopped (500 or 503); calling raises the last, too.
        """
        self._reserve(count)
        left = count

        def put(jobs: Sequence[Job]) -> None:
            nonlocal left
            with self._changed:
                if self._closed is not None:
                    raise self._closed
                self._waiting.extend(jobs)
                self._reserved -= left
                left = 0
                self._changed.notify_all()

        try:
            yield put
        finally:
            with self._changed:
                self._reserved -= left

    def _reserve(self, count: int) -> None:
        with self._changed:
            if self._closed is not None:
                raise self._closed
            self.drop_cancelled()
            most = self._slots + self._queue
            if count > most:
                raise UsageError(f"n: got {count} choices in all, expected at most {most}: what this server holds")
            ahead = len(self._waiting) + self._reserved
            if self._in_rows + ahead + count > most:
                wait = self._mean_s * (ahead + 1) / self._slots
                raise busy(count, self._in_rows, ahead, most, min(max(round(wait), 1), _LONGEST_RETRY_S))
            self._reserved += count

    def take(self) -> Job | None:
        """The next choice that is still wanted; None where there is none."""
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if not job.cancelled:
                    self._in_rows += 1
                    return job
            return None

    def drop_cancelled(self) -> None:
        """Forget the waiting choices that nobody wants any more."""
        with self._changed:
            if any(job.cancelled for job in self._waiting):
                self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def left(self, seconds: float) -> None:
        """A choice has left its row.

        Args:
            seconds: how long it was there.
        """
        with self._changed:
            self._in_rows -= 1
            self._mean_s += (seconds - self._mean_s) / 8

    def wait(self) -> None:
        """Return once something waits, or nothing will any more, or after a second.

        A signal is handled by the main thread, which waits here, and only when it runs: one that comes just before it
        sleeps, or that the system hands to another thread, does not wake it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed is not None, timeout=_SLEEP_S)

    def close(self, error: Exception | None = None) -> None:
        """Take nothing more.

        Args:
            error: what is raised from now on; None says that the server has stopped.
        """
        with self._changed:
            self._closed = self._closed or error or stopped()
            self._changed.notify_all()

    def take_all(self) -> list[Job]:
        """Everything that waits, which nobody will run."""
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            return waiting
