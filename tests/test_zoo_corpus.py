"""`posttrainllm zoo corpus`, offline: archives are made here."""

import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import tarfile
import zipfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from posttrainllm.evals.zoo.corpus.archives import read_files
from posttrainllm.evals.zoo.corpus.command import corpus
from posttrainllm.evals.zoo.corpus.fetch import fetch
from posttrainllm.evals.zoo.corpus.filters import kind_of, reason_against
from posttrainllm.evals.zoo.corpus.licences import lacking_licences, other_licence
from posttrainllm.evals.zoo.corpus.table import Package, default_table, read_table

MIT = (
    "Permission is hereby granted, free of charge, to any person obtaining a copy of this software, to deal in the"
    " Software without restriction."
)
WORDS = [
    f"{first}{last}"
    for first in ("read", "make", "find", "join", "count")
    for last in ("er", "ed", "ing", "s", "_all", "_one")
]
PROSE = "The {} of a {} is what you need when the {} was not in the {} that it has to be with {}.\n"


def source(seed: int, functions: int = 12) -> str:
    draw = random.Random(seed)
    return "\n".join(
        f"def {draw.choice(WORDS)}_{draw.choice(WORDS)}({draw.choice(WORDS)}, {draw.choice(WORDS)}):\n"
        f"    {draw.choice(WORDS)} = {draw.choice(WORDS)}.{draw.choice(WORDS)}({draw.choice(WORDS)})\n"
        f"    return {draw.choice(WORDS)} + {draw.choice(WORDS)}[{draw.choice(WORDS)}]\n"
        for _ in range(functions)
    )


