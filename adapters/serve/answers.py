"""Whole answers and streams, from the updates of a submission."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from posttrainllm.adapters.result import TokenLogprobs
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.errors import as_api_error
from posttrainllm.adapters.serve.formats import Format, Piece
from posttrainllm.adapters.serve.jobs import Outcome, Update
from posttrainllm.adapters.serve.prepare import Work
from posttrainllm.adapters.serve.submission import Submission
from posttrainllm.adapters.serve.totals import totals

__all__ = ["EventStream", "events", "whole_answer"]

_BEAT_S = 5.0
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


async def whole_answer(submission: Submission, work: Work, shape: Format) -> dict[str, Any]:
    """Wait for every choice.

    Args:
        submission: under way.
        work: what was asked for.
        shape: of the endpoint.

    Returns:
        The body.

    Raises:
        Exception: as `Submission.updates`.
    """
    texts = [choice.echo for choice in work.choices]
    logprobs: list[list[TokenLogprobs | None]] = [[] for _ in work.choices]
    outcomes: dict[int, Outcome] = {}
    reasons: dict[int, str | None] = {}
    async for event in submission.updates():
        assert event is not None, "no beat was asked for"
        index, update = event
        logprobs[index] += update.prompt_logprobs or ()
        if update.chunk is not None:
            texts[index] += update.chunk.text
            logprobs[index] += update.chunk.logprobs or ()
        if update.outcome is not None and update.chunk is not None:
            outcomes[index], reasons[index] = update.outcome, update.chunk.finish_reason
    pieces = [
        Piece(
            index=index,
            text=texts[index],
            logprobs=logprobs[index] if choice.params.logprobs is not None else None,
            first=choice.prompt[0],
            finish_reason=reasons[index],
        )
        for index, choice in enumerate(work.choices)
    ]
    return {**shape.whole(pieces), **totals(work, list(outcomes.values()))}


async def events(submission: Submission, work: Work, shape: Format) -> AsyncIterator[str]:
    """The same as server-sent events; comments keep the connection alive while nothing is decoded.

    Args:
        submission: under way.
        work: what was asked for.
        shape: of the endpoint.

    Yields:
        Events, "[DONE]" the last one. The last chunk, or with `include_usage` one of its own, has `usage`,
        `speculative` and `timings`. An error that comes once the stream has begun is an event, too.
    """
    writer = _Writer(work, shape)
    try:
        for index in range(len(work.choices)):
            opening = shape.opening(index)
            if opening is not None:
                yield writer.event(opening)
        async for event in submission.updates(beat=_BEAT_S):
            if event is None:
                yield ": keep-alive\n\n"
                continue
            for line in writer.lines(*event):
                yield line
    except Exception as error:
        LOGGER.debug("a stream ends with an error: %s", error)
        yield writer.event(as_api_error(error).body())
    yield "data: [DONE]\n\n"


class _Writer:
    """What was sent of each choice."""

    def __init__(self, work: Work, shape: Format) -> None:
        self._work, self._shape = work, shape
        self._sent = [0] * len(work.choices)
        self._echoed = [not work.echo] * len(work.choices)
        self._outcomes: dict[int, Outcome] = {}

    def event(self, value: dict[str, Any]) -> str:
        """One event. What some readers of lines take for the end of one is escaped."""
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return f"data: {line.translate(_LINE_ENDS)}\n\n"

    def lines(self, index: int, update: Update) -> list[str]:
        """The events of an update; none where it lets no text out."""
        choice, pieces = self._work.choices[index], []
        if not self._echoed[index] and (update.prompt_logprobs is not None or update.chunk is not None):
            self._echoed[index] = True
            pieces.append(self._piece(index, choice.echo, update.prompt_logprobs))
        chunk = update.chunk
        if chunk is not None and (chunk.text or chunk.logprobs or chunk.finish_reason is not None):
            pieces.append(self._piece(index, chunk.text, chunk.logprobs, chunk.finish_reason))
        if update.outcome is not None:
            self._outcomes[index] = update.outcome
        objects = [self._shape.chunk([piece]) for piece in pieces]
        if len(self._outcomes) == len(self._work.choices):
            end = totals(self._work, list(self._outcomes.values()))
            if self._work.include_usage:
                objects.append({**self._shape.chunk([]), **end})
            else:
                objects[-1] |= end
        return [self.event(entry) for entry in objects]

    def _piece(
        self,
        index: int,
        text: str,
        logprobs: "list[TokenLogprobs | None] | tuple[TokenLogprobs, ...] | None",
        finish_reason: str | None = None,
    ) -> Piece:
        choice, offset = self._work.choices[index], self._sent[index]
        self._sent[index] += len(text)
        return Piece(
            index=index,
            text=text,
            offset=offset,
            logprobs=logprobs if choice.params.logprobs is not None else None,
            first=choice.prompt[0],
            finish_reason=finish_reason,
        )


class EventStream(StreamingResponse):
    """A stream that is finished with however it ends, also when it never began.

    Args:
        lines: its events.
        finish: called once, at the end.
        headers: of the response.
    """

    def __init__(self, lines: AsyncIterator[str], finish: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._finish()
