"""The parts of a choice, as updates let them out."""

from collections.abc import Sequence

import attrs

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.result import TokenLogprobs
from posttrainllm.adapters.serve.jobs import Outcome, Update
from posttrainllm.adapters.serve.prepare import Work
from posttrainllm.adapters.text import IncrementalDecoder

__all__ = ["Piece", "PieceCutter", "join"]


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a choice: one chunk of a stream, or the whole."""

    index: int
    text: str
    offsets: tuple[int, ...] = ()
    """Characters of the choice before each id that has log probabilities; parts of a character have the same."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of its ids, None for a prompt's first; None where nobody asked."""
    first: int
    """The id that a None among them stands for."""
    finish_reason: str | None = None


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of a choice as one.

    Args:
        pieces: one or more, in order.

    Returns:
        The whole.
    """
    asked = pieces[0].logprobs is not None
    return attrs.evolve(
        pieces[0],
        text="".join(piece.text for piece in pieces),
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs or ()) if asked else None,
        offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        finish_reason=pieces[-1].finish_reason,
    )


class PieceCutter:
    """Turns updates into pieces, the echoed prompt in front.

    Args:
        work: what was asked for.
        tokenizer: the target's.
    """

    def __init__(self, work: Work, tokenizer: Tokenizer) -> None:
        self._work = work
        self._decoders = [IncrementalDecoder(tokenizer) for _ in work.choices]
        self._decoded = [0] * len(work.choices)  # characters
        self._echoed = [not work.echo] * len(work.choices)
        self.outcomes: list[Outcome] = []
        """Of the choices that have ended, in the order in which they did."""

    def take(self, index: int, update: Update) -> list[Piece]:
        """The pieces of an update; none where it lets nothing out.

        Args:
            index: of the choice.
            update: about it.

        Returns:
            Pieces in order.
        """
        chunk, pieces = update.chunk, []
        if not self._echoed[index]:
            self._echoed[index] = True
            pieces.append(self._piece(index, self._work.choices[index].echo, update.prompt_logprobs or ()))
        if chunk is not None and (chunk.text or chunk.logprobs or chunk.finish_reason is not None):
            pieces.append(self._piece(index, chunk.text, chunk.logprobs or (), chunk.finish_reason))
        if update.outcome is not None:
            self.outcomes.append(update.outcome)
        return pieces

    def _piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprobs | None], finish_reason: str | None = None
    ) -> Piece:
        choice, offsets = self._work.choices[index], []
        for entry in logprobs:
            offsets.append(self._decoded[index])
            token_id = choice.prompt[0] if entry is None else entry.token_id
            self._decoded[index] += len(self._decoders[index].push(token_id))
        return Piece(
            index=index,
            text=text,
            offsets=tuple(offsets),
            logprobs=tuple(logprobs) if self._work.params.logprobs is not None else None,
            first=choice.prompt[0],
            finish_reason=finish_reason,
        )
