"""`posttrainllm zoo corpus`: build the text that the zoo is trained on, pack it, unpack it."""

import sys
from pathlib import Path
from typing import Any

import click

from posttrainllm.adapters.user_cache import user_cache
from posttrainllm.evals.zoo.corpus.collect import Collected, collect
from posttrainllm.evals.zoo.corpus.fetch import fetch, sha256_of
from posttrainllm.evals.zoo.corpus.output import licences_page, totals, write_folder
from posttrainllm.evals.zoo.corpus.pack import pack, unpack
from posttrainllm.evals.zoo.corpus.table import default_table, read_table

__all__ = ["build", "corpus"]

_CAPS = {"code": 2_000_000, "prose": 8_000_000}


@click.command
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The folder of the corpus."
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where archives are kept. [default: the user's cache]",
)
@click.option(
    "--table",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The list of packages. [default: the committed one]",
)
@click.option(
    "--code-cap",
    type=click.IntRange(1),
    default=_CAPS["code"],
    show_default=True,
    help="Characters of source of one package, at most.",
)
@click.option(
    "--prose-cap",
    type=click.IntRange(1),
    default=_CAPS["prose"],
    show_default=True,
    help="Characters of prose of one package, at most.",
)
@click.option(
    "--pack",
    "pack_to",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compress the corpus into this file, too.",
)
@click.option(
    "--unpack",
    "unpack_from",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Restore the corpus from this file; build nothing.",
)
def corpus(
    out: Path,
    cache: Path | None,
    table: Path | None,
    code_cap: int,
    prose_cap: int,
    pack_to: Path | None,
    unpack_from: Path | None,
) -> None:
    """Build the corpus from pinned, audited packages of PyPI and Debian.

    Every archive is checked against its hash and every licence against its text. The result has the same bytes every
    time.
    """
    if pack_to is not None and unpack_from is not None:
        raise click.UsageError("--pack and --unpack exclude each other")
    if unpack_from is not None:
        click.echo(f"corpus_sha256 {unpack(unpack_from, out)}")
        return
    cache = cache or user_cache("corpus")
    if cache is None:
        raise click.UsageError("there is no home to keep archives in; name a folder with --cache")
    caps = {"code": code_cap, "prose": prose_cap}
    click.echo(f"corpus_sha256 {build(out, cache, table or default_table(), caps=caps)}")
    if pack_to is not None:
        _say(f"packing into {pack_to}; this takes minutes")
        size = pack(out, pack_to)
        click.echo(f"packed {size:,} bytes, sha256 {sha256_of(pack_to)}")


def build(out: Path, cache: Path, table: Path, *, caps: dict[str, int]) -> str:
    """Bring the archives and write the corpus.

    Args:
        out: the folder that is written.
        cache: where archives are kept; made where it is missing.
        table: the list of packages, see `read_table`.
        caps: kind (code, prose) -> characters of one package, at most.

    Returns:
        `corpus_sha256`.

    Raises:
        click.ClickException: the table, an archive or a licence is not as it should be, or a folder cannot be written.
    """
    packages = read_table(table)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot make the folder {cache}: {error.strerror or error}") from error
    archives = []
    for number, package in enumerate(packages, 1):
        archives.append((package, fetch(package, cache)))
        _say(f"{number}/{len(packages)} archives", end="\r")
    everything = []
    for number, collected in enumerate(collect(archives, caps=caps), 1):
        everything.append(collected)
        files = len(collected.documents)
        characters = sum(len(document.text) for document in collected.documents)
        _say(f"{number}/{len(packages)} {collected.package.package}: {characters:,} characters in {files} files")
    training = [document for one in everything if one.package.role == "train" for document in one.documents]
    held_out = [document for one in everything if one.package.role == "heldout" for document in one.documents]
    facts: dict[str, Any] = {
        "caps": caps,
        "packages": [_facts(collected) for collected in sorted(everything, key=lambda c: c.package.package.lower())],
        "totals": {"heldout": totals(held_out), "train": totals(training)},
    }
    for role, of_role in facts["totals"].items():
        for kind, count in of_role.items():
            click.echo(f"{role} {kind}: {count['characters']:,} characters in {count['documents']:,} files")
    return write_folder(out, training, held_out, licences_page(everything), facts)


def _facts(collected: Collected) -> dict[str, Any]:
    package = collected.package
    return {
        "bytes": sum(len(document.text.encode()) for document in collected.documents),
        "file": package.file,
        "kept": totals(collected.documents),
        "left_out": collected.left_out,
        "licence": package.licence,
        "package": package.package,
        "role": package.role,
        "sha256": package.sha256,
        "source": package.source,
        "version": package.version,
    }


def _say(text: str, *, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        click.echo(text + end, err=True, nl=False)
