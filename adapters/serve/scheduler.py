"""The engine's thread: rows join and leave between steps, first come first served.

All MLX work is done here, since its streams belong to threads. A turn admits what fits, writes one prompt chunk and
runs one step, so that a prompt delays the rows beside it by a chunk a step, and whoever leaves frees a row within one.
"""

import time
from collections.abc import Callable, Generator
from typing import Protocol

import attrs

from posttrainllm.adapters.completion import Completion
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.prefill import PromptPrefill
from posttrainllm.adapters.prompt_logprobs import prompt_logprobs
from posttrainllm.adapters.request import request_of
from posttrainllm.adapters.result import TokenLogprobs
from posttrainllm.adapters.rows import RowStep
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.admission import Admission
from posttrainllm.adapters.serve.errors import failed
from posttrainllm.adapters.serve.jobs import Job, Outcome, Update
from posttrainllm.adapters.serve.recordings import Recording, Recordings
from posttrainllm.adapters.serve.speculation import speculation
from posttrainllm.kernel.errors import NonFiniteError, PosttrainllmError

__all__ = ["FullGate", "Scheduler"]


class FullGate(Protocol):
    """The whole gate."""

    def __call__(self, *, progress: Callable[..., None]) -> Standing:
        """Run it to its end, calling back after every step."""
        ...


@attrs.define(eq=False, kw_only=True)
class _Row:
    """A choice in its row."""

    job: Job
    completion: Completion
    queue_s: float
    since: float
    recording: Recording
    prefill: PromptPrefill
    scoring: Generator[None, None, list[TokenLogprobs | None]] | None
    """Of the prompt itself, where it is echoed with log probabilities; it comes before the prefill."""


class _StopError(Exception):
    """The server stops while the gate is under way."""


