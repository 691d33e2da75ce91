"""One choice of one request, and what the engine's thread says of it."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.result import Chunk, Timings, TokenLogprobs, Usage

__all__ = ["Job", "Outcome", "Update"]


@attrs.frozen(kw_only=True)
class Outcome:
    """A choice at its end."""

    index: int
    """Which choice of the request."""
    usage: Usage
    timings: Timings
    cached_tokens: int
    """Of its prompt, that were not computed again."""
    queue_s: float
    """From the arrival of the request to its row."""
    speculative: dict[str, Any]
    """Whether it was drafted for, and why not: enabled, reason, draft_k, accept_rule, verdict."""


@attrs.frozen(kw_only=True)
class Update:
    """What happened to a choice. The last one has an outcome or an error."""

    chunk: Chunk | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of the prompt's own ids, None for the first; before any chunk."""
    outcome: Outcome | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return self.outcome is not None or self.error is not None


@attrs.define(eq=False, kw_only=True)
class Job:
    """One choice: a row's worth of work, checked by whoever made it."""

    request_id: str
    index: int
    """Which choice of the request."""
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    """In place of that of `params`."""
    limit: int
    """Length, prompt included, at which it ends."""
    speculate: bool
    score: bool = False
    """Whether the log probabilities of the prompt's own ids are wanted."""
    since: float
    """When the request arrived, on the clock of time.perf_counter()."""
    deliver: Callable[[Update], None]
    """Called on the engine's thread; returns at once."""
    cancelled: bool = False
    """Set from any thread, and never unset: nobody wants it any more."""
