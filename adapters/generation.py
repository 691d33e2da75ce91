"""One request from prompt ids to text, on an engine of its own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from posttrainllm.adapters.adaptive import choices_up_to, curve_mode
from posttrainllm.adapters.completion import Completion
from posttrainllm.adapters.costs import CostShape, curve_on_file, curves_for
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.params import MAX_DRAFT_K, SamplingParams, check_width, is_int, is_text
from posttrainllm.adapters.payoff import Payoff, in_doubt, payoff
from posttrainllm.adapters.request import request_of
from posttrainllm.adapters.result import Chunk, Result
from posttrainllm.adapters.rows import RowRequest, RowStep
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.kernel.errors import CapacityError, MemoryLimitError, UsageError

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
        draft_k: K, with a draft; "auto" chooses it from step to step, "auto:N" up to N.
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
        draft_k: int | str | DraftLength = 4,
        plain_width: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        length = DraftLength.parse(draft_k)
        most = length.on(pair.runtime.device)
        plain_width = check_width("plain-width", plain_width, 1, MAX_DRAFT_K + 1)
        self.pair, self.params, self._recorder = pair, params, recorder
        self._draft_k = most if pair.draft is not None else 0
        self._auto = length.auto and pair.draft is not None
        self._prompt = _ids(pair, prompt)
        context = pair.target.context
        if len(self._prompt) >= context:
            raise CapacityError(f"prompt: got {len(self._prompt)} tokens, expected fewer than the context of {context}")
        limit = min(len(self._prompt) + params.max_tokens, context)
        width = most + 1 if pair.draft is not None else plain_width
        params.check_ids(pair.vocab_size)
        self._request = request_of(params, self._prompt, limit=limit, draft_k=self._draft_k)
        self._shape = CostShape(
            rows=1,
            capacity=capacity_for(limit, width),
            width=width,
            draft_ks=choices_up_to(most) if self._auto else (most,),
        )
        curves = curves_for(pair, self._shape, [self._request.mode]) if self._auto else None
        self._engine = Engine(pair, capacity=self._shape.capacity, width=width, curves=curves)
        self._steps: Counter[int] = Counter()
        self._tokens = 0
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
            self._steps[step.draft_k] += 1
            self._tokens += len(step.tokens)
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

    def payoff(self, *, measure: bool = False) -> Payoff | None:
        """Whether the draft made it faster.

        Args:
            measure: whether to find out what steps cost where that is not known and the draft is in doubt; it takes a
                second or more, once for a pair, a capacity and a K.

        Returns:
            None without a draft, where nothing can be said, or where the costs are not known.
        """
        if self.pair.draft is None or not (self._auto or in_doubt(self._steps, self._tokens)):
            return None
        mode = self._request.mode
        curve = curve_on_file(self.pair, self._shape, mode)  # under auto they are those of this process
        if curve is None and measure:
            try:
                curve = curves_for(self.pair, self._shape, [mode])[curve_mode(mode)]
            except MemoryLimitError:
                return None
        return None if curve is None else payoff(curve, self._steps, self._tokens, auto=self._auto)

    def _described(self) -> dict[str, Any]:
        """What a result says of the lengths that were chosen, and of a draft that does not pay."""
        lengths = {str(draft_k): count for draft_k, count in sorted(self._steps.items())}
        chosen = {"policy": "auto", "steps": lengths} if self._auto else {}
        found = self.payoff()
        return chosen if found is None else {**chosen, "pays": found.pays, "speed_ratio": round(found.ratio, 3)}

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
            speculative={"enabled": pair.draft is not None, "reason": pair.reason} | self._described(),
            logprobs=completion.logprobs,
            adapters=pair.adapters or None,
            kv_bits=None if pair.target.packing is None else pair.target.packing.bits,
        )


def _ids(pair: Pair, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise UsageError("prompt: got an empty text or one that is no UTF-8, expected text")
        return pair.tokenizer.encode(prompt)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable) or not all(map(is_int, prompt)):
        raise UsageError(f"prompt: got {type(prompt).__name__} of something else, expected text or token ids")
    return [int(index) for index in prompt]