class Scheduler:
    """Steps the rows of an engine for as long as there is work.

    Args:
        engine_for: makes the engine that a standing allows: with the draft, or plain.
        standing: what the gate has said so far.
        admission: where choices wait.
        recordings: where their traces go.
        full_gate: what is left for idle time; None for nothing.
    """

    def __init__(
        self,
        engine_for: Callable[[Standing], Engine],
        standing: Standing,
        admission: Admission,
        *,
        recordings: Recordings,
        full_gate: FullGate | None = None,
    ) -> None:
        self.standing = standing
        self.admission = admission
        self._engine_for, self._recordings, self._full_gate = engine_for, recordings, full_gate
        self._engine = engine_for(standing)
        self._free = list(range(self._engine.rows))[::-1]
        self._rows: dict[int, _Row] = {}
        self._entering: tuple[int, _Row] | None = None  # its prompt is being read

    @property
    def engine(self) -> Engine:
        """What is stepped now."""
        return self._engine

    def run(self) -> None:
        """Work until the admission is closed. An error of the engine closes it, and ends what is under way.

        Raises:
            Exception: the engine's own, once everybody has been told.
        """
        try:
            while self.admission.closed is None:
                if self._turn():
                    continue
                if self._full_gate is not None:
                    self._run_full_gate()
                else:
                    self.admission.wait()
        except _StopError:
            pass
        except Exception:
            self._end_all(failed())
            raise
        self._end_all(None)

    def _turn(self) -> bool:
        """Admit, read one prompt chunk, run one step; whether there was anything to do."""
        self._drop_cancelled()
        self._admit()
        busy = self._entering is not None or bool(self._rows)
        if self._entering is not None:
            self._read_chunk(*self._entering)
        if self._rows:
            for row, step in self._engine.step().items():
                self._absorb(row, step)
        return busy

    def _admit(self) -> None:
        """Let the next choice have a row; one prompt is read at a time, since each needs caches of its own."""
        while self._entering is None and self._free:
            taken = self.admission.take()
            if taken is None:
                return
            job, queue_s = taken
            try:
                self._entering = (self._free[-1], self._begin(job, queue_s))
            except PosttrainllmError as error:  # about this request alone
                self.admission.left(0.0)
                job.deliver(Update(error=error))
                continue
            self._free.pop()

    def _begin(self, job: Job, queue_s: float) -> _Row:
        drafted = job.speculate and self.standing.enabled
        draft_k = self._engine.width - 1 if drafted else 0
        request = request_of(job.params, job.prompt, limit=job.limit, draft_k=draft_k)
        completion = Completion(
            self._engine.pair.tokenizer,
            job.params,
            prompt_tokens=len(job.prompt),
            count=job.limit - len(job.prompt),
        )
        return _Row(
            job=job,
            completion=completion,
            queue_s=queue_s,
            since=time.perf_counter(),
            prefill=self._engine.prefill(request),
            recording=self._recordings.start(job),
            scoring=prompt_logprobs(self._engine, job.prompt, count=job.params.logprobs or 0) if job.score else None,
        )

    def _read_chunk(self, number: int, row: _Row) -> None:
        if row.scoring is not None:
            try:
                next(row.scoring)
            except StopIteration as scored:
                row.scoring = None
                row.job.deliver(Update(prompt_logprobs=scored.value))
            except NonFiniteError as error:
                self._leave_entrance()
                row.job.deliver(Update(error=error))
            return
        row.prefill.advance()
        if not row.prefill.done:
            return
        self._entering = None
        self._engine.place(number, row.prefill)
        row.recording.begin(self._engine, number, row.prefill.request)
        row.completion.prefilled()
        self._rows[number] = row

    def _leave_entrance(self) -> None:
        """Give up the prompt that is being read."""
        assert self._entering is not None
        number, row = self._entering
        self._entering = None
        self._free.append(number)
        self.admission.left(time.perf_counter() - row.since)

    def _absorb(self, number: int, step: RowStep) -> None:
        """Hand a step on. Whatever fails here is of the host, and ends this row alone."""
        row = self._rows[number]
        row.recording.step(step)
        try:
            chunk = row.completion.absorb(step)
        except Exception as error:
            LOGGER.error("%s: %s", row.job.request_id, error, exc_info=not isinstance(error, PosttrainllmError))
            self._leave(number, None)
            row.job.deliver(Update(error=error))
            return
        if chunk.finish_reason is None:
            row.job.deliver(Update(chunk=chunk))
            return
        self._leave(number, chunk.finish_reason)
        outcome = Outcome(
            usage=row.completion.usage(),
            timings=row.completion.timings(),
            queue_s=row.queue_s,
            speculative=speculation(self.standing, self._engine.width, row.job),
        )
        row.job.deliver(Update(chunk=chunk, outcome=outcome))

    def _leave(self, number: int, reason: str | None) -> None:
        """Free a row."""
        row = self._rows.pop(number)
        self._engine.release(number)
        self._free.append(number)
        self.admission.left(time.perf_counter() - row.since)
        row.recording.end(reason)

    def _drop_cancelled(self) -> None:
        """Free what nobody wants any more."""
        if self._entering is not None and self._entering[1].job.cancelled:
            self._leave_entrance()
        for number in [number for number, row in self._rows.items() if row.job.cancelled]:
            self._leave(number, "cancelled")
        self.admission.drop_cancelled()

    def _run_full_gate(self) -> None:
        """Run the whole gate; whoever asks meanwhile is answered between its steps."""
        assert self._full_gate is not None
        gate, self._full_gate = self._full_gate, None
        LOGGER.info("gate: the full set of prompts runs while nobody asks")
        try:
            standing = gate(progress=self._pump)
        except PosttrainllmError as error:
            LOGGER.warning("the full gate did not run to its end: %s", error)
            return
        self.standing = standing
        if standing.enabled:
            LOGGER.info("gate: %s", standing.verdict)
            return
        # the gate goes on only while no row is taken, so nothing is in flight that could be cut short
        LOGGER.warning("speculation is switched off: %s", standing.reason)
        self._engine.hand_over()  # its caches are freed before others are made
        self._engine = self._engine_for(standing)

    def _pump(self, *_: object) -> None:
        while self._turn():
            pass
        if self.admission.closed is not None:
            raise _StopError

    def _end_all(self, error: Exception | None) -> None:
        """Tell everybody who still waits for something."""
        self.admission.close(error)
        entering = [] if self._entering is None else [self._entering[1]]
        rows = [*entering, *self._rows.values()]
        for row in rows:
            row.recording.end(None if error else "cancelled")
        for job in [*(row.job for row in rows), *self.admission.take_all()]:
            job.deliver(Update(error=self.admission.closed))
