"""From packages to documents: what is kept of each, and why the rest is not."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import attrs
import click

from posttrainllm.evals.zoo.corpus.archives import read_files
from posttrainllm.evals.zoo.corpus.duplicates import Windows, windows_of
from posttrainllm.evals.zoo.corpus.filters import SUFFIXES, kind_of, reason_against
from posttrainllm.evals.zoo.corpus.licences import lacking_licences, other_licence
from posttrainllm.evals.zoo.corpus.readers import reader_for
from posttrainllm.evals.zoo.corpus.table import Package

__all__ = ["Collected", "Document", "collect"]


@attrs.frozen(kw_only=True)
class Document:
    """One file that is kept."""

    package: str
    version: str
    path: str
    kind: str
    """`code` or `prose`."""
    text: str

    @property
    def key(self) -> bytes:
        """The SHA-256 of the text: what orders documents, and tells the same ones."""
        return hashlib.sha256(self.text.encode()).digest()


@attrs.frozen(kw_only=True)
class Collected:
    """What is kept of one package."""

    package: Package
    documents: tuple[Document, ...]
    licence_text: str
    left_out: dict[str, int]
    """Reason -> characters."""


def collect(packages: Iterable[tuple[Package, Path]], *, cap: int) -> Iterator[Collected]:
    """Choose the documents of packages.

    Args:
        packages: with their archives; those held out come first whatever their place here.
        cap: characters that are kept of one package for training, at most: prose before code, and tests last.

    Returns:
        One record a package, as it is read.

    Raises:
        click.ClickException: an archive is damaged, or its licence is not the one that the table says.
    """
    windows, seen = Windows(), set[bytes]()
    for package, path in sorted(packages, key=lambda pair: pair[0].role != "heldout"):
        files = read_files(path, (*SUFFIXES, *reader_for(package).names), package.licence_files)
        licence_text = _licence_text(package, files)
        documents, left_out = _documents(package, files, windows)
        kept = []
        room = cap if package.role == "train" else None
        for document in documents:
            key, its_windows = document.key, windows_of(document.text)
            reason = "duplicate" if key in seen else None
            if package.role == "train":
                reason = reason or windows.reason_against(its_windows)
            if reason is None and room is not None and len(document.text) > room:
                reason = "cap"
            if reason is not None:
                left_out[reason] += len(document.text)
                continue
            seen.add(key)
            if room is not None:
                room -= len(document.text)
                windows.keep(its_windows)
            kept.append(document)
        yield Collected(
            package=package, documents=tuple(kept), licence_text=licence_text, left_out=dict(sorted(left_out.items()))
        )


def _licence_text(package: Package, files: dict[str, bytes]) -> str:
    if missing := [name for name in package.licence_files if name not in files]:
        raise click.ClickException(f"{package.file} has no licence file {missing[0]}")
    text = "\n".join(files[name].decode("utf-8", "replace") for name in package.licence_files)
    if lacking := lacking_licences(package.licence, text):
        named = ", ".join(package.licence_files)
        raise click.ClickException(f"{package.file} is listed under {' and '.join(lacking)}, which {named} does not bear out")
    return text


def _documents(package: Package, files: dict[str, bytes], windows: Windows) -> tuple[list[Document], Counter[str]]:
    """Take what is worth reading, in the order in which it is kept; note everything of a package that is held out."""
    documents, left_out = [], Counter[str]()
    reader = reader_for(package)
    for path, content in files.items():
        kind = reader.kind(path) or kind_of(path, package.exclude)
        text = None
        try:
            text = content.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            reason: str | None = "not UTF-8"
        else:
            if package.role == "heldout" and path not in package.licence_files:
                windows.hold_out(windows_of(text))
            reason = "path" if kind is None else None
        if text is None or kind is None or reason is not None:
            left_out[reason or "path"] += len(content)
            continue
        for part, piece in reader.pieces(path, text):
            reason = reason_against(piece, kind) or ("licence" if other_licence(piece) else None)
            if reason is not None:
                left_out[reason] += len(piece)
            else:
                documents.append(
                    Document(package=package.package, version=package.version, path=part, kind=kind, text=piece)
                )
    return sorted(documents, key=_turn), left_out


def _turn(document: Document) -> tuple[int, bytes]:
    folders = PurePosixPath(document.path)
    tests = any(part in ("test", "tests", "testing", "conftest.py") for part in folders.parts) or folders.name.startswith("test_")
    return (0 if document.kind == "prose" else 1 + tests), document.key
