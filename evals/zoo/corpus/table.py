"""The committed list of what the corpus is made of: `packages.csv`, one pinned and audited archive a line."""

import csv
from pathlib import Path

import attrs
import click

from posttrainllm.evals.zoo.corpus.licences import unknown_licences

__all__ = ["Package", "default_table", "read_table"]

_COLUMNS = ("role", "source", "package", "version", "file", "sha256", "licence", "licence_files", "exclude", "audit")
_ROLES = ("train", "heldout")
_SOURCES = ("pypi", "debian")


@attrs.frozen(kw_only=True)
class Package:
    """One line of the table."""

    role: str
    """`train` or `heldout`: a package is held out whole or not at all."""
    source: str
    """`pypi` or `debian`: whose client brings it."""
    package: str
    version: str
    file: str
    """Name of the archive."""
    sha256: str
    """Of the archive, 64 hexadecimal digits."""
    licence: str
    """SPDX expression, of permissive licences alone."""
    licence_files: tuple[str, ...]
    """Paths in the archive, below its one top folder: what was read."""
    exclude: tuple[str, ...]
    """Patterns of paths that are left out: code of somebody else."""
    audit: str
    """How the licence was found, in a few words."""


def default_table() -> Path:
    """Say where the committed table is.

    Returns:
        Its path.
    """
    return Path(__file__).parent / "packages.csv"


def read_table(path: Path) -> list[Package]:
    """Read and check the table.

    Args:
        path: a CSV file with the columns of `Package`.

    Returns:
        Its packages, sorted by source and name.

    Raises:
        click.ClickException: a column is missing, a value is none of the allowed ones, a licence is not on the list, or
            a package stands there twice.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise click.ClickException(f"cannot read the list of packages {path}: {reason}") from error
    if tuple(reader.fieldnames or ()) != _COLUMNS:
        got = ",".join(reader.fieldnames or ())
        raise click.ClickException(f"{path} has the columns {got}, expected {','.join(_COLUMNS)}")
    packages = [_checked(line, f"{path} line {number}") for number, line in enumerate(lines, 2)]
    names = set()
    for package in packages:
        if package.package.lower() in names:
            raise click.ClickException(f"{path} lists {package.package} twice")
        names.add(package.package.lower())
    return sorted(packages, key=lambda package: (package.source, package.package.lower()))


def _checked(line: dict[str, str], where: str) -> Package:
    if None in line.values() or None in line:
        raise click.ClickException(f"{where} does not have {len(_COLUMNS)} values")
    for column, allowed in (("role", _ROLES), ("source", _SOURCES)):
        if line[column] not in allowed:
            raise click.ClickException(f"{where}: {column} is {line[column]!r}, expected one of {', '.join(allowed)}")
    if "/" in line["file"] or not line["file"]:
        raise click.ClickException(f"{where}: file is {line['file']!r}, expected the name of an archive")
    if len(line["sha256"]) != 64 or set(line["sha256"]) - set("0123456789abcdef"):
        raise click.ClickException(f"{where}: sha256 is {line['sha256']!r}, expected 64 hexadecimal digits")
    if unknown := unknown_licences(line["licence"]):
        raise click.ClickException(
            f"{where}: {line['package']} is under {' and '.join(unknown)}, not on the list of permissive licences"
        )
    if not line["licence_files"].split():
        raise click.ClickException(f"{where}: {line['package']} names no licence file")
    return Package(
        role=line["role"], source=line["source"], package=line["package"], version=line["version"], file=line["file"],
        sha256=line["sha256"], licence=line["licence"], licence_files=tuple(line["licence_files"].split()),
        exclude=tuple(line["exclude"].split()), audit=line["audit"],
    )  # fmt: skip
