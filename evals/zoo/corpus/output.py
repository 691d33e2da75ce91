"""The folder that a corpus is: shards of JSON lines, what is held out, the licences, the manifest."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from posttrainllm.evals.zoo.corpus.collect import Collected, Document

__all__ = ["MANIFEST", "check_folder", "hash_of_files", "licences_page", "totals", "write_folder"]

MANIFEST = "MANIFEST.json"
HELD_OUT, LICENCES = "heldout.jsonl", "LICENCES.md"
_SHARD = 32_000_000  # bytes, about


def write_folder(
    out: Path, training: Iterable[Document], held_out: Iterable[Document], licences: str, facts: dict[str, Any]
) -> str:
    """Write a corpus.

    Args:
        out: the folder; made where it is missing, and what an earlier build left in it is replaced.
        training: documents in any order.
        held_out: the same.
        licences: the page that goes with them.
        facts: what the manifest says besides the files and their hashes.

    Returns:
        `corpus_sha256`: 64 hexadecimal digits over all files but the manifest.

    Raises:
        click.ClickException: the folder cannot be written, or holds something else.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _clear(out)
        hashes = {name: _write(out / name, lines) for name, lines in _shards(_in_order(training))}
        hashes[HELD_OUT] = _write(out / HELD_OUT, map(_line, _in_order(held_out)))
        hashes[LICENCES] = _write(out / LICENCES, [licences.encode()])
        corpus_sha256 = hash_of_files(hashes)
        manifest = {**facts, "corpus_sha256": corpus_sha256, "files": dict(sorted(hashes.items()))}
        (out / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write the corpus to {out}: {error.strerror or error}") from error
    return corpus_sha256


def check_folder(folder: Path) -> dict[str, Any]:
    """Read a corpus's manifest and check every file against it.

    Args:
        folder: of a corpus.

    Returns:
        The manifest.

    Raises:
        click.ClickException: a file is missing or is not the one that the manifest names.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
        for name, expected in manifest["files"].items():
            with (folder / name).open("rb") as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
            if got != expected:
                raise click.ClickException(f"{folder / name} has the sha256 {got}, expected {expected}")
        if (got := hash_of_files(manifest["files"])) != manifest["corpus_sha256"]:
            raise click.ClickException(f"{folder}: the files hash to {got}, expected {manifest['corpus_sha256']}")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise click.ClickException(f"{folder} is not a whole corpus: {error!r}") from error
    return manifest


def hash_of_files(hashes: dict[str, str]) -> str:
    """Hash file names with their hashes, as `sha256sum` prints them.

    Args:
        hashes: name -> 64 hexadecimal digits.

    Returns:
        64 hexadecimal digits.
    """
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def licences_page(packages: Sequence[Collected]) -> str:
    """Write the page that has to go with the text: who it is from, and the licences in full.

    Args:
        packages: what was collected, held out or not.

    Returns:
        Markdown.
    """
    lines = [
        "# Licences of the corpus",
        "",
        "| package | version | source | licence | how it was audited |",
        "|---|---|---|---|---|",
    ]
    texts: dict[str, list[str]] = {}
    for collected in sorted(packages, key=lambda collected: collected.package.package.lower()):
        package = collected.package
        lines.append(
            f"| {package.package} | {package.version} | {package.source} | {package.licence} | {package.audit} |"
        )
        texts.setdefault(collected.licence_text.strip().replace("\r\n", "\n"), []).append(package.package)
    for text, names in texts.items():
        lines += ["", f"## {', '.join(names)}", "", "````text", text, "````"]
    return "\n".join(lines) + "\n"


def totals(documents: Iterable[Document]) -> dict[str, dict[str, int]]:
    """Count what there is of each kind.

    Args:
        documents: any.

    Returns:
        Kind -> documents and characters.
    """
    count, characters = Counter[str](), Counter[str]()
    for document in documents:
        count[document.kind] += 1
        characters[document.kind] += len(document.text)
    return {kind: {"characters": characters[kind], "documents": count[kind]} for kind in sorted(count)}


def _in_order(documents: Iterable[Document]) -> list[Document]:
    """Order by the hash of the text: as good as random, so that any prefix is a fair mixture."""
    return sorted(documents, key=lambda document: document.key)


def _line(document: Document) -> bytes:
    return json.dumps(attrs.asdict(document), ensure_ascii=False, sort_keys=True).encode() + b"\n"


def _shards(documents: Iterable[Document]) -> Iterator[tuple[str, list[bytes]]]:
    lines: list[bytes] = []
    size = number = 0
    for document in documents:
        line = _line(document)
        if lines and size + len(line) > _SHARD:
            yield f"train-{number:05d}.jsonl", lines
            lines, size, number = [], 0, number + 1
        lines.append(line)
        size += len(line)
    yield f"train-{number:05d}.jsonl", lines


def _write(path: Path, lines: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for line in lines:
            digest.update(line)
            file.write(line)
    return digest.hexdigest()


def _clear(out: Path) -> None:
    own = [path for path in out.iterdir() if path.name in (MANIFEST, HELD_OUT, LICENCES) or path.match("train-*.jsonl")]
    if others := sorted(path.name for path in out.iterdir() if path not in own):
        raise click.ClickException(f"{out} holds {others[0]}, which is not of a corpus; name another folder")
    for path in own:
        path.unlink()
