"""Whether a trace's bits can be expected here: the same models on the same machine and versions."""

from pathlib import Path

from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.fingerprint import adapter_fingerprint, fingerprint, tokenizer_fingerprint
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.pair import Pair, embedded_path, load_pair
from posttrainllm.adapters.replay.trace import Header
from posttrainllm.adapters.runtime import Runtime
from posttrainllm.kernel.errors import CheckpointError, UsageError

__all__ = ["adapter_paths", "differences", "load_recorded", "model_paths"]

_EMBEDDED = {"target": "target-16m", "draft": "draft-3m"}


def model_paths(header: Header, model: str | None, draft_model: str | None) -> dict[str, Path]:
    """Where the models are.

    Args:
        header: of the trace.
        model: the target when it has moved, a directory or an id of the hub.
        draft_model: the draft when it has moved.

    Returns:
        A directory for "target" and, where the trace has one, "draft".

    Raises:
        UsageError: a draft is given for a plain run.
        CheckpointError: a model is not there.
    """
    if draft_model is not None and not header.drafted:
        raise UsageError(f"--draft-model: got {draft_model} for a trace of a run without a draft, expected none")
    given = {"target": model, "draft": draft_model}
    paths = {}
    for role, recorded in header.models.items():
        name = given[role] or recorded
        paths[role] = embedded_path(_EMBEDDED[role]) if name is None else locate(name)
        if not paths[role].exists():
            option = "MODEL" if role == "target" else "--draft-model"
            raise CheckpointError(f"{name}: got nothing there, expected the {role} model; name it as {option}")
    return paths


def adapter_paths(header: Header, adapter: str | None, draft_adapter: str | None) -> dict[str, Path]:
    """Where the models' adapters are.

    Args:
        header: of the trace.
        adapter: the target's when it has moved, a directory or an id of the hub.
        draft_adapter: the draft's when it has moved.

    Returns:
        A directory for each that the trace has.

    Raises:
        UsageError: one is given for a model that had none.
        CheckpointError: one is not there.
    """
    paths = {}
    for role, given in {"target": adapter, "draft": draft_adapter}.items():
        option = "--adapter-path" if role == "target" else "--draft-adapter-path"
        recorded = header.adapters.get(role)
        if recorded is None:
            if given is not None:
                raise UsageError(f"{option}: got {given} for a trace of a run without one, expected none")
            continue
        paths[role] = locate(given or recorded)
        if not paths[role].exists():
            raise CheckpointError(
                f"{given or recorded}: got nothing there, expected the {role}'s adapter; name it as {option}"
            )
    return paths


def differences(header: Header, runtime: Runtime, paths: dict[str, Path], adapters: dict[str, Path]) -> list[str]:
    """What is not here as it was where the trace was recorded; no model is loaded for it.

    Args:
        header: of the trace.
        runtime: of this process.
        paths: of `model_paths`.
        adapters: of `adapter_paths`.

    Returns:
        A phrase for each difference; none when the bits can be expected to be equal.

    Raises:
        CheckpointError: a model cannot be read.
    """
    here = {
        **{name: getattr(runtime, name) for name in ("device", "device_name")},
        **{"BLAS": runtime.blas, **runtime.versions},
        **{f"{role} model": fingerprint(path) for role, path in paths.items()},
        **{f"{role} adapter": adapter_fingerprint(path) for role, path in adapters.items()},
        "tokenizer": tokenizer_fingerprint(paths["target"]),
    }
    there = {
        **{name: getattr(header, name) for name in ("device", "device_name")},
        **{"BLAS": header.blas, **header.versions},
        **{f"{role} model": header.fingerprints[role] for role in paths},
        **{f"{role} adapter": header.fingerprints[f"{role} adapter"] for role in adapters},
        "tokenizer": header.fingerprints["tokenizer"],
    }
    found = [
        f"{name}: got {_short(here.get(name))}, expected {_short(value)}"
        for name, value in there.items()
        if here.get(name) != value
    ]
    if header.compiled and not runtime.compiled:
        found.append("steps: got uncompiled ones, expected compiled ones")
    return found


def load_recorded(header: Header, paths: dict[str, Path], adapters: dict[str, Path]) -> tuple[Pair, list[str]]:
    """Load the models of a trace in its dtypes, computed by its forwards.

    Args:
        header: of the trace.
        paths: of `model_paths`.
        adapters: of `adapter_paths`.

    Returns:
        The pair, and a phrase for each dtype, forward or size that is not the trace's.

    Raises:
        PosttrainllmError: see `load_pair`.
    """
    dtypes = set(header.dtype.values())
    forwards = set(header.variants.values())
    bits, group_size = header.kv_packing or (None, UNCHANGED.kv_group_size)
    pair = load_pair(
        paths["target"],
        paths.get("draft"),
        dtype=dtypes.pop() if len(dtypes) == 1 else "auto",
        forward="module" if forwards == {"module"} else "auto",
        changes=ModelChanges(
            adapter_path=adapters.get("target"),
            draft_adapter_path=adapters.get("draft"),
            kv_bits=bits,
            kv_group_size=group_size,
        ),
    )
    models = {"target": pair.target} if pair.draft is None else {"target": pair.target, "draft": pair.draft}
    found = [
        f"{role} dtype: got {model.dtype}, expected {header.dtype[role]}"
        for role, model in models.items()
        if model.dtype != header.dtype[role]
    ]
    found += [
        f"{role} forward: got {model.variant}, expected {header.variants[role]}"
        for role, model in models.items()
        if role in header.variants and model.variant != header.variants[role]
    ]
    if pair.vocab_size != header.vocab_size:
        found.append(f"ids that may be emitted: got {pair.vocab_size}, expected {header.vocab_size}")
    return pair, found


def _short(value: str | None) -> str:
    """A fingerprint by its first digits."""
    return "none" if value is None else f"{value[:19]}..." if value.startswith("sha256:") else value
