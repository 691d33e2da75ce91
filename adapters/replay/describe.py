"""What a trace says about a run and its steps, taken from the engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posttrainllm.adapters.adaptive import curve_mode
from posttrainllm.adapters.loading.fingerprint import adapter_fingerprint, fingerprint, tokenizer_fingerprint
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.pair import Pair, embedded_path
from posttrainllm.adapters.replay.trace import Header, StepRecord

if TYPE_CHECKING:  # they import MLX, and the BLAS must come first
    from posttrainllm.adapters.engine import Engine
    from posttrainllm.adapters.loading.module import Model
    from posttrainllm.adapters.rows import RowRequest, RowStep

__all__ = ["fingerprints_of", "header_of", "step_record"]


def fingerprints_of(pair: Pair) -> dict[str, str]:
    """Hash what a pair was loaded from.

    Args:
        pair: loaded from what is still there.

    Returns:
        Fingerprints of "target", "tokenizer" and, where there are any, "draft", "target adapter", "draft adapter".

    Raises:
        CheckpointError: a directory is gone or cannot be read.
    """
    return {
        **{role: fingerprint(locate(model.name)) for role, model in _models(pair).items()},
        **{f"{role} adapter": adapter_fingerprint(locate(adapter)) for role, adapter in pair.adapters.items()},
        "tokenizer": tokenizer_fingerprint(pair.tokenizer.path),
    }


def header_of(
    engine: "Engine",
    row: int,
    request: "RowRequest",
    *,
    fingerprints: Mapping[str, str] | None = None,
    request_id: str | None = None,
) -> Header:
    """Describe a run.

    Args:
        engine: what steps the row.
        row: which of its rows.
        request: what is decoded there.
        fingerprints: of `fingerprints_of`; None hashes the models' files now.
        request_id: of the server that decodes it; None where there is none.

    Returns:
        The header of its trace.
    """
    import numpy as np

    from posttrainllm.kernel.noise import root_key

    pair, runtime = engine.pair, engine.pair.runtime
    config = engine.compiled.config_for(request.mode)
    return Header(
        **{name: getattr(runtime, name) for name in ("versions", "device", "device_name", "blas", "compiled")},
        dtype={role: model.dtype for role, model in _models(pair).items()},
        variants={role: model.variant for role, model in _models(pair).items()},
        models={role: _as_given(model.name) for role, model in _models(pair).items()},
        fingerprints=dict(fingerprints or fingerprints_of(pair)),
        vocab_size=pair.vocab_size,
        rows=engine.rows,
        row=row,
        capacity=engine.capacity,
        width=engine.width,
        chunk=engine.chunk,
        mode=config.mode,
        narrow_draft=config.narrow_draft,
        diagnostics=config.diagnostics,
        accept_rule="coupled" if request.coupled else "leviathan",
        **{name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p", "draft_k", "seed")},
        key=tuple(np.array(root_key(request.seed)).tolist()),
        prompt=tuple(int(index) for index in request.prompt),
        limit=request.limit,
        **{name: getattr(request, name) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
        logit_bias=request.logit_bias,
        request_id=request_id,
        adapters={role: _as_given(adapter) or adapter for role, adapter in pair.adapters.items()},
        kv_packing=None if pair.target.packing is None else attrs.astuple(pair.target.packing),
        auto=None if engine.curves is None else engine.curves[curve_mode(request.mode)],
    )


def step_record(index: int, step: "RowStep", header: Header) -> StepRecord:
    """One step as a trace has it.

    Args:
        index: of the step, from 0.
        step: of the engine.
        header: of the run.

    Returns:
        The record.
    """
    return StepRecord(
        step=index,
        length=step.length,
        window=step.window,
        proposals=step.window[1:] if header.drafted else (),
        proposed=step.proposed,
        accepted=step.accepted,
        emitted=step.tokens,
        key=step.key,
        margins=step.margins if header.diagnostics else None,
        finite=step.finite,
        mode=step.mode,
        narrow_draft=step.narrow_draft,
        draft_k=step.draft_k,
        drawn=step.drawn,
    )


def _models(pair: Pair) -> dict[str, "Model"]:
    return {"target": pair.target} if pair.draft is None else {"target": pair.target, "draft": pair.draft}


def _as_given(name: str) -> str | None:
    """A model's path; None for an embedded one, which lies elsewhere in every installation."""
    path = Path(name)
    if path == embedded_path(path.name):
        return None
    return str(path.resolve()) if path.exists() else name  # replayed from any folder; the other is an id of the hub
