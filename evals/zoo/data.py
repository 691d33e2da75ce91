"""The corpus as text and as ids: the only place that reads what `posttrainllm zoo corpus` writes."""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

__all__ = ["Corpus", "HeldOut", "held_out_ids", "read_corpus", "training_ids"]

_DOCUMENTS = 1024  # encoded at once: enough for every core


@attrs.frozen(kw_only=True)
class Corpus:
    """A folder that `posttrainllm zoo corpus` wrote."""

    folder: Path
    sha256: str
    """Of all of it."""
    files: tuple[Path, ...]
    """train-*.jsonl, in order."""

    def training_texts(self, kind: str | None = None) -> Iterator[str]:
        """Every document to train on, in the folder's fixed order.

        Args:
            kind: "code" or "prose" alone; None for both.
        """
        for file in self.files:
            for document in _documents(file):
                if kind is None or document.get("kind") == kind:
                    yield document["text"]

    def held_out_texts(self, most_characters: int | None = None) -> dict[str, list[str]]:
        """Documents by source, such as "networkx code".

        Args:
            most_characters: of each source, from its beginning; None for all.

        Returns:
            The texts; the last of a source may be cut.
        """
        found: dict[str, list[str]] = {}
        lengths: dict[str, int] = {}
        for document in _documents(self.folder / "heldout.jsonl"):
            source, text = f"{document['package']} {document['kind']}", document["text"]
            left = len(text) if most_characters is None else most_characters - lengths.get(source, 0)
            if left > 0:
                found.setdefault(source, []).append(text[:left])
                lengths[source] = lengths.get(source, 0) + len(text[:left])
        return dict(sorted(found.items()))


@attrs.frozen(kw_only=True, eq=False)
class HeldOut:
    """One held-out source."""

    name: str
    """Such as "networkx code"."""
    ids: "np.ndarray[Any, Any]"
    """uint16[N], or uint32 where the vocabulary is larger: the end of text, then every document with it behind."""
    characters: int


def read_corpus(folder: Path) -> Corpus:
    """Look at a corpus.

    Args:
        folder: of `posttrainllm zoo corpus`.

    Returns:
        What it is; no text is read.

    Raises:
        click.ClickException: it is no such folder.
    """
    manifest = folder / "MANIFEST.json"
    try:
        sha256 = json.loads(manifest.read_text(encoding="utf-8"))["corpus_sha256"]
    except (FileNotFoundError, NotADirectoryError):
        raise click.ClickException(f"{folder}: got no MANIFEST.json, expected a folder of `zoo corpus`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{manifest}: cannot be read: {type(error).__name__}: {error}") from None
    files = tuple(sorted(folder.glob("train-*.jsonl")))
    if not files or not (folder / "heldout.jsonl").is_file():
        got = f"{len(files)} files train-*.jsonl"
        raise click.ClickException(f"{folder}: got {got}, expected one at least and heldout.jsonl")
    return Corpus(folder=folder, sha256=str(sha256), files=files)


def training_ids(
    corpus: Corpus, tokenizer: "Tokenizer", tokenizer_digest: str, kind: str | None = None
) -> "np.ndarray[Any, Any]":
    """Ids of the training text, kept in the corpus's folder for the next run where that can be written.

    Args:
        corpus: the text.
        tokenizer: of 65,536 ids at most.
        tokenizer_digest: what tells tokenizers apart.
        kind: "code" or "prose" alone; None for both.

    Returns:
        uint16[N]: the end of text, then every document with the end of text behind it.

    Raises:
        click.ClickException: a file holds something else.
    """
    import numpy as np

    key = hashlib.sha256(f"{corpus.sha256} {tokenizer_digest} {kind or ''}".encode()).hexdigest()[:16]
    file = corpus.folder / f"tokens-{key}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # none, or one that was cut off: it is made again
        kept: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
        return kept
    ids = _encode(corpus.training_texts(kind), tokenizer, 0)
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")  # two runs may make them at once
    try:
        with unfinished.open("wb") as stream:
            np.save(stream, ids)
        unfinished.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return ids


def held_out_ids(
    corpus: Corpus, tokenizer: "Tokenizer", most_characters: int | None = None, *, end_of_text: int = 0
) -> list[HeldOut]:
    """Ids of every held-out source.

    Args:
        corpus: the text.
        tokenizer: any.
        most_characters: of each source; None for all.
        end_of_text: its id.

    Returns:
        The sources by name.

    Raises:
        click.ClickException: heldout.jsonl holds something else.
    """
    return [
        HeldOut(name=name, ids=_encode(texts, tokenizer, end_of_text), characters=sum(map(len, texts)))
        for name, texts in corpus.held_out_texts(most_characters).items()
    ]


def _encode(texts: Iterable[str], tokenizer: "Tokenizer", end_of_text: int) -> "np.ndarray[Any, Any]":
    import numpy as np

    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    parts = [np.array([end_of_text], dtype)]
    documents = iter(texts)
    while batch := list(itertools.islice(documents, _DOCUMENTS)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end_of_text], dtype))
    return np.concatenate(parts)


def _documents(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                document = json.loads(line)
                if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                    raise click.ClickException(f"{file}:{number}: expected an object with a text")
                yield document
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{file}: cannot be read: {type(error).__name__}: {error}") from None
