"""Which files of a package are worth reading: source and English prose that people wrote."""

import fnmatch
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

__all__ = ["SUFFIXES", "kind_of", "reason_against"]

SUFFIXES = (".py", ".rst", ".md", ".txt")
_VENDORED = (
    "_distutils_hack", "_external", "_vendor", "_vendored", "3rdparty", "bundled", "extern", "external", "externals",
    "lib2to3", "node_modules", "site-packages", "submodules", "subprojects", "third_party", "thirdparty", "typeshed",
    "vendor", "vendored", "vendored-meson", "vendored_meson",
)  # fmt: skip
_LISTS = ("announce", "changelog", "changelogs", "i18n", "locale", "locales", "translations")
_SKIPPED_FOLDERS = frozenset((*_VENDORED, *_LISTS))
_SKIPPED_NAMES = re.compile(
    r"^(licen[cs]es?|copying|copyright|notice|authors|contributors|maintainers|thanks|credits|requirements.*|constraints.*|cmakelists"
    r"|top_level|sources|entry_points|dependency_links|robots|versioneer|_version|get-pip|ez_setup)\b",
    re.IGNORECASE,
)
_PROSE_TXT_FOLDERS = frozenset({"doc", "docs", "documentation", "guide", "examples"})
_GENERATED = re.compile(
    r"do not edit|don't edit|auto-?generated|automatically generated|generated (?:by|from|with|using|code)\b|@generated"
    r"|produced by|code generator|machine generated",
    re.IGNORECASE,
)
_HEAD = 1500  # characters in which a generated file says so
_SHORTEST, _LONGEST = 200, 400_000  # characters
_LONGEST_LINE = {"code": 400, "prose": 4000}
_MEAN_LINE = 90
_MOST_DIGITS = {"code": 0.15, "prose": 0.12}
_MOST_FOREIGN = 0.03
_LEAST_DISTINCT = {"code": 0.30, "prose": 0.45}
_LEAST_FUNCTION_WORDS = 0.20
_SAMPLE = 65_536  # characters of a file by which its repetitions are judged
_FUNCTION_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "be", "been", "but", "by", "can", "do", "for", "from", "has", "have", "if",
    "in", "into", "is", "it", "its", "may", "not", "of", "on", "or", "so", "such", "that", "the", "their", "then",
    "there", "these", "they", "this", "to", "was", "we", "when", "which", "will", "with", "you", "your",
))  # fmt: skip


def kind_of(path: str, exclude: Iterable[str] = ()) -> str | None:
    """Tell what a file is by its path.

    Args:
        path: in its archive, with slashes.
        exclude: patterns of paths that are left out; `*` matches slashes, too.

    Returns:
        `code`, `prose`, or None where the file is not taken: vendored code, translations, lists of names, licences.
    """
    where = PurePosixPath(path.removesuffix(".gz"))
    folders = [part.lower() for part in where.parts[:-1]]
    if _SKIPPED_FOLDERS.intersection(folders) or any(folder.endswith((".egg-info", "-vendored")) for folder in folders):
        return None
    if _SKIPPED_NAMES.match(where.name) or any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude):
        return None
    if where.suffix == ".py":
        return "code"
    if where.suffix in (".rst", ".md") or (where.suffix == ".txt" and _PROSE_TXT_FOLDERS.intersection(folders)):
        return "prose"
    return None


def reason_against(text: str, kind: str) -> str | None:
    """Tell why a file is left out.

    Args:
        text: of the file.
        kind: `code` or `prose`.

    Returns:
        One of `size`, `generated`, `lines`, `digits`, `foreign`, `repetitive`, `no prose`; None if it is kept.
    """
    if not _SHORTEST <= len(text) <= _LONGEST:
        return "size"
    if _GENERATED.search(text, 0, _HEAD):
        return "generated"
    lines = text.split("\n")
    if max(map(len, lines)) > _LONGEST_LINE[kind] or (kind == "code" and len(text) > _MEAN_LINE * len(lines)):
        return "lines"
    if sum(map(str.isdigit, text)) > _MOST_DIGITS[kind] * len(text):
        return "digits"
    if not text.isascii() and len(text) - len(text.encode("ascii", "ignore")) > _MOST_FOREIGN * len(text):
        return "foreign"
    if _share_distinct(text[:_SAMPLE]) < _LEAST_DISTINCT[kind]:
        return "repetitive"
    if kind == "prose" and _share_function_words(text) < _LEAST_FUNCTION_WORDS:
        return "no prose"
    return None


def _share_distinct(text: str) -> float:
    """Count the distinct runs of four tokens among all; a ratio of a compressor would depend on its version."""
    tokens = re.findall(r"[A-Za-z_]+|\d+|[^\w\s]", text)
    runs = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(set(runs)) / max(1, len(runs))


def _share_function_words(text: str) -> float:
    words = re.findall(r"[a-z]+", text.lower())
    return sum(word in _FUNCTION_WORDS for word in words) / max(1, len(words))
