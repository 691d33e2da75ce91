"""One compressed file of a corpus, to send it to another machine."""

import io
import json
import lzma
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import click

from posttrainllm.evals.zoo.corpus.collect import Document
from posttrainllm.evals.zoo.corpus.output import MANIFEST, check_folder, write_folder

__all__ = ["pack", "unpack"]

_MAGIC = "posttrainllm corpus 1"
_LICENCES, _HELD_OUT = "LICENCES.md", "heldout.jsonl"
# text: four bits of the byte before choose the model, and no alignment; the dictionary spans a whole half
_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28,
        "lc": 4, "lp": 0, "pb": 0, "nice_len": 273, "mf": lzma.MF_BT4, "depth": 512,
    }
]  # fmt: skip
_MEMORY = 1 << 30  # bytes that unpacking may take


def pack(folder: Path, file: Path) -> int:
    """Compress a corpus into one file, the same bytes every time (for one version of liblzma).

    Args:
        folder: of a corpus; checked first.
        file: what is written. Two halves are compressed at a time, minutes for 300 MB.

    Returns:
        Its size in bytes.

    Raises:
        click.ClickException: the folder is not a whole corpus, or the file cannot be written.
    """
    manifest = check_folder(folder)
    content = b"".join(_stream(folder, manifest))
    middle = content.find(b"\n", len(content) // 2) + 1
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(2) as pool, tempfile.TemporaryDirectory(dir=file.parent) as own:
            draft = Path(own) / "packed"
            with draft.open("wb") as packed:
                for half in pool.map(_compressed, (content[:middle], content[middle:])):
                    packed.write(half)
            draft.replace(file)
        return file.stat().st_size
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror or error}") from error


def unpack(file: Path, folder: Path) -> str:
    """Restore the folder that was packed, byte for byte.

    Args:
        file: from `pack`.
        folder: where the corpus goes.

    Returns:
        `corpus_sha256`, which was checked.

    Raises:
        click.ClickException: the file is damaged or is none of ours, or the folder cannot be written.
    """
    try:
        with file.open("rb") as packed:
            content = io.BytesIO(lzma.decompress(packed.read(), memlimit=_MEMORY))
        header = json.loads(content.readline())
        if header["magic"] != _MAGIC:
            raise ValueError(f"it says {header['magic']}, expected {_MAGIC}")
        manifest, licences = header["manifest"], header["licences"]
        training = list(_documents(content, header["training"]))
        held_out = list(_documents(content, header["held_out"]))
        if rest := content.read(1):
            raise ValueError(f"{rest!r} stands behind the last document")
        facts = {name: value for name, value in manifest.items() if name not in ("corpus_sha256", "files")}
        expected = manifest["corpus_sha256"]
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror or error}") from error
    except (lzma.LZMAError, ValueError, KeyError, TypeError, EOFError) as error:
        raise click.ClickException(f"{file} is damaged, or no packed corpus: {error}") from error
    if (got := write_folder(folder, training, held_out, licences, facts)) != expected:
        (folder / MANIFEST).unlink()  # so that nobody takes it for a whole one
        raise click.ClickException(f"{file} unpacks to a corpus of the sha256 {got}, expected {expected}")
    return got


def _stream(folder: Path, manifest: dict[str, Any]) -> Iterator[bytes]:
    """Say the corpus in an order that compresses: package by package, texts as they are and not as JSON."""
    names = sorted(name for name in manifest["files"] if name.startswith("train-"))
    training = [document for name in names for document in _read(folder / name)]
    held_out = list(_read(folder / _HELD_OUT))
    header = {
        "held_out": len(held_out), "licences": (folder / _LICENCES).read_bytes().decode(), "magic": _MAGIC,
        "manifest": manifest, "training": len(training),
    }  # fmt: skip
    yield json.dumps(header, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    for documents in (training, held_out):
        last = ["", "", ""]
        for document in sorted(documents, key=lambda document: (document.kind, document.package, document.path)):
            text = document.text.encode()
            about = [document.kind, document.package, document.version]
            fields = [document.path, len(text), *(about if about != last else [])]
            yield json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" + text + b"\n"
            last = about


def _documents(content: BinaryIO, count: int) -> Iterator[Document]:
    about: list[str] = []
    for _ in range(count):
        path, size, *own = json.loads(content.readline())
        about = own or about
        text = content.read(size)
        if len(text) != size or content.read(1) != b"\n":
            raise ValueError("a document is cut short")
        yield Document(kind=about[0], package=about[1], version=about[2], path=path, text=text.decode())


def _read(path: Path) -> Iterator[Document]:
    with path.open("rb") as file:
        for line in file:
            yield Document(**json.loads(line))


def _compressed(content: bytes) -> bytes:
    return lzma.compress(content, format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=_FILTERS)
