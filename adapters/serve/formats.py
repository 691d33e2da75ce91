"""The two shapes of answers: chat completions and completions, whole or in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.serve.logprobs import chat_logprobs, completion_logprobs
from posttrainllm.adapters.serve.pieces import Piece

__all__ = ["ChatFormat", "CompletionFormat", "Format"]


@attrs.frozen(kw_only=True)
class Format(ABC):
    """How an endpoint writes what it answers."""

    request_id: str
    created: int
    model: str
    fingerprint: Callable[[], str]
    tokenizer: Tokenizer

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first text; None for nothing."""

    @abstractmethod
    def chunk(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """One object of a stream."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer, every choice in one piece."""

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint(),
            "choices": choices,
        }


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first text."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._object("chat.completion.chunk", [choice])

    def chunk(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """One object of a stream."""
        choices = [
            {"index": piece.index, "delta": {"content": piece.text} if piece.text else {}, **self._rest(piece)}
            for piece in pieces
        ]
        return self._object("chat.completion.chunk", choices)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer."""
        choices = [
            {
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                **self._rest(piece),
            }
            for piece in pieces
        ]
        return self._object("chat.completion", choices)

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if piece.logprobs is None else chat_logprobs(piece.logprobs, self.tokenizer)
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}


class CompletionFormat(Format):
    """text_completion, the same for a stream."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first text."""
        return None

    def chunk(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """One object of a stream."""
        choices = [{"index": piece.index, "text": piece.text, **self._rest(piece)} for piece in pieces]
        return self._object("text_completion", choices)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer."""
        return self.chunk(pieces)

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = completion_logprobs(piece.logprobs, self.tokenizer, offsets=piece.offsets, first=piece.first)
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}
