"""Whether two models mean the same by every id."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrainllm.adapters.loading.adapter import Adapter
from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.kernel.errors import PairError

if TYPE_CHECKING:  # it imports MLX, and the BLAS must come first
    from posttrainllm.adapters.loading.module import Model

__all__ = ["change_notes", "check_pair", "model_notes"]


def check_pair(target: Tokenizer, draft: Tokenizer, *, draft_rows: int) -> tuple[str, ...]:
    """Refuse a draft for which an id means something else.

    Where one of them has tokens added that the other lacks (relatives often differ in a few markers of tools or
    thinking), the pair works: verification is exact whatever is proposed. Padded rows of logits may differ, too.

    Args:
        target: the target's tokenizer.
        draft: the draft's tokenizer.
        draft_rows: rows of the draft's logits; ids behind them are never proposed.

    Returns:
        Differences that change nothing but how often proposals are accepted, one line each.

    Raises:
        PairError: naming the first id that differs.
    """
    for index in sorted(target.vocabulary.keys() | draft.vocabulary.keys()):
        expected, got = target.vocabulary.get(index), draft.vocabulary.get(index)
        added = (got is None and index in target.added_ids) or (expected is None and index in draft.added_ids)
        if got != expected and not added:
            raise PairError(
                f"{draft.path}: its tokenizer differs from the target's: id {index} is {got!r}, expected {expected!r}"
            )
    if draft_rows < 2:
        raise PairError(f"{draft.path}: got {draft_rows} rows of logits, expected 2 or more")
    return tuple(_differences(target, draft))


def _differences(target: Tokenizer, draft: Tokenizer) -> list[str]:
    lines = []
    for one, other, name in ((target, draft, "target"), (draft, target, "draft")):
        only = sorted(one.vocabulary.keys() - other.vocabulary.keys())
        if only:
            lines.append(f"only the {name} has {len(only)} of the added tokens, the first {one.vocabulary[only[0]]!r}")
    shared = target.vocabulary.keys() & draft.vocabulary.keys()
    special = sorted((target.special_ids ^ draft.special_ids) & shared)
    if special:
        lines.append(f"{len(special)} ids are special to one of the two only, the first {special[0]}")
    if target.eos_ids != draft.eos_ids:
        lines.append(f"text ends at the target's ids {sorted(target.eos_ids)}, not the draft's {sorted(draft.eos_ids)}")
    return lines


def model_notes(checkpoints: Sequence[Checkpoint], models: Sequence["Model"], tokenizer: Tokenizer) -> tuple[str, ...]:
    """What a user may want to know of models that load.

    Args:
        checkpoints: of the target, and of the draft where there is one.
        models: of the same.
        tokenizer: the target's.

    Returns:
        One line each.
    """
    lines = []
    for checkpoint, model in zip(checkpoints, models, strict=True):
        window = checkpoint.config.get("sliding_window")
        used = checkpoint.config.get("use_sliding_window", True)
        if type(window) is int and window < model.context and used and not any(model.windows):
            lines.append(
                f"{model.label}: its config names a sliding window of {window}, which mlx-lm's {model.family} does not "
                "have: beyond it, attention is full"
            )
    contexts = [model.context for model in models]
    if contexts[-1] < contexts[0]:
        lines.append(f"nothing is proposed beyond the draft's context of {contexts[1]}; the target's is {contexts[0]}")
    size = min(models[0].vocab_size, tokenizer.size)
    holes = size - sum(index < size for index in tokenizer.vocabulary)
    if holes:
        lines.append(f"{holes} ids below {size} have no token in the tokenizer; they would be emitted as no text")
    return tuple(lines)


def change_notes(adapters: Sequence[Adapter | None], models: Sequence["Model"]) -> tuple[str, ...]:
    """What was made of adapters and of `--kv-bits`.

    Args:
        adapters: of the target, and of the draft where there is one.
        models: the same.

    Returns:
        One line each.
    """
    lines = []
    for role, adapter, model in zip(("target", "draft"), adapters, models, strict=False):
        if adapter is not None:
            beside = adapter.kind != "full" and model.variant.startswith("module")
            how = "kept beside the weights" if beside else "fused into the weights"
            lines.append(f"{role} adapter {adapter.name}: {adapter.description}, {how}")
    if models[0].packing is not None:
        lines.append("--kv-bits: mlx-lm's modules compute, since their attention alone reads quantised keys and values")
    return tuple(lines)
