"""The text files of an archive: a source distribution, a wheel or a Debian package."""

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click

__all__ = ["read_files"]

_LARGEST = 16_000_000  # bytes of a file that is looked at: past that it is data
_AR_MAGIC, _AR_HEADER = b"!<arch>\n", 60


def read_files(path: Path, suffixes: tuple[str, ...], names: tuple[str, ...]) -> dict[str, bytes]:
    """Read the files of an archive that have one of some endings.

    Args:
        path: `.tar.gz`, `.tar.bz2`, `.tar.xz`, `.zip`, `.whl` or `.deb`.
        suffixes: endings that are read, in lower case; of a `.gz` file inside the ending before it counts.
        names: paths that are read whatever their ending.

    Returns:
        Path, without the one top folder of a source distribution -> content, sorted by path. Files over 16 MB are left
        out unless they are among the names.

    Raises:
        click.ClickException: the archive is damaged or of another kind.
    """
    found: dict[str, bytes] = {}
    try:
        for name, size, content in _members(path):
            wanted = name in names or (size <= _LARGEST and name.lower().removesuffix(".gz").endswith(suffixes))
            if wanted and name not in found:
                found[name] = content()
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, ValueError) as error:
        raise click.ClickException(f"cannot read the archive {path.name}: {error}") from error
    return dict(sorted(found.items()))


def _members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            tops = {name.split("/")[0] for name in names}
            strip = path.suffix == ".zip" and len(tops) == 1
            for info in archive.infolist():
                name = info.filename.partition("/")[2] if strip else info.filename
                if name and not info.is_dir():
                    yield name, info.file_size, partial(archive.read, info)
    elif path.suffix == ".deb":
        with tarfile.open(fileobj=io.BytesIO(_data_of_deb(path.read_bytes()))) as archive:
            for member in archive:
                if member.isfile():
                    yield member.name.removeprefix("./"), member.size, partial(_unpacked, archive, member)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile():
                    yield (
                        member.name.removeprefix("./").partition("/")[2],
                        member.size,
                        partial(_unpacked, archive, member),
                    )


def _unpacked(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # it is a file
    content = file.read()
    return gzip.decompress(content) if member.name.lower().endswith(".gz") else content


def _data_of_deb(content: bytes) -> bytes:
    """Take the files' tar out of a Debian package, which is an `ar` archive: a 60-byte header before each member."""
    if not content.startswith(_AR_MAGIC):
        raise ValueError("it is not a Debian package")
    at = len(_AR_MAGIC)
    while at + _AR_HEADER <= len(content):
        header = content[at : at + _AR_HEADER]
        size = int(header[48:58])
        if header[:16].startswith(b"data.tar"):
            return content[at + _AR_HEADER : at + _AR_HEADER + size]
        at += _AR_HEADER + size + size % 2  # members start at even offsets
    raise ValueError("it holds no files")
