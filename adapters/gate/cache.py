"""Verdicts that were reached before, one file each under the user's cache directory.

A verdict holds for its key: everything that bits may depend on. Writes are atomic; a file that cannot be read, or is
not what its name says, counts as absent and is written again.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrainllm.adapters.gate.findings import GateResult
from posttrainllm.adapters.gate.prompts import prompts_hash
from posttrainllm.adapters.loading.fingerprint import fingerprint, tokenizer_fingerprint
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.kernel.errors import LoadError

if TYPE_CHECKING:  # `sample` reads a verdict and needs nothing that runs
    from posttrainllm.adapters.gate.plan import Plan

__all__ = ["cache_folder", "gate_key", "known_broken", "read_result", "trace_file", "write_result"]

_FORMAT = 1


def cache_folder() -> Path | None:
    """Where verdicts are kept; None where the user has no home."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(root) / "posttrainllm" / "gate"


def gate_key(pair: Pair, planned: "Plan") -> dict[str, Any]:
    """Everything that a verdict depends on.

    Args:
        pair: loaded from directories that are still there.
        planned: what is run.

    Returns:
        Plain values, for JSON.

    Raises:
        CheckpointError: a directory is gone or cannot be read.
    """
    return {
        **_models_of(pair),
        **_setting(pair, planned.shape.draft_k),
        "rows": planned.shape.rows,
        "capacity": planned.shape.capacity,
        "prompts": prompts_hash(planned.prompts),
        "max_tokens": planned.max_tokens,
        "drawn": len(planned.drawn),
    }


def read_result(key: dict[str, Any]) -> GateResult | None:
    """The verdict for a key; None where there is none that can be used."""
    folder = cache_folder()
    found = None if folder is None else _read(folder / _name(key))
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
    text = json.dumps({"format": _FORMAT, "key": key, "result": result.to_dict()})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # another process may read or write the same file: it sees the old one or the new one, whole
        with tempfile.TemporaryDirectory(dir=folder) as own:
            file = Path(own) / "result"
            file.write_text(text, encoding="utf-8")
            file.replace(folder / _name(key))
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None


def trace_file(key: dict[str, Any]) -> Path | None:
    """Where the trace of a broken verdict goes; None where there is no home directory."""
    folder = cache_folder()
    return None if folder is None else folder / "traces" / Path(_name(key)).with_suffix(".jsonl")


def known_broken(pair: Pair, draft_k: int) -> str | None:
    """Whether the gate has called this pair broken, in any shape and on any prompts. Runs nothing.

    The models are hashed only where a broken verdict for all the rest is on file.

    Args:
        pair: with a draft.
        draft_k: K.

    Returns:
        The verdict's reason; None where nothing speaks against the pair.
    """
    folder = cache_folder()
    if folder is None or pair.draft is None:
        return None
    try:
        verdicts = [found for file in sorted(folder.glob("*.json")) if (found := _read(file)) is not None]
    except OSError:
        return None
    broken = [(key, result) for key, result in verdicts if result.verdict == "broken"]
    if broken:
        setting = _setting(pair, draft_k)
        broken = [(key, result) for key, result in broken if _agrees(key, setting)]
    if not broken:
        return None
    try:
        models = _models_of(pair)
    except LoadError:  # the pair was not loaded from a directory: no verdict is about it
        return None
    for key, result in broken:
        if _agrees(key, models):
            return next(path.reason for path in result.paths if path.verdict == "broken")
    return None


def _agrees(key: dict[str, Any], values: dict[str, Any]) -> bool:
    return all(key.get(name) == value for name, value in values.items())


def _models_of(pair: Pair) -> dict[str, str | None]:
    assert pair.draft is not None, "plan() refuses a pair without a draft"
    return {
        "target": fingerprint(pair.target.name),
        "draft": fingerprint(pair.draft.name),
        "adapter": None,  # none can be loaded yet
        "tokenizer": tokenizer_fingerprint(pair.tokenizer.path),
    }


def _setting(pair: Pair, draft_k: int) -> dict[str, Any]:
    """What speculative output of a pair depends on beside the models, the shapes and the prompts."""
    assert pair.draft is not None
    models = {"target": pair.target, "draft": pair.draft}
    return {
        "draft_k": draft_k,
        "dtype": {role: model.dtype for role, model in models.items()},
        "kv_dtype": {role: str(model.kv_dtype) for role, model in models.items()},
        "variant": {role: model.variant for role, model in models.items()},
        "device": [pair.runtime.device, pair.runtime.device_name],
        "versions": pair.runtime.versions,
        "blas": pair.runtime.blas,
        "compiled": pair.runtime.compiled,
        "source": _source_hash(),
    }


def _source_hash() -> str:
    """Hash of the sources of the step and of the gate itself: a working copy changes between releases."""
    import posttrainllm.adapters
    import posttrainllm.kernel

    digest = hashlib.sha256()
    kernel, adapters = (Path(str(package.__file__)).parent for package in (posttrainllm.kernel, posttrainllm.adapters))
    folders = (kernel, adapters / "loading", adapters / "gate")
    files = [file for folder in folders for file in sorted(folder.glob("*")) if file.suffix in (".py", ".c")]
    for file in [*files, adapters / "engine.py", adapters / "batch.py"]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _name(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def _read(file: Path) -> tuple[dict[str, Any], GateResult] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value["format"] != _FORMAT or not isinstance(value["key"], dict):
            return None
        return value["key"], GateResult.from_dict(value["result"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
