"""What a verdict holds for: everything that bits may depend on."""

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs

from posttrainllm.adapters.gate.prompts import prompts_hash
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.replay.describe import fingerprints_of
from posttrainllm.adapters.runtime import Runtime

if TYPE_CHECKING:  # `sample` reads a verdict and needs nothing that runs
    from posttrainllm.adapters.gate.plan import Plan

__all__ = ["gate_key", "machine_of", "models_of", "setting_of"]

_FINGERPRINTS: WeakKeyDictionary[Pair, dict[str, str]] = WeakKeyDictionary()  # hashing gigabytes takes seconds


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
    curves = planned.shape.curves
    costs = {} if curves is None else {mode: attrs.asdict(curve) for mode, curve in curves.items()}
    return {
        **models_of(pair),
        **setting_of(pair, planned.shape.draft_k),
        **({"auto": json.loads(json.dumps(costs))} if costs else {}),
        "rows": planned.shape.rows,
        "capacity": planned.shape.capacity,
        "prompts": prompts_hash(planned.prompts),
        "max_tokens": planned.max_tokens,
        "drawn": len(planned.drawn),
    }


def models_of(pair: Pair) -> dict[str, Any]:
    """Fingerprints of the models and their adapters; they are hashed once a pair.

    Args:
        pair: with a draft, loaded from directories that are still there.

    Returns:
        Plain values, for a key.

    Raises:
        CheckpointError: a directory is gone or cannot be read.
    """
    assert pair.draft is not None, "plan() refuses a pair without a draft"
    if pair not in _FINGERPRINTS:
        _FINGERPRINTS[pair] = fingerprints_of(pair)
    found = _FINGERPRINTS[pair]
    adapters = {name: digest for name, digest in found.items() if name.endswith(" adapter")}
    return {**{name: found[name] for name in found.keys() - adapters.keys()}, "adapter": adapters or None}


def setting_of(pair: Pair, draft_k: int) -> dict[str, Any]:
    """What speculative output of a pair depends on beside the models, the shapes and the prompts.

    Args:
        pair: with a draft.
        draft_k: K.

    Returns:
        Plain values, for a key.
    """
    assert pair.draft is not None
    models = {"target": pair.target, "draft": pair.draft}
    return {
        "draft_k": draft_k,
        "dtype": {role: model.dtype for role, model in models.items()},
        "kv_dtype": {role: str(model.kv_dtype) for role, model in models.items()},
        "variant": {role: model.variant for role, model in models.items()},
        **machine_of(pair.runtime),
    }


def machine_of(runtime: Runtime) -> dict[str, Any]:
    """What bits and times depend on beside models, shapes and prompts.

    Args:
        runtime: of this process.

    Returns:
        Plain values, for a key.
    """
    return {
        "device": [runtime.device, runtime.device_name],
        "versions": runtime.versions,
        "blas": runtime.blas,
        "compiled": runtime.compiled,
        "source": _source_hash(),
    }


@functools.cache  # what runs is what was imported: a server may outlive its files
def _source_hash() -> str:
    """Hash of the sources of the step and of the gate itself: a working copy changes between releases."""
    import posttrainllm.adapters
    import posttrainllm.kernel

    digest = hashlib.sha256()
    kernel, adapters = (Path(str(package.__file__)).parent for package in (posttrainllm.kernel, posttrainllm.adapters))
    folders = (kernel, adapters / "loading", adapters / "gate")
    written = (".py", ".c", ".cu", ".h")
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in written]
    host = (
        "adaptive",
        "batch",
        "compiled",
        "engine",
        "occupancy",
        "prefill",
        "prefix_cache",
        "rows",
        "runtime",
        "shapes",
    )
    for file in [*files, *(adapters / f"{name}.py" for name in host)]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
