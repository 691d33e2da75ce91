"""Whole answers and streams, from the updates of a submission."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.errors import as_api_error
from posttrainllm.adapters.serve.formats import Format
from posttrainllm.adapters.serve.pieces import Piece, PieceCutter, join
from posttrainllm.adapters.serve.prepare import Work
from posttrainllm.adapters.serve.submission import Submission
from posttrainllm.adapters.serve.totals import totals
from posttrainllm.kernel.errors import PosttrainllmError

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
        ApiError: as `Submission.updates`.
    """
    cutter = PieceCutter(work, shape.tokenizer)
    pieces: list[list[Piece]] = [[] for _ in work.choices]
    async for event in submission.updates():
        assert event is not None, "no beat was asked for"
        pieces[event[0]] += cutter.take(*event)
    return {**shape.whole([join(parts) for parts in pieces]), **totals(work, cutter.outcomes)}


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
    cutter = PieceCutter(work, shape.tokenizer)
    try:
        for index in range(len(work.choices)):
            opening = shape.opening(index)
            if opening is not None:
                yield _event(opening)
        async for event in submission.updates(beat=_BEAT_S):
            if event is None:
                yield ": keep-alive\n\n"
                continue
            objects = [shape.chunk([piece]) for piece in cutter.take(*event)]
            if len(cutter.outcomes) == len(work.choices):
                end = totals(work, cutter.outcomes)
                if work.include_usage:
                    objects.append({**shape.chunk([]), **end})
                else:
                    objects[-1] |= end
            for entry in objects:
                yield _event(entry)
    except Exception as error:
        if not isinstance(error, PosttrainllmError):
            LOGGER.exception("a stream ends with an error of this server")
        yield _event(as_api_error(error).body())
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    """One event. What some readers of lines take for the end of one is escaped."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {line.translate(_LINE_ENDS)}\n\n"


class EventStream(StreamingResponse):
    """A stream that is finished with however it ends, also when it never began.

    Args:
        lines: its events.
        finish: called once, at the end.
        headers: of the response.
        media_type: of the lines.
    """

    def __init__(
        self, lines: AsyncIterator[str], finish: Callable[[], None], headers: dict[str, str], media_type: str
    ) -> None:
        super().__init__(lines, media_type=media_type, headers={"cache-control": "no-cache", **headers})
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._finish()
