"""A reply on its way: ids to text, what ends it, what is counted, and how long it took."""

import time

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.result import Chunk, FinishReason, Timings, TokenLogprobs, Usage
from posttrainllm.adapters.rows import RowStep
from posttrainllm.adapters.text import IncrementalDecoder, StopMatcher
from posttrainllm.kernel.errors import NonFiniteError

__all__ = ["Completion"]


class Completion:
    """What the steps of one row add up to, cut at the first id that ends the text.

    Args:
        tokenizer: the target's.
        params: of the request.
        prompt_tokens: ids of its prompt.
        count: most ids to emit.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, prompt_tokens: int, count: int) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._prompt_tokens, self._count = prompt_tokens, count
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._proposed = self._accepted = self._steps = 0
        self._first_count = 0
        self._started = time.perf_counter()
        self._prefill_s = self._ttft_s = self._decode_s = 0.0
        self.reason: FinishReason | None = None
        """Why it ended; None while it goes on."""

    @property
    def text(self) -> str:
        """What was let out so far."""
        return "".join(self._text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids so far, the one that ended the text included."""
        return tuple(self._ids)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of these ids; None unless the request asks for them."""
        return tuple(self._logprobs) if self._params.logprobs is not None else None

    @property
    def drafted(self) -> tuple[int, int]:
        """Proposed and accepted so far, as `usage` counts them."""
        return self._proposed, self._accepted

    def start(self) -> None:
        """Start the clock: the prefill begins."""
        self._started = time.perf_counter()

    def prefilled(self) -> None:
        """The prefill is over."""
        self._prefill_s = time.perf_counter() - self._started

    def absorb(self, step: RowStep) -> Chunk:
        """Take over one step's ids up to the first that ends the text.

        Args:
            step: of this row.

        Returns:
            What it adds; with a finish reason where it is the last.

        Raises:
            NonFiniteError: the target's logits were not finite; the step is named.
        """
        if not step.finite:
            raise NonFiniteError(
                f"step {self._steps}, position {self._prompt_tokens + len(self._ids)}: the target's logits "
                "are not finite; nothing was sampled from them"
            )
        self._steps += 1
        pieces, kept = [], 0
        for index in step.tokens:
            kept += 1
            piece, self.reason = self._push(index)
            pieces.append(piece)
            if self.reason is not None:
                break
        cut = self.reason == "stop"
        self._proposed += min(step.proposed, kept) if cut else step.proposed
        self._accepted += min(step.accepted, kept)
        now = time.perf_counter() - self._started
        if self._first_count == 0:
            self._ttft_s, self._first_count = now, len(self._ids)
        self._decode_s = now - self._ttft_s
        return self._chunk("".join(pieces), step.tokens[:kept], step.logprobs[:kept])

    def cancel(self) -> Chunk:
        """End early and return the text still held back; what was decoded stays."""
        if self.reason is not None:
            return Chunk(text="", token_ids=(), finish_reason=self.reason)
        self.reason = "cancelled"
        return self._chunk(self._tail()[0], ())

    def usage(self) -> Usage:
        """Counts so far."""
        completed = len(self._ids)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completed,
            total_tokens=self._prompt_tokens + completed,
            draft_proposed=self._proposed,
            draft_accepted=self._accepted,
            accept_rate=self._accepted / self._proposed if self._proposed else None,
        )

    def timings(self) -> Timings:
        """Times so far."""
        completed, steps = len(self._ids), self._steps
        rest = completed - self._first_count
        return Timings(
            prefill_s=self._prefill_s,
            ttft_s=self._ttft_s,
            decode_s=self._decode_s,
            decode_tokens_per_s=rest / self._decode_s if rest and self._decode_s else None,
            steps=steps,
            tokens_per_step=completed / steps if steps else None,
        )

    def _push(self, index: int) -> tuple[str, FinishReason | None]:
        """Add one id; the text it lets out, and why the reply ends with it if it does."""
        self._ids.append(index)
        at_eos = index in self._tokenizer.eos_ids and not self._params.ignore_eos
        if at_eos or index in self._params.stop_token_ids:
            return self._tail()[0], "stop"
        piece, stopped = self._matcher.push(self._decoder.push(index))
        if stopped:
            return piece, "stop"
        if len(self._ids) == self._count:
            tail, stopped = self._tail()
            return piece + tail, "stop" if stopped else "length"
        return piece, None

    def _tail(self) -> tuple[str, bool]:
        """The text held back for a character or a stop string that did not come, and whether it completes one."""
        piece, stopped = self._matcher.push(self._decoder.flush())
        return (piece, True) if stopped else (piece + self._matcher.flush(), False)

    def _chunk(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> Chunk:
        self._text.append(text)
        self._logprobs.extend(logprobs)
        asked = logprobs if self._params.logprobs is not None else None
        return Chunk(text=text, token_ids=token_ids, finish_reason=self.reason, logprobs=asked)
