"""One request from prompt ids to text, on an engine of its own."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from posttrainllm.adapters.completion import Completion
from posttrainllm.adapters.engine import Engine, capacity_for
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.params import MAX_DRAFT_K, SamplingParams, check_width, is_int, is_text
from posttrainllm.adapters.request import request_of
from posttrainllm.adapters.result import Chunk, Result
from posttrainllm.adapters.rows import RowRequest, RowStep
from posttrainllm.kernel.errors import CapacityError, UsageError

__all__ = ["Generation", "Recorder"]


class Recorder(Protocol):
    """What wants to see every step of a generation, as `replay.writer.TraceWriter` does."""

    def begin(self, engine: Engine, row: int, request: RowRequest) -> None:
        """Before the prefill: what is decoded, and on what."""

    def step(self, step: RowStep) -> None:
        """Behind each step, before its ids are looked at."""

    def end(self, reason: str) -> None:
        """After the last one, with the finish reason."""


class Generation:
    """An iterator over what each step adds; `result()` at any time says what there is so far.

    Args:
        pair: the models; with a draft the request is decoded speculatively.
        prompt: ids, or text to encode.
        params: the request.
        draft_k: K, with a draft.
        plain_width: W, without one; K + 1 makes it the reference of a speculative run.
        recorder: sees every step; None for nobody.

    Raises:
        UsageError: `draft_k` or `plain_width` is out of range.
        CapacityError: the prompt is empty, too long, or has an id that the model lacks.
        MemoryLimitError: the caches cannot fit.
    """

    def __init__(
        self,
        pair: Pair,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        draft_k: int = 4,
        plain_width: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        draft_k = check_width("draft-k", draft_k, 1, MAX_DRAFT_K)
        plain_width = check_width("plain-width", plain_width, 1, MAX_DRAFT_K + 1)
        self.pair, self.params, self._recorder = pair, params, recorder
        self._draft_k = draft_k if pair.draft is not None else 0
        self._prompt = _ids(pair, prompt)
        context = pair.target.context
        if len(self._prompt) >= context:
            raise CapacityError(f"prompt: got {len(self._prompt)} tokens, expected fewer than the context of {context}")
        limit = min(len(self._prompt) + params.max_tokens, context)
        width = draft_k + 1 if pair.draft is not None else plain_width
        params.check_ids(pair.vocab_size)
        self._request = request_of(params, self._prompt, limit=limit, draft_k=self._draft_k)
        self._engine = Engine(pair, capacity=capacity_for(limit, width), width=width)
        self._completion = Completion(
            pair.tokenizer, params, prompt_tokens=len(self._prompt), count=limit - len(self._prompt)
        )
        self._chunks = self._run()

    @property
    def forecast(self) -> Forecast:
        """The memory that it needs."""
        return self._engine.forecast

    def __iter__(self) -> Iterator[Chunk]:
        """The one iterator of this generation: asking again goes on where it stands.

        Raises:
            NonFiniteError: the target's logits were not finite; the step is named.
        """
        return self._chunks

    def _run(self) -> Iterator[Chunk]:
        """Prefill, then step until the end."""
        if self._recorder is not None:
            self._recorder.begin(self._engine, 0, self._request)
        self._completion.start()
        self._engine.insert(0, self._request)
        self._completion.prefilled()
        while self._completion.reason is None:
            step = self._engine.step()[0]
            if self._recorder is not None:
                self._recorder.step(step)
            chunk = self._completion.absorb(step)
            if self._recorder is not None and self._completion.reason is not None:
                self._recorder.end(self._completion.reason)
            yield chunk

    def cancel(self) -> Chunk:
        """End early and return the text still held back; what was decoded stays."""
        if self._recorder is not None and self._completion.reason is None:
            self._recorder.end("cancelled")
        return self._completion.cancel()

    def result(self) -> Result:
        """What there is: the whole once the iterator has ended."""
        pair, completion = self.pair, self._completion
        return Result(
            text=completion.text,
            token_ids=completion.token_ids,
            finish_reason=completion.reason or "cancelled",
            usage=completion.usage(),
            timings=completion.timings(),
            peak_memory_bytes=mx.get_peak_memory(),
            seed=self.params.seed,
            model=pair.target.name,
            draft_model=pair.draft.name if pair.draft is not None else None,
            draft_k=self._draft_k or None,
            plain_width=self._engine.width if pair.draft is None else None,
            accept_rule=self.params.accept_rule if pair.draft is not None and self.params.temperature > 0 else None,
            sampling=self.params.described,
            device=pair.runtime.device,
            dtype=pair.target.dtype,
            blas=pair.runtime.blas,
            versions=pair.runtime.versions,
            speculative={"enabled": pair.draft is not None, "reason": pair.reason},
            logprobs=completion.logprobs,
        )


def _ids(pair: Pair, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise UsageError("prompt: got an empty text or one that is no UTF-8, expected text")
        return pair.tokenizer.encode(prompt)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable) or not all(map(is_int, prompt)):
        raise UsageError(f"prompt: got {type(prompt).__name__} of something else, expected text or token ids")
    return [int(index) for index in prompt]