def prose(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(PROSE.format(*draw.sample(WORDS, 5)) for _ in range(12))


def sdist(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"top-1.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))


class Bench:
    """A cache and a table in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.rows: list[dict[str, str]] = []

    def add(self, name: str, files: dict[str, str], **values: str) -> None:
        path = self.cache / f"{name}-1.0.tar.gz"
        sdist(path, {"LICENSE": MIT, **files})
        row = {
            "role": "train", "source": "pypi", "package": name, "version": "1.0", "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "licence": "MIT", "licence_files": "LICENSE",
            "exclude": "", "audit": "LICENSE read",
        }  # fmt: skip
        self.rows.append({**row, **values})

    def build(self, *more: str, out: str = "out") -> Result:
        table = self.folder / "packages.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        arguments = ["--out", str(self.folder / out), "--cache", str(self.cache), "--table", str(table), *more]
        return CliRunner().invoke(corpus, arguments)

    def paths(self, name: str = "train-00000.jsonl", out: str = "out") -> set[str]:
        lines = (self.folder / out / name).read_text("utf-8").splitlines()
        return {f"{document['package']}/{document['path']}" for document in map(json.loads, lines)}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.add("alpha", {"alpha/a.py": source(1), "alpha/b.py": source(2), "docs/index.rst": prose(3)})
    bench.add("beta", {"beta/c.py": source(4), "README.md": prose(5)})
    bench.add("secret", {"secret/held.py": source(6), "docs/held.rst": prose(7)}, role="heldout")
    return bench


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_same_packages_give_the_same_bytes_whatever_their_order_in_the_table(bench: Bench, tmp_path: Path) -> None:
    first = bench.build()
    bench.rows.reverse()
    second = bench.build(out="again")
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert content(tmp_path / "out") == content(tmp_path / "again")
    assert first.stdout == second.stdout
    assert "corpus_sha256 " in first.stdout
    assert bench.paths() == {
        "alpha/alpha/a.py",
        "alpha/alpha/b.py",
        "alpha/docs/index.rst",
        "beta/beta/c.py",
        "beta/README.md",
    }
    assert bench.paths("heldout.jsonl") == {"secret/secret/held.py", "secret/docs/held.rst"}
    manifest = json.loads((tmp_path / "out" / "MANIFEST.json").read_text("utf-8"))
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    assert MIT in (tmp_path / "out" / "LICENCES.md").read_text("utf-8")


def test_a_licence_that_is_not_permissive_is_refused(bench: Bench) -> None:
    bench.add("copyleft", {"x.py": source(8)}, licence="MIT AND GPL-3.0-only")
    result = bench.build()
    assert result.exit_code == 1
    assert "copyleft is under GPL-3.0-only, not on the list" in result.output
    assert len(result.output.splitlines()) == 1


def test_a_licence_that_the_archive_does_not_bear_out_is_refused(bench: Bench) -> None:
    bench.add("other", {"x.py": source(8)}, licence="Apache-2.0")
    assert "other-1.0.tar.gz is listed under Apache-2.0, which LICENSE does not bear out" in bench.build().output
    bench.rows[-1] |= {"licence": "MIT", "licence_files": "COPYING"}
    assert "other-1.0.tar.gz has no licence file COPYING" in bench.build().output


def test_an_archive_of_another_hash_is_refused(bench: Bench) -> None:
    (bench.cache / "beta-1.0.tar.gz").write_bytes(b"something else")
    result = bench.build()
    assert result.exit_code == 1
    assert "it is not what was audited" in result.output
    assert bench.rows[1]["sha256"] in result.output
    assert not (bench.folder / "out").exists()


def test_an_archive_with_the_right_hash_that_is_none_is_refused_in_one_line(bench: Bench) -> None:
    (bench.cache / "beta-1.0.tar.gz").write_bytes(b"something else")
    bench.rows[1]["sha256"] = hashlib.sha256(b"something else").hexdigest()
    result = bench.build()
    assert result.exit_code == 1
    assert "cannot read the archive beta-1.0.tar.gz" in result.output


def test_a_copy_of_what_is_held_out_is_never_trained_on(bench: Bench) -> None:
    inside = source(9) + source(6, 4) + source(10)  # a part of it, in the middle of a file of one's own
    bench.add("thief", {"whole.py": source(6) + "\n# my own line\n", "docs/part.py": inside, "own.py": source(11)})
    result = bench.build()
    assert result.exit_code == 0, result.output
    assert {path for path in bench.paths() if path.startswith("thief")} == {"thief/own.py"}
    facts = json.loads((bench.folder / "out" / "MANIFEST.json").read_text("utf-8"))["packages"]
    thief = next(package for package in facts if package["package"] == "thief")
    assert thief["left_out"]["held out"] == len(source(6) + "\n# my own line\n") + len(inside)


def test_what_a_held_out_file_too_large_to_keep_says_is_not_trained_on_either(bench: Bench) -> None:
    long = "\n".join(source(seed, 100) for seed in range(100, 140))
    assert reason_against(long, "code") == "size"
    bench.add("vast", {"vast.py": long}, role="heldout")
    bench.add("thief", {"part.py": source(120, 100)})
    assert bench.build().exit_code == 0
    assert not {path for path in bench.paths() if path.startswith("thief")}


def test_a_near_duplicate_is_kept_once(bench: Bench) -> None:
    bench.add(
        "fork", {"same.py": source(1), "near.py": source(2).replace("def ", "async def ", 1), "own.py": source(12)}
    )
    assert bench.build().exit_code == 0
    assert {path for path in bench.paths() if path.startswith("fork")} == {"fork/own.py"}


def test_vendored_generated_and_foreign_licences_are_left_out(bench: Bench) -> None:
    bench.add(
        "mixed",
        {
            "mixed/_vendor/a.py": source(20), "third_party/b.py": source(21),
            "mixed/c.py": "# Generated by a tool\n" + source(22),
            "mixed/d.py": "# Licensed under the GNU Lesser General Public License\n" + source(23),
            "mixed/e.py": "# Copyright Somebody. All rights reserved.\n" + source(24),
            "mixed/f.py": "# All rights reserved.\n# Licensed under the Apache License, Version 2.0\n" + source(25),
            "mixed/g.py": "TABLE = [\n" + "".join(f"    {n * n}, {n * 7919},\n" for n in range(200)) + "]\n",
            "mixed/h.py": "x = '" + "ab" * 300 + "'\n" + source(26),
            "mixed/i.py": "value = compute(left, right)\n" * 200,
            "mine/j.py": source(27), "LICENSE.txt": MIT * 3, "locale/k.py": source(28),
        },
        exclude="mine/*",
    )  # fmt: skip
    assert bench.build().exit_code == 0
    assert {path for path in bench.paths() if path.startswith("mixed")} == {"mixed/mixed/f.py"}


def test_the_cap_is_kept_for_each_package_and_kind_and_tests_come_last(bench: Bench) -> None:
    own = {f"big/m{n}.py": source(30 + n) for n in range(6)}
    bench.add("big", {**own, **{f"tests/test_{n}.py": source(40 + n) for n in range(6)}, "docs/a.rst": prose(50)})
    cap = sum(map(len, own.values())) + 1500
    assert bench.build("--code-cap", str(cap), "--prose-cap", str(len(prose(50)))).exit_code == 0
    kept = {path for path in bench.paths() if path.startswith("big")}
    assert {path for path in kept if "/m" in path} == {f"big/{path}" for path in own}
    assert "big/docs/a.rst" in kept
    lines = map(json.loads, (bench.folder / "out" / "train-00000.jsonl").read_text("utf-8").splitlines())
    sizes = [len(document["text"]) for document in lines if document["package"] == "big" and document["kind"] == "code"]
    assert sum(sizes) <= cap
    assert len(sizes) < 12


def test_packing_and_unpacking_give_the_same_bytes(bench: Bench, tmp_path: Path) -> None:
    result = bench.build("--pack", str(tmp_path / "one.xz"))
    assert result.exit_code == 0, result.output
    bench.build("--pack", str(tmp_path / "two.xz"))
    assert (tmp_path / "one.xz").read_bytes() == (tmp_path / "two.xz").read_bytes()
    back = CliRunner().invoke(corpus, ["--unpack", str(tmp_path / "one.xz"), "--out", str(tmp_path / "back")])
    assert back.exit_code == 0, back.output
    assert content(tmp_path / "back") == content(tmp_path / "out")
    assert back.stdout.strip() in result.stdout


@pytest.mark.parametrize("damage", ["flipped", "cut", "other", "changed", "more"])
def test_a_damaged_packed_file_is_refused_in_one_line(bench: Bench, tmp_path: Path, damage: str) -> None:
    packed = tmp_path / "packed.xz"
    bench.build("--pack", str(packed))
    whole = packed.read_bytes()
    plain = lzma.decompress(whole)
    packed.write_bytes({
        "flipped": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], "cut": whole[:-40],
        "other": lzma.compress(b"[1]\n"),
        "changed": lzma.compress(plain.replace(b"reader", b"raeder", 1)), "more": lzma.compress(plain + b"x"),
    }[damage])  # fmt: skip
    result = CliRunner().invoke(corpus, ["--unpack", str(packed), "--out", str(tmp_path / "back")])
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1, result.output
    assert not (tmp_path / "back" / "MANIFEST.json").exists()


def test_a_folder_that_holds_something_else_is_not_touched(bench: Bench) -> None:
    (bench.folder / "out").mkdir()
    (bench.folder / "out" / "mine.txt").write_text("mine")
    result = bench.build()
    assert result.exit_code == 1
    assert "holds mine.txt, which is not of a corpus" in result.output


def test_a_debian_package_and_a_wheel_are_read(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, text in (("./usr/share/doc/x/x.txt.gz", gzip.compress(b"words", mtime=0)), ("./usr/bin/x", b"no")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))

    def member(name: str, content: bytes) -> bytes:
        return (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )

    deb = tmp_path / "x_1_all.deb"
    parts = (
        member("debian-binary", b"2.0\n") + member("control.tar.xz", b"odd") + member("data.tar.xz", data.getvalue())
    )
    deb.write_bytes(b"!<arch>\n" + parts)
    assert read_files(deb, (".txt",), ()) == {"usr/share/doc/x/x.txt.gz": b"words"}
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as zipped:
        zipped.writestr("x/b.py", "b")
        zipped.writestr("x/a.py", "a")
        zipped.writestr("x/c.so", "c")
    assert list(read_files(wheel, (".py",), ()).items()) == [("x/a.py", b"a"), ("x/b.py", b"b")]


def test_an_archive_is_brought_once_and_what_is_missing_is_said(tmp_path: Path, bench: Bench) -> None:
    content = b"archive"
    package = pinned(package="x", file="x-1.tar.gz", sha256=hashlib.sha256(content).hexdigest())
    asked = []

    def client(package: Package, path: Path) -> None:
        asked.append(package.package)
        path.write_bytes(content)

    def gone(package: Package, path: Path) -> None:
        raise click.ClickException(f"PyPI has no {package.file} any more")

    with pytest.raises(click.ClickException, match=r"no x-1\.tar\.gz any more"):
        fetch(package, tmp_path, clients={"pypi": gone})
    for _ in range(2):
        assert fetch(package, tmp_path, clients={"pypi": client}).read_bytes() == content
    assert asked == ["x"]


def pinned(**values: str) -> Package:
    about = {"role": "train", "source": "pypi", "package": "beta", "version": "1.0", "file": "beta-1.0.tar.gz"}
    more = {"licence": "MIT", "sha256": "0" * 64, "audit": ""}
    return Package(**{**about, **more, **values}, licence_files=("LICENSE",), exclude=())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what pip vendors
def test_pip_brings_a_source_distribution_without_building_it(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(bench.cache))  # archives with no metadata: nothing could be built
    cache = tmp_path / "fresh"
    cache.mkdir()
    brought = fetch(pinned(sha256=bench.rows[1]["sha256"]), cache)
    assert brought.read_bytes() == (bench.cache / "beta-1.0.tar.gz").read_bytes()
    with pytest.raises(click.ClickException, match=r"PyPI has no beta-2\.0\.tar\.gz of beta 2\.0 any more"):
        fetch(pinned(version="2.0", file="beta-2.0.tar.gz"), cache)


def test_apt_get_brings_a_debian_package_or_says_what_may_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tmp_path / "apt-get"
    found = 'test "$3" = x=1 || { echo "E: Version of $3 was not found" >&2; exit 100; }'
    client.write_text(f"#!/bin/sh\n{found}\nprintf deb > x_1.deb\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cache = tmp_path / "cache"
    cache.mkdir()
    debian = {"source": "debian", "package": "x", "sha256": hashlib.sha256(b"deb").hexdigest()}
    assert fetch(pinned(**debian, version="1", file="x_1.deb"), cache).read_bytes() == b"deb"
    said = "x 2 of Debian is not to be had; `apt-get update` may help: E: Version of x=2 was not found"
    with pytest.raises(click.ClickException, match=said):
        fetch(pinned(**debian, version="2", file="x_2.deb"), cache)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(click.ClickException, match="there is no apt-get here"):
        fetch(pinned(**debian, version="3", file="x_3.deb"), cache)
    assert sorted(path.name for path in cache.iterdir()) == ["x_1.deb"]


def test_every_package_of_the_committed_table_is_audited_and_pinned() -> None:
    packages = read_table(default_table())
    held_out = {package.package: package.version for package in packages if package.role == "heldout"}
    assert held_out["networkx"] == "3.5"
    assert held_out["dask"] == "2026.3.0"
    assert len(held_out) >= 3
    assert len(packages) >= 90
    for package in packages:
        assert "read" in package.audit, package
        assert package.version in package.file.replace("%3a", ":"), package


@pytest.mark.parametrize(
    "text",
    [
        "under the GPLv3",
        "GNU Lesser General Public License",
        "CC BY-SA 4.0",
        "Mozilla Public License",
        "CeCILL-B",
        "LGPL",
    ],
)
def test_other_licences_are_seen(text: str) -> None:
    assert other_licence(f"# {text}\n")
    assert not other_licence("import matplotlib as mpl\nSPDX-License-Identifier: MIT\n# All rights reserved.\n")


def test_the_words_of_a_licence_are_found_in_comments_and_across_lines() -> None:
    assert (
        lacking_licences("MIT", "# Permission is hereby granted,\n# free of charge, ... without\n# restriction") == []
    )
    assert lacking_licences("MIT AND ISC", MIT) == ["ISC"]


def test_kinds_are_told_by_the_path() -> None:
    assert kind_of("docs/a.txt") == kind_of("README.rst") == kind_of("usr/doc/x/a.txt.gz") == "prose"
    assert kind_of("x/a.py") == "code"
    for path in (
        "a.txt",
        "x/LICENSE.md",
        "AUTHORS.rst",
        "docs/changelog/1.rst",
        "x.egg-info/a.py",
        "x/a.c",
        "docs/requirements.txt",
    ):
        assert kind_of(path) is None, path


def test_prose_that_is_a_list_or_foreign_is_left_out() -> None:
    assert reason_against(prose(1), "prose") is None
    assert reason_against("".join(f"* {a} {b}\n" for a in WORDS for b in WORDS[:9:2]), "prose") == "no prose"
    assert reason_against(prose(1) + "слово " * 200, "prose") == "foreign"
