"""Verdicts that were reached before, one file each under the user's cache directory.

A verdict holds for its key, which `key.py` makes. Writes are atomic; a file that cannot be read, or is not what its
name says, counts as absent and is written again.
"""

import json
import time
from pathlib import Path
from typing import Any

from posttrainllm.adapters.gate.findings import GateResult
from posttrainllm.adapters.gate.key import models_of, setting_of
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.user_cache import file_name, user_cache, write_whole
from posttrainllm.kernel.errors import LoadError

__all__ = [
    "cache_folder",
    "good_in_other_shapes",
    "known_broken",
    "read_result",
    "trace_file",
    "write_result",
]

_FORMAT = 2


def cache_folder() -> Path | None:
    """Where verdicts are kept; None where the user has no home."""
    return user_cache("gate")


def read_result(key: dict[str, Any]) -> GateResult | None:
    """The verdict for a key; None where there is none that can be used."""
    folder = cache_folder()
    found = None if folder is None else _read(folder / file_name(key))
    return found[1] if found is not None and found[0] == key else None


def write_result(key: dict[str, Any], result: GateResult) -> str | None:
    """Keep a verdict.

    Args:
        key: of `gate_key`.
        result: what was found.

    Returns:
        None, or why it could not be kept.
    """
    folder = cache_folder()
    if folder is None:
        return "there is no home directory"
    value = {"format": _FORMAT, "written_ns": time.time_ns(), "key": key, "result": result.to_dict()}
    return write_whole(folder / file_name(key), json.dumps(value))


def trace_file(key: dict[str, Any]) -> Path | None:
    """Where the trace of a broken verdict goes; None where there is no home directory."""
    folder = cache_folder()
    return None if folder is None else folder / "traces" / Path(file_name(key)).with_suffix(".jsonl")


def known_broken(pair: Pair, draft_k: int) -> str | None:
    """Whether the gate has called this pair broken, in any shape and on any prompts. Runs nothing.

    A later good verdict over as many prompts and tokens lifts an earlier broken one. The models are hashed only where a
    broken verdict for all the rest is on file.

    Args:
        pair: with a draft.
        draft_k: K.

    Returns:
        The verdict's reason; None where nothing speaks against the pair.
    """
    if pair.draft is None:
        return None
    verdicts = _kept()
    if not any(result.verdict == "broken" for _, result in verdicts):
        return None
    setting = setting_of(pair, draft_k)
    verdicts = [(key, result) for key, result in verdicts if _agrees(key, setting)]
    if not any(result.verdict == "broken" for _, result in verdicts):
        return None
    try:
        models = models_of(pair)
    except LoadError:  # the pair was not loaded from a directory: no verdict is about it
        return None
    good: list[tuple[int, int]] = []
    for key, result in verdicts:
        if not _agrees(key, models):
            continue
        prompts, tokens = min(path.findings.prompts for path in result.paths), int(key["max_tokens"])
        if result.verdict != "broken":
            good.append((prompts, tokens))
        elif not any(prompts <= later[0] and tokens <= later[1] for later in good):
            return next(path.reason for path in result.paths if path.verdict == "broken")
    return None


def good_in_other_shapes(key: dict[str, Any]) -> bool:
    """Whether a good verdict over as much is on file for what differs from a key in rows and capacity at most.

    Args:
        key: of `gate_key`.
    """
    free = ("rows", "capacity", "max_tokens", "drawn")
    same = {name: value for name, value in key.items() if name not in free}
    return any(
        result.verdict != "broken"
        and _agrees(found, same)
        and all(found[name] >= key[name] for name in ("max_tokens", "drawn"))
        for found, result in _kept()
    )


def _kept() -> list[tuple[dict[str, Any], GateResult]]:
    """Every verdict on file with its key, the newest first."""
    folder = cache_folder()
    if folder is None:
        return []
    try:
        kept = [
            found
            for file in folder.glob("*.json")
            if (found := _read(file)) is not None and file.name == file_name(found[0])
        ]
    except OSError:
        return []
    newest_first = sorted(kept, key=lambda found: found[2], reverse=True)
    return [(key, result) for key, result, _ in newest_first]


def _agrees(key: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(key.get(name) == value for name, value in values.items())


def _read(file: Path) -> tuple[dict[str, Any], GateResult, int] | None:
    """Key, result and when it was written, in nanoseconds; None for what is no verdict."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value["format"] != _FORMAT or not isinstance(value["key"], dict):
            return None
        return value["key"], GateResult.from_dict(value["result"]), int(value["written_ns"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
