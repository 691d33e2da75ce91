"""The choices of one request between the event loop and the engine's thread."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from posttrainllm.adapters.serve.errors import as_api_error, timed_out
from posttrainllm.adapters.serve.jobs import Job, Update
from posttrainllm.adapters.serve.metrics import Ending, ending_of
from posttrainllm.adapters.serve.prepare import Work

__all__ = ["ClientGoneError", "Submission", "unless_gone"]

_Result = TypeVar("_Result")


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Submission:
    """A request under way. Made on the event loop; `close` frees its rows whatever became of it.

    Args:
        put: of the room that is kept for it.
        work: what is asked for.
        request_id: for the log, the response and the traces.
        arrived: when it did, on the clock of time.perf_counter().
        seconds: how long it may take from then on; None for ever.

    Raises:
        ApiError: the server has stopped.
    """

    def __init__(
        self,
        put: Callable[[Sequence[Job]], None],
        work: Work,
        request_id: str,
        *,
        arrived: float,
        seconds: float | None,
    ) -> None:
        self._arrived, self._seconds = arrived, seconds
        self._deadline = None if seconds is None else arrived + seconds
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._open = len(work.choices)
        self._request_id, self._prompt_tokens = request_id, work.prompt_tokens
        self._tokens = self._proposed = self._accepted = 0
        self._end: str | None = None
        self._ending: Ending | None = None
        loop = asyncio.get_running_loop()

        def deliver(index: int, update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                loop.call_soon_threadsafe(self._updates.put_nowait, (index, update))

        self._jobs = [
            Job(
                request_id=request_id,
                index=index,
                prompt=choice.prompt,
                params=work.params,
                seed=choice.seed,
                limit=choice.limit,
                since=arrived,
                speculate=work.speculate,
                score=work.echo and work.params.logprobs is not None,
                deliver=partial(deliver, index),
            )
            for index, choice in enumerate(work.choices)
        ]
        put(self._jobs)

    async def updates(self, *, beat: float | None = None) -> AsyncIterator[tuple[int, Update] | None]:
        """What happens to the choices until each has ended.

        Args:
            beat: seconds of silence after which None is given; None waits as long as it takes.

        Yields:
            The choice's index and the update.

        Raises:
            ApiError: an update's error, or 504 when time is up.
        """
        while self._open:
            left = None if self._deadline is None else self._deadline - time.perf_counter()
            silence = min((seconds for seconds in (left, beat) if seconds is not None), default=None)
            try:
                index, update = await asyncio.wait_for(self._updates.get(), silence)
            except TimeoutError:
                if self._deadline is not None and time.perf_counter() >= self._deadline:
                    self._end, self._ending = "timed out", "timed_out"
                    raise timed_out(self._seconds or 0.0) from None
                if beat is not None:
                    yield None
                continue
            if update.error is not None:
                error = as_api_error(update.error)
                self._end, self._ending = error.code or "failed", ending_of(error)
                raise error
            self._tokens += 0 if update.chunk is None else len(update.chunk.token_ids)
            if update.outcome is not None:
                self._proposed += update.outcome.usage.draft_proposed
                self._accepted += update.outcome.usage.draft_accepted
            self._open -= update.last
            yield index, update

    @property
    def ending(self) -> Ending:
        """How it ended."""
        return self._ending or ("ok" if self._open == 0 else "cancelled")

    @property
    def summary(self) -> str:
        """One line for the log, without a word of prompt or answer."""
        end = self._end or ("done" if self._open == 0 else "the client left")
        drafted = f", accepted {self._accepted} of {self._proposed}" if self._proposed else ""
        seconds = time.perf_counter() - self._arrived
        return f"{self._request_id}: {end}, {self._prompt_tokens} + {self._tokens} tokens{drafted}, {seconds:.3f} s"

    def close(self) -> None:
        """Nobody wants the rest: its rows are freed within one step."""
        for job in self._jobs:
            job.cancelled = True


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Wait for an answer as long as somebody waits for it.

    Args:
        request: whose body was read.
        work: the answer.

    Returns:
        It.

    Raises:
        ClientGoneError: the client left first; the work is cancelled.
    """
    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientGoneError
    finally:
        for task in (answer, gone):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
