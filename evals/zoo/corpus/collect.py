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
from posttrainllm.evals.zoo.corpus.readers import Reader, reader_for
from posttrainllm.evals.zoo.corpus.table import Package

__all__ = ["Collected", "Document", "collect"]

_TESTS = frozenset({"test", "tests", "testing", "conftest.py"})


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


def collect(packages: Iterable[tuple[Package, Path]], *, caps: dict[str, int]) -> Iterator[Collected]:
    """Choose the documents of packages.

    Args:
        packages: with their archives; those held out come first whatever their place here.
        caps: kind -> characters that are kept of one package for training, at most; tests come last.

    Returns:
        One record a package, as it is read.

    Raises:
        click.ClickException: an archive is damaged, or its licence is not the one that the table says.
    """
    windows, seen = Windows(), set[bytes]()
    for package, path in sorted(packages, key=lambda pair: pair[0].role != "heldout"):
        reader = reader_for(package)
        files = read_files(path, (*SUFFIXES, *reader.names), package.licence_files)
        licence_text = _licence_text(package, files)
        left_out = Counter[str]()
        candidates = _candidates(package, reader, files, left_out)
        if package.role == "heldout":
            for candidate in candidates:  # all of them, whether they are kept or not
                windows.hold_out(windows_of(candidate.text))
            kept = list(_first(candidates, None, None, seen, left_out))
        else:
            kept = list(_first(candidates, caps, windows, seen, left_out))
        left = dict(sorted(left_out.items()))
        yield Collected(package=package, documents=tuple(kept), licence_text=licence_text, left_out=left)


def _licence_text(package: Package, files: dict[str, bytes]) -> str:
    if missing := [name for name in package.licence_files if name not in files]:
        raise click.ClickException(f"{package.file} has no licence file {missing[0]}")
    text = "\n".join(files[name].decode("utf-8", "replace") for name in package.licence_files)
    if lacking := lacking_licences(package.licence, text):
        named = ", ".join(package.licence_files)
        raise click.ClickException(
            f"{package.file} is listed under {' and '.join(lacking)}, which {named} does not bear out"
        )
    return text


def _candidates(package: Package, reader: Reader, files: dict[str, bytes], left_out: Counter[str]) -> list[Document]:
    """Take the files that are code or prose by their paths, in the order in which they are kept."""
    documents = []
    for path, content in files.items():
        kind = reader.kind(path) or kind_of(path, package.exclude)
        if kind is None:
            left_out["path"] += len(content)
            continue
        try:
            text = content.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            left_out["not UTF-8"] += len(content)
            continue
        for part, piece in reader.pieces(path, text):
            documents.append(
                Document(package=package.package, version=package.version, path=part, kind=kind, text=piece)
            )
    return sorted(documents, key=_turn)


def _first(
    candidates: list[Document],
    caps: dict[str, int] | None,
    windows: Windows | None,
    seen: set[bytes],
    left_out: Counter[str],
) -> Iterator[Document]:
    """Keep what has nothing against it until the cap of its kind is full; what comes later is not even looked at."""
    used, full = Counter[str](), set[str]()
    for document in candidates:
        its_windows = set[int]()
        if document.kind in full:
            reason: str | None = "cap"
        elif (key := document.key) in seen:
            reason = "duplicate"
        else:
            reason = reason_against(document.text, document.kind) or (
                "licence" if other_licence(document.text) else None
            )
        if reason is None and windows is not None:
            its_windows = windows_of(document.text)
            reason = windows.reason_against(its_windows)
        if reason is None and caps is not None and used[document.kind] + len(document.text) > caps[document.kind]:
            full.add(document.kind)
            reason = "cap"
        if reason is not None:
            left_out[reason] += len(document.text)
            continue
        seen.add(key)
        used[document.kind] += len(document.text)
        if windows is not None:
            windows.keep(its_windows)
        yield document


def _turn(document: Document) -> tuple[bool, bytes]:
    where = PurePosixPath(document.path)
    tests = bool(_TESTS.intersection(where.parts)) or where.name.startswith("test_")
    return tests, document.key
