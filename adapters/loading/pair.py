"""Loading a target, and a draft that means the same by every id."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from posttrainllm.adapters.loading.adapter import Adapter, read_adapter
from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_checkpoint
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.pairing import change_notes, check_pair, model_notes
from posttrainllm.adapters.loading.tokenizer import Tokenizer, load_tokenizer
from posttrainllm.adapters.runtime import Runtime, start
from posttrainllm.kernel.errors import CheckpointError, UsageError

if TYPE_CHECKING:  # it imports MLX, and the BLAS must come first
    from posttrainllm.adapters.loading.module import Model

__all__ = ["AUTO", "DTYPES", "FORWARDS", "Pair", "embedded_path", "load_pair", "resolve_dtype", "with_draft"]

_Compiled = TypeVar("_Compiled")
AUTO = "auto"
"""In place of a draft: the one here that pays best. A directory of that name is ./auto."""
DTYPES = ("auto", "float32", "float16", "bfloat16")
FORWARDS = ("auto", "module")
_EMBEDDED_TARGET, _EMBEDDED_DRAFT = "target-16m", "draft-3m"


@attrs.frozen(eq=False, kw_only=True)
class Pair:
    """What decoding needs: a target, its tokenizer, and possibly a draft."""

    target: "Model"
    draft: "Model | None"
    tokenizer: Tokenizer
    runtime: Runtime
    reason: str | None
    """Why nothing is drafted; None with a draft."""
    notes: tuple[str, ...] = ()
    """What is worth knowing of the models and changes no promise; for `--verbose`."""
    compiled: dict[Hashable, Any] = attrs.field(init=False, factory=dict, repr=False)
    """Compiled functions of these models, shared by all engines: a second request traces nothing. `attrs.evolve` starts
    a new one."""

    def once(self, key: Hashable, make: Callable[[], _Compiled]) -> _Compiled:
        """The compiled function of a key, made the first time that it is asked for."""
        if key not in self.compiled:
            self.compiled[key] = make()
        found: _Compiled = self.compiled[key]
        return found

    def plain(self, reason: str) -> "Pair":
        """The same target without its draft, and why."""
        return attrs.evolve(self, draft=None, reason=reason)

    @property
    def forwards(self) -> str:
        """Which forward computes each model, one line for `--verbose`."""
        draft = "" if self.draft is None else f", draft {self.draft.variant}"
        return f"forward: target {self.target.variant}{draft}"

    @property
    def adapters(self) -> dict[str, str]:
        """Of "target" and "draft", those that have one, as it was given."""
        models = {"target": self.target, "draft": self.draft}
        return {
            role: model.adapter for role, model in models.items() if model is not None and model.adapter is not None
        }

    @property
    def vocab_size(self) -> int:
        """Ids that may be emitted: the target's rows that the tokenizer knows."""
        return min(self.target.vocab_size, self.tokenizer.size)


def embedded_path(name: str) -> Path:
    """Directory of an embedded model, "target-16m" or "draft-3m"."""
    import posttrainllm.models

    return Path(posttrainllm.models.__file__).parent / name


