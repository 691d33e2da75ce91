"""Ollama's answers: one object, or a line of JSON for every piece."""

import datetime
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.errors import as_api_error
from posttrainllm.adapters.serve.formats import Format
from posttrainllm.adapters.serve.pieces import Piece, PieceCutter
from posttrainllm.adapters.serve.prepare import Work
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.submission import Submission
from posttrainllm.adapters.serve.totals import totals
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["OllamaChat", "OllamaGenerate", "loaded", "ollama_lines", "ollama_whole"]


class OllamaChat(Format):
    """Of POST /api/chat."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before the first text: nothing."""
        return None

    def chunk(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """One line of a stream."""
        return {**self.whole(pieces), "done": False}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer, but for its counts."""
        return {"model": self.model, "created_at": _now(), **self._said("".join(piece.text for piece in pieces))}

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


class OllamaGenerate(OllamaChat):
    """Of POST /api/generate."""

    def _said(self, text: str) -> dict[str, Any]:
        return {"response": text}


async def ollama_whole(submission: Submission, work: Work, shape: Format) -> dict[str, Any]:
    """Wait for the reply.

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
    pieces: list[Piece] = []
    async for event in submission.updates():
        assert event is not None, "no beat was asked for"
        pieces += cutter.take(*event)
    return {**shape.whole(pieces), **_end(work, cutter, pieces)}


async def ollama_lines(submission: Submission, work: Work, shape: Format) -> AsyncIterator[str]:
    """The same as lines of JSON.

    Args:
        submission: under way.
        work: what was asked for.
        shape: of the endpoint.

    Yields:
        Lines; the last one has `done`, counts and times, or is an error.
    """
    cutter = PieceCutter(work, shape.tokenizer)
    try:
        async for event in submission.updates():
            assert event is not None, "no beat was asked for"
            pieces = cutter.take(*event)
            if any(piece.text for piece in pieces):
                yield _line(shape.chunk(pieces))
            if cutter.outcomes:
                yield _line({**shape.whole([]), **_end(work, cutter, pieces)})
    except Exception as error:
        if not isinstance(error, PosttrainllmError):
            LOGGER.exception("a stream ends with an error of this server")
        yield _line({"error": str(as_api_error(error))})


def loaded(shape: type[OllamaChat], settings: ServeSettings) -> dict[str, Any]:
    """The answer to a request for nothing, which asks for the model to be loaded: it is.

    Args:
        shape: of the endpoint.
        settings: the server's.

    Returns:
        The body.
    """
    empty = shape(request_id="", created=0, model=settings.name, fingerprint=str, tokenizer=None)  # type: ignore[arg-type] # no ids are read
    return {**empty.whole([]), "done": True, "done_reason": "load"}


def _end(work: Work, cutter: PieceCutter, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What the last object adds; durations are in nanoseconds."""
    end = totals(work, cutter.outcomes)
    usage, timings = end["usage"], end["timings"]
    decoding = timings["ttft_s"] - timings["prefill_s"] + timings["decode_s"]
    seconds = {
        "total_duration": timings["queue_s"] + timings["prefill_s"] + decoding,
        "load_duration": 0.0,
        "prompt_eval_duration": timings["prefill_s"],
        "eval_duration": decoding,
    }
    return {
        "done": True,
        "done_reason": pieces[-1].finish_reason,
        **{name: round(1e9 * value) for name, value in seconds.items()},
        "prompt_eval_count": usage["prompt_tokens"],
        "eval_count": usage["completion_tokens"],
        "usage": usage,
        "speculative": end["speculative"],
    }


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
