"""One request from prompt ids to text, on an engine of its own."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from posttrainllm.adapters.engine import Engine, capacity_for
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.params import MAX_DRAFT_K, SamplingParams, check_width, is_int, is_text
from posttrainllm.adapters.request import request_of
from posttrainllm.adapters.result import Chunk, FinishReason, Result, Timings, TokenLogprobs, Usage
from posttrainllm.adapters.rows import RowRequest, RowStep
from posttrainllm.adapters.text import IncrementalDecoder, StopMatcher
from posttrainllm.kernel.errors import CapacityError, NonFiniteError, UsageError

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
        self._count = limit - len(self._prompt)
        width = draft_k + 1 if pair.draft is not None else plain_width
        params.check_ids(pair.vocab_size)
        self._request = request_of(params, self._prompt, limit=limit, draft_k=self._draft_k)
        self._engine = Engine(pair, capacity=capacity_for(limit, width), width=width)
        self._decoder = IncrementalDecoder(pair.tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._proposed = self._accepted = 0
        self._reason: FinishReason | None = None
        self._first_count = 0
        self._prefill_s = self._ttft_s = self._decode_s = 0.0
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
        started = time.perf_counter()
        self._engine.insert(0, self._request)
        self._prefill_s = time.perf_counter() - started
        while self._reason is None:
            step = self._engine.step()[0]
            if self._recorder is not None:
                self._recorder.step(step)
            chunk = self._absorb(step)
            now = time.perf_counter() - started
            if self._first_count == 0:
                self._ttft_s, self._first_count = now, len(self._ids)
            self._decode_s = now - self._ttft_s
            if self._recorder is not None and self._reason is not None:
                self._recorder.end(self._reason)
            yield chunk

    def cancel(self) -> Chunk:
        """End early and return the text still held back; what was decoded stays."""
        if self._reason is not None:
            return Chunk(text="", token_ids=(), finish_reason=self._reason)
        self._reason = "cancelled"
        if self._recorder is not None:
            self._recorder.end("cancelled")
        return self._chunk(self._tail(), ())

    def result(self) -> Result:
        """What there is: the whole once the iterator has ended."""
        pair, steps, completed = self.pair, self._engine.steps, len(self._ids)
        rest = completed - self._first_count
        return Result(
            text="".join(self._text),
            token_ids=tuple(self._ids),
            finish_reason=self._reason or "cancelled",
            usage=Usage(
                prompt_tokens=len(self._prompt),
                completion_tokens=completed,
                total_tokens=len(self._prompt) + completed,
                draft_proposed=self._proposed,
                draft_accepted=self._accepted,
                accept_rate=self._accepted / self._proposed if self._proposed else None,
            ),
            timings=Timings(
                prefill_s=self._prefill_s,
                ttft_s=self._ttft_s,
                decode_s=self._decode_s,
                decode_tokens_per_s=rest / self._decode_s if rest and self._decode_s else None,
                steps=steps,
                tokens_per_step=completed / steps if steps else None,
            ),
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
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
        )

    def _absorb(self, step: RowStep) -> Chunk:
        """Take over one step's ids up to the first that ends the text."""
        if not step.finite:
            raise NonFiniteError(
                f"step {self._engine.steps - 1}, position {len(self._prompt) + len(self._ids)}: the target's logits "
                "are not finite; nothing was sampled from them"
            )
        pieces, kept = [], 0
        for index in step.tokens:
            kept += 1
            piece, reason = self._push(index)
            pieces.append(piece)
            if reason is not None:
                self._reason = reason
                break
        cut = self._reason == "stop"
        self._proposed += min(step.proposed, kept) if cut else step.proposed
        self._accepted += min(step.accepted, kept)
        return self._chunk("".join(pieces), step.tokens[:kept], step.logprobs[:kept])

    def _push(self, index: int) -> tuple[str, FinishReason | None]:
        """Add one id; the text it lets out, and why the generation ends with it if it does."""
        self._ids.append(index)
        at_eos = index in self.pair.tokenizer.eos_ids and not self.params.ignore_eos
        if at_eos or index in self.params.stop_token_ids:
            return self._tail(), "stop"
        piece, stopped = self._matcher.push(self._decoder.push(index))
        if stopped:
            return piece, "stop"
        if len(self._ids) == self._count:
            return piece + self._tail(), "length"
        return piece, None

    def _tail(self) -> str:
        """The text held back for a character or a stop string that did not come."""
        piece, stopped = self._matcher.push(self._decoder.flush())
        return piece if stopped else piece + self._matcher.flush()

    def _chunk(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> Chunk:
        self._text.append(text)
        self._logprobs.extend(logprobs)
        asked = logprobs if self.params.logprobs is not None else None
        return Chunk(text=text, token_ids=token_ids, finish_reason=self._reason, logprobs=asked)


def _ids(pair: Pair, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise UsageError("prompt: got an empty text or one that is no UTF-8, expected text")
        return pair.tokenizer.encode(prompt)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable) or not all(map(is_int, prompt)):
        raise UsageError(f"prompt: got {type(prompt).__name__} of something else, expected text or token ids")
    return [int(index) for index in prompt]
