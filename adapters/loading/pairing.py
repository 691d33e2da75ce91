"""Whether two models mean the same by every id."""

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.kernel.errors import PairError

__all__ = ["check_pair"]


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
        ours, theirs = target.vocabulary.get(index), draft.vocabulary.get(index)
        added = (theirs is None and index in target.added_ids) or (ours is None and index in draft.added_ids)
        if ours != theirs and not added:
            raise PairError(
                f"{draft.path}: its tokenizer differs from the target's: id {index} is {theirs!r}, expected {ours!r}"
            )
    if draft_rows < 2:
        raise PairError(f"{draft.path}: got {draft_rows} rows of logits, expected 2 or more")
    return tuple(_differences(target, draft))


def _differences(target: Tokenizer, draft: Tokenizer) -> list[str]:
    lines = []
    for one, other, name in ((target, draft, "target"), (draft, target, "draft")):
        only = sorted(one.vocabulary.keys() - other.vocabulary.keys())
        if only:
            lines.append(f"only the {name} has {len(only)} added tokens, the first {one.vocabulary[only[0]]!r}")
    shared = target.vocabulary.keys() & draft.vocabulary.keys()
    special = sorted((target.special_ids ^ draft.special_ids) & shared)
    if special:
        lines.append(f"{len(special)} ids are special to one of the two only, the first {special[0]}")
    if target.eos_ids != draft.eos_ids:
        lines.append(f"text ends at the target's ids {sorted(target.eos_ids)}, not the draft's {sorted(draft.eos_ids)}")
    return lines
