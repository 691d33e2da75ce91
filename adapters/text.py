"""Ids to text while they arrive: whole characters only, and no part of a stop string."""

from collections.abc import Sequence

from posttrainllm.adapters.loading.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopMatcher"]


class IncrementalDecoder:
    """Turns a growing list of ids into text pieces whose concatenation is the text of the whole.

    Decoding ids one by one would drop spaces and split characters, so a piece is the difference between two decodings
    that start at the same id. A piece that would end in a character still incomplete is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # where both decodings start: far enough back to give the next piece its left context
        self._read = 0  # ids whose text is out

    def push(self, index: int) -> str:
        """Add one id and return the text that has become certain."""
        self._ids.append(index)
        piece = self._pending()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return piece

    def flush(self) -> str:
        """The text still held back; bytes that never became a character are U+FFFD."""
        piece = self._pending()
        self._start = self._read = len(self._ids)
        return piece

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


class StopMatcher:
    """Cuts a stream of text at the first of several stop strings.

    Args:
        stops: strings that end the text; none of them, nor a part of one that matched, is let out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Add text and return what may go out, and whether a stop string was completed."""
        text = self._held + piece
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back as the beginning of a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
