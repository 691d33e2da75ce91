"""The bounded line between those who ask and the engine's thread."""

import threading
import time
from collections import deque
from collections.abc import Sequence

from posttrainllm.adapters.serve.errors import busy, stopped
from posttrainllm.adapters.serve.jobs import Job
from posttrainllm.kernel.errors import UsageError

__all__ = ["Admission"]

_LONGEST_RETRY_S = 60


class Admission:
    """First in, first out. Every method may be called from any thread.

    Args:
        slots: B; so many choices can be in rows.
        queue: so many more may wait.
    """

    def __init__(self, *, slots: int, queue: int) -> None:
        self._slots, self._queue = slots, queue
        self._waiting: deque[tuple[Job, float]] = deque()
        self._in_rows = 0
        self._mean_s = 1.0  # of a choice in its row; what Retry-After is reckoned from
        self._changed = threading.Condition()
        self._closed: Exception | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many choices are in rows, and how many wait."""
        with self._changed:
            return self._in_rows, len(self._waiting)

    @property
    def closed(self) -> Exception | None:
        """Why nothing is taken any more; None while it is."""
        return self._closed

    def put(self, jobs: Sequence[Job]) -> None:
        """Let all choices of a request wait for rows, or none.

        Args:
            jobs: in the order in which they are to run.

        Raises:
            UsageError: they can never fit.
            ApiError: there is no room now (429), or the server has stopped (500 or 503).
        """
        with self._changed:
            if self._closed is not None:
                raise self._closed
            self.drop_cancelled()
            most = self._slots + self._queue
            if len(jobs) > most:
                raise UsageError(f"n: got {len(jobs)} choices in all, expected at most {most}: what this server holds")
            if self._in_rows + len(self._waiting) + len(jobs) > most:
                wait = self._mean_s * (len(self._waiting) + 1) / self._slots
                raise busy(len(self._waiting), min(max(round(wait), 1), _LONGEST_RETRY_S))
            now = time.perf_counter()
            self._waiting.extend((job, now) for job in jobs)
            self._changed.notify_all()

    def take(self) -> tuple[Job, float] | None:
        """The next choice that is still wanted, and how many seconds it waited; None where there is none."""
        with self._changed:
            while self._waiting:
                job, since = self._waiting.popleft()
                if not job.cancelled:
                    self._in_rows += 1
                    return job, time.perf_counter() - since
            return None

    def drop_cancelled(self) -> None:
        """Forget the waiting choices that nobody wants any more."""
        with self._changed:
            if any(job.cancelled for job, _ in self._waiting):
                self._waiting = deque(entry for entry in self._waiting if not entry[0].cancelled)

    def left(self, seconds: float) -> None:
        """A choice has left its row.

        Args:
            seconds: how long it was there.
        """
        with self._changed:
            self._in_rows -= 1
            self._mean_s += (seconds - self._mean_s) / 8

    def wait(self) -> None:
        """Return once something waits, or nothing will any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed is not None)

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
            waiting, self._waiting = [job for job, _ in self._waiting], deque()
            return waiting
