"""A choice from its admission to its end: prompt, row, reply."""

import time
from collections.abc import Generator

import attrs

from posttrainllm.adapters.completion import Completion
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.prompt_logprobs import prompt_logprobs
from posttrainllm.adapters.request import request_of
from posttrainllm.adapters.result import TokenLogprobs
from posttrainllm.adapters.rows import RowStep
from posttrainllm.adapters.serve.jobs import Job, Outcome, Update
from posttrainllm.adapters.serve.metrics import Metrics
from posttrainllm.adapters.serve.recordings import Recording, Recordings
from posttrainllm.adapters.serve.speculation import speculation
from posttrainllm.kernel.config import Mode

__all__ = ["Seat"]


class Seat:
    """One choice and the row that is kept for it.

    Args:
        job: what is asked for.
        number: the row.
        metrics: of the server.
    """

    def __init__(self, job: Job, number: int, metrics: Metrics) -> None:
        self.job, self.number, self._metrics = job, number, metrics
        self._since = time.perf_counter()
        self._last_step: float | None = None
        metrics.entered(queue_s=self._since - job.since)
        self._recording: Recording | None = None
        self.drafted_mode: Mode | None = None
        """The smallest step that serves it; None where it is not drafted for."""

    @property
    def seconds(self) -> float:
        """How long it has had the row."""
        return time.perf_counter() - self._since

    def begin(self, engine: Engine, standing: Standing, recordings: Recordings) -> None:
        """Prepare to read the prompt.

        Args:
            engine: whose row it is.
            standing: what the gate has said.
            recordings: where its trace goes.

        Raises:
            CapacityError: the request does not fit the engine.
        """
        job, self._engine = self.job, engine
        drafted = job.speculate and standing.enabled
        draft_k = engine.width - 1 if drafted else 0
        request = request_of(job.params, job.prompt, limit=job.limit, draft_k=draft_k)
        request = attrs.evolve(request, seed=job.seed)
        self._speculative = speculation(standing, engine.width, job, auto=engine.curves is not None)
        self.drafted_mode = request.mode if drafted else None
        self._prefill = engine.prefill(request)
        self._completion = Completion(
            engine.pair.tokenizer, job.params, prompt_tokens=len(job.prompt), count=job.limit - len(job.prompt)
        )
        self._recording = recordings.start(job)
        self._scoring: Generator[None, None, list[TokenLogprobs | None]] | None = None
        if job.score:
            self._scoring = prompt_logprobs(engine, job.prompt, count=job.params.logprobs or 0)

    def read_chunk(self) -> bool:
        """Compute with one chunk of the prompt.

        Returns:
            Whether it has all been read.

        Raises:
            NonFiniteError: the prompt is to be scored, and its logits are not finite.
        """
        if self._scoring is not None:
            try:
                next(self._scoring)
            except StopIteration as scored:
                self._scoring = None
                self.job.deliver(Update(prompt_logprobs=scored.value))
                self._completion.start()
            return False
        self._prefill.advance()
        return self._prefill.done

    def sit_down(self) -> None:
        """Put the prompt in the row."""
        self._engine.place(self.number, self._prefill)
        if self._recording is not None:
            self._recording.begin(self._engine, self.number, self._prefill.request)
        self._completion.prefilled()
        self._metrics.prompted(tokens=len(self.job.prompt), cached=self._prefill.cached)

    def absorb(self, step: RowStep) -> Update:
        """Take over a step.

        Args:
            step: of the row.

        Returns:
            What it adds, with the outcome where it is the last.

        Raises:
            NonFiniteError: the target's logits were not finite.
        """
        if self._recording is not None:
            self._recording.step(step)
        proposed, accepted = self._completion.drafted
        chunk = self._completion.absorb(step)
        self._count(len(chunk.token_ids), proposed, accepted)
        if chunk.finish_reason is None:
            return Update(chunk=chunk)
        outcome = Outcome(
            index=self.job.index,
            usage=self._completion.usage(),
            timings=self._completion.timings(),
            cached_tokens=self._prefill.cached,
            queue_s=self._since - self.job.since,
            speculative=self._speculative,
        )
        return Update(chunk=chunk, outcome=outcome)

    def _count(self, tokens: int, proposed: int, accepted: int) -> None:
        """Count a step, given what had been proposed and accepted before it."""
        now, last = time.perf_counter(), self._last_step
        self._metrics.advanced(
            tokens=tokens,
            proposed=self._completion.drafted[0] - proposed,
            accepted=self._completion.drafted[1] - accepted,
            first=last is None,
            seconds=now - (self.job.since if last is None else last),
        )
        self._last_step = now

    def end(self, reason: str | None) -> None:
        """Finish the trace.

        Args:
            reason: why; None where something failed, and the trace stops without an end.
        """
        if self._recording is not None:
            self._recording.end(reason)