def load_pair(
    model: str | Path | None = None,
    draft_model: str | Path | None = None,
    *,
    speculate: bool = True,
    dtype: str = "auto",
    forward: str = "auto",
    changes: ModelChanges = UNCHANGED,
) -> Pair:
    """Load what the arguments name.

    With no argument this is the embedded pair; a draft alone gets the embedded target; a model alone decodes plainly.

    Args:
        model: the target, a directory or an id of the hub.
        draft_model: the draft, the same.
        speculate: False loads no draft.
        dtype: one of DTYPES, for both models. "auto" is each checkpoint's own, except on a CPU: float32 holds the same
            weights without loss and is faster there, given a real BLAS or quantised weights.
        forward: one of FORWARDS, for both models. "auto" takes a forward of ours for models of the Llama shape,
            "module" mlx-lm's module for all.
        changes: adapters, and how keys and values are kept.

    Returns:
        The loaded pair.

    Raises:
        UsageError: the arguments contradict each other.
        LoadError: a checkpoint cannot be used, or the two do not fit.
        MemoryLimitError: the weights cannot fit; said before they are read.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    if forward not in FORWARDS:
        raise UsageError(f"forward: got {forward!r}, expected one of {', '.join(FORWARDS)}")
    for name, path in (("MODEL", model), ("--draft-model", draft_model)):
        if path is not None and (not isinstance(path, (str, Path)) or not str(path)):
            raise UsageError(f"{name}: got {path!r}, expected the path of a directory or an id of the hub")
    if draft_model == AUTO:  # whoever can choose one has done so before
        raise UsageError(f"--draft-model: got {AUTO!r}, expected a model: `posttrainllm match` says which one pays")
    if draft_model is not None and not speculate:
        raise UsageError("got both a draft model and --no-draft (speculate=False), expected one of them")
    if draft_model is None and model is None and speculate:
        draft_model = embedded_path(_EMBEDDED_DRAFT)
    changes.check(drafted=draft_model is not None)
    runtime = start()
    from posttrainllm.adapters.loading.memory import check_weights
    from posttrainllm.adapters.loading.variants import drafting

    names = [model if model is not None else embedded_path(_EMBEDDED_TARGET)]
    names += [draft_model] if draft_model is not None else []
    checkpoints = [read_checkpoint(locate(name)) for name in names]
    named = (changes.adapter_path, changes.draft_adapter_path)
    adapters = [None if path is None else read_adapter(path) for path in named][: len(names)]
    dtypes = [resolve_dtype(dtype, checkpoint, runtime) for checkpoint in checkpoints]
    check_weights(checkpoints, dtypes)
    tokenizers = [load_tokenizer(checkpoint) for checkpoint in checkpoints]
    models = [
        _load_model(checkpoint, str(name), dtype_of_it, forward, adapter, changes)
        for checkpoint, name, dtype_of_it, adapter in zip(checkpoints, names, dtypes, adapters, strict=True)
    ]
    if draft_model is None:
        reason = "the draft was switched off" if not speculate else "no draft model was given"
        notes = model_notes(checkpoints, models, tokenizers[0]) + change_notes(adapters, models)
        return Pair(target=models[0], draft=None, tokenizer=tokenizers[0], runtime=runtime, reason=reason, notes=notes)
    models[1] = drafting(models[1])
    differences = check_pair(*tokenizers, draft_rows=models[1].vocab_size)
    notes = differences + model_notes(checkpoints, models, tokenizers[0]) + change_notes(adapters, models)
    return Pair(target=models[0], draft=models[1], tokenizer=tokenizers[0], runtime=runtime, reason=None, notes=notes)


def with_draft(
    pair: Pair,
    draft_model: str | Path,
    *,
    dtype: str = "auto",
    forward: str = "auto",
    changes: ModelChanges = UNCHANGED,
) -> Pair:
    """Add a draft to a target that is loaded.

    Args:
        pair: of which the target is taken.
        draft_model: as of `load_pair`.
        dtype: of the draft, one of DTYPES.
        forward: of the draft, one of FORWARDS.
        changes: those of the target; the draft's keys and values are kept likewise.

    Returns:
        A pair of the same target and the draft.

    Raises:
        LoadError: the draft cannot be used, or does not fit the target; what its tokenizer tells comes before its
            weights are read.
        MemoryLimitError: its weights cannot fit beside the target's.
    """
    from posttrainllm.adapters.loading.memory import check_weights
    from posttrainllm.adapters.loading.variants import drafting

    checkpoints = [read_checkpoint(locate(name)) for name in (pair.target.name, draft_model)]
    own = resolve_dtype(dtype, checkpoints[1], pair.runtime)
    check_weights(checkpoints[1:], [own])
    tokenizer = load_tokenizer(checkpoints[1])
    check_pair(pair.tokenizer, tokenizer, draft_rows=tokenizer.size)
    draft = drafting(_load_model(checkpoints[1], str(draft_model), own, forward, None, changes))
    differences = check_pair(pair.tokenizer, tokenizer, draft_rows=draft.vocab_size)
    notes = differences + model_notes(checkpoints, [pair.target, draft], pair.tokenizer)
    changed = tuple(line for line in pair.notes if line not in notes)  # of the target's adapter and of `--kv-bits`
    return attrs.evolve(pair, draft=draft, reason=None, notes=notes + changed)


def resolve_dtype(dtype: str, checkpoint: Checkpoint, runtime: Runtime) -> str:
    """What a checkpoint's weights are cast to.

    Args:
        dtype: one of DTYPES.
        checkpoint: of the model.
        runtime: of this process.

    Returns:
        "float32", "float16" or "bfloat16".
    """
    if dtype != "auto":
        return dtype
    if runtime.device == "cpu" and (runtime.fast_float32 or checkpoint.quantized):
        return "float32"
    return checkpoint.dtype


def _load_model(
    checkpoint: Checkpoint, name: str, dtype: str, forward: str, adapter: Adapter | None, changes: ModelChanges
) -> "Model":
    from posttrainllm.adapters.loading.variants import load_model
    from posttrainllm.kernel.quantized_cache import Packing

    packing = None if changes.kv_bits is None else Packing(bits=changes.kv_bits, group_size=changes.kv_group_size)
    model = load_model(checkpoint, name=name, dtype=dtype, forward=forward, adapter=adapter, packing=packing)
    if checkpoint.context is None:  # said last: of a model that keeps no keys and values it is not the news
        raise CheckpointError(f"{checkpoint.path}/config.json: max_position_embeddings is missing")
    return model
