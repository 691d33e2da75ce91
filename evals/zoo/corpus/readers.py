"""Files of a few packages whose text is not to be had by reading them as they are."""

import re
from collections.abc import Callable, Iterator

import attrs

from posttrainllm.evals.zoo.corpus.table import Package

__all__ = ["Reader", "reader_for"]

_PIECE = 60_000  # characters of a piece of a long text, about


def _whole(path: str, text: str) -> Iterator[tuple[str, str]]:
    yield path, text


def _cut(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Cut a book at blank lines."""
    piece: list[str] = []
    number = size = 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        size += len(paragraph) + 2
        if size >= _PIECE:
            yield f"{path}#{number}", "\n\n".join(piece) + "\n"
            piece, size, number = [], 0, number + 1
    if piece:
        yield f"{path}#{number}", "\n\n".join(piece) + "\n"


def _dictionary(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Make entries of WordNet's lines: synonyms and their gloss, without the offsets."""
    entries = []
    for line in text.split("\n"):
        fields, bar, gloss = line.partition(" | ")
        if bar and not line.startswith(" "):
            words = fields.split(" ")
            count = int(words[3], 16)
            names = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words[4 : 4 + 2 * count : 2]]
            entries.append(f"{', '.join(names)}: {gloss.strip()}\n")
    yield from _cut(path, "\n".join(entries))


@attrs.frozen(kw_only=True)
class Reader:
    """How one package is read."""

    names: tuple[str, ...] = ()
    """Endings of paths that are prose here, whatever their folder."""
    pieces: Callable[[str, str], Iterator[tuple[str, str]]] = _whole
    """(path, text) -> parts of it, each with a path of its own."""

    def kind(self, path: str) -> str | None:
        """Tell whether a file is one that this package is read for.

        Args:
            path: in the archive.

        Returns:
            `prose`, or None where the ordinary rules say what it is.
        """
        return "prose" if self.names and path.removesuffix(".gz").endswith(self.names) else None


_PLAIN = Reader()
_READERS = {
    "jargon-text": Reader(names=("jargon.txt",), pieces=_cut),
    "wordnet-base": Reader(names=("data.noun", "data.verb", "data.adj", "data.adv"), pieces=_dictionary),
}


def reader_for(package: Package) -> Reader:
    """Find how a package is read.

    Args:
        package: one of the table.

    Returns:
        Its reader; the ordinary one for most.
    """
    return _READERS.get(package.package, _PLAIN)
