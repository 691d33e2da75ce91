"""The draft's K forwards, and how its cache catches up after steps that had none.

The first has width 2: it feeds the last two committed tokens, so there is no special case after a window that was
accepted whole. The others feed the newest proposal, and the one before it again unless `StepConfig.narrow_draft`: at
one width everywhere, the draft's cache at a position does not depend on what was accepted before it.
"""

import attrs
import mlx.core as mx

from posttrainllm.kernel.adjust import History, adjust
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.sampling import choose, filtered, scaled
from posttrainllm.kernel.state import DecodeState, KVCache, Sampling

__all__ = ["CATCH_UP_WIDTH", "Draft", "Proposal", "catch_up", "propose"]

CATCH_UP_WIDTH = 16
"""Tokens a row that `catch_up` feeds at once."""


@attrs.frozen(kw_only=True)
class Draft:
    """The proposing model and what bounds its use."""

    forward: Forward
    vocab_size: int
    """Rows of its embedding; ids behind them are fed as the last row, since MLX checks no index of a gather."""
    context: int
    """Positions it can be fed; behind them it proposes nothing and decoding goes on."""


@attrs.frozen(eq=False, kw_only=True)
class Proposal:
    """What the draft proposes to every row."""

    ids: mx.array
    """int32 [B, W + 1]: the last committed id, the K proposals behind it, and id 0 behind those."""
    count: mx.array
    """int32 [B]: how many proposals exist, from 0 to K."""
    logits: tuple[mx.array, ...]
    """K times float32 [B, 1, V]: the draft's logits that they were drawn from, adjusted and `filtered`."""
    kv: KVCache


def propose(
    config: StepConfig,
    draft: Draft,
    state: DecodeState,
    sampling: Sampling,
    history: History | None,
    *,
    drawing_noise: mx.array | None = None,
    recorded: mx.array | None = None,
) -> Proposal:
    """Draw K ids a row from the draft, one after the other.

    A row proposes fewer where its request says so, and where its limit or the draft's context ends.

    Args:
        config: K = config.proposals, 1 or more.
        draft: the model.
        state: B rows, `draft_kv` valid for positions [0, length - 2).
        sampling: B rows; the same adjustments and warps apply to draft and target.
        history: of the committed ids, from `history_of`; None where the step adjusts nothing.
        drawing_noise: float32 [B, K, V]; None where every row is greedy or the proposals are recorded.
        recorded: int32 [B, K or more], proposals of an earlier run, to be fed in place of what the draft draws now.

    Returns:
        The proposals and the draft's cache, valid up to the last proposal but one.
    """
    kv, drawn_from = state.draft_kv, []
    length = mx.maximum(state.length, 1)  # a row that was never filled is fed like one of one token
    start = mx.maximum(length - 2, 0)
    columns = mx.minimum(start[:, None] + indices(2), state.tokens.shape[1] - 1)
    fed = mx.take_along_axis(state.tokens, columns, axis=1)  # [B, 2]
    # a one-token prompt starts at 0 and reads its first column, every other the second
    column = (length - 1 - start)[:, None]  # [B, 1]
    places = indices(config.width + 1)[None]  # [1, W + 1]
    ids = mx.where(places == 0, mx.take_along_axis(fed, column, axis=1), 0)  # [B, W + 1]
    positions = length[:, None] - 1 + places
    back = 0 if config.narrow_draft else 1
    for index in range(config.proposals):
        logits, kv = draft.forward(_known(fed, draft, config, committed=index <= back), kv, start)
        if index == 0:
            logits = mx.take_along_axis(logits, column[..., None], axis=1)  # [B, 2, V] -> [B, 1, V]
        logits = _fit(logits[:, -1:], config.vocab_size)  # [B, 1 or 2, V] -> [B, 1, V]
        drawn_from.append(filtered(adjust(logits, sampling, history), sampling, mode=config.mode))
        if recorded is None:
            own_noise = None if drawing_noise is None else drawing_noise[:, index : index + 1]
            drawn = choose(scaled(drawn_from[-1], sampling, mode=config.mode), sampling, own_noise)
        else:
            drawn = recorded[:, index : index + 1]
        history = None if history is None else history.followed_by(drawn)
        ids = mx.where(places == index + 1, drawn, ids)
        first = index + 1 - back  # of the columns that are fed next
        fed, start = ids[:, first : index + 2], positions[:, first]
    count = mx.clip(mx.minimum(sampling.draft_k, _room(draft, state)), 0, config.proposals)
    return Proposal(ids=ids, count=count, logits=tuple(drawn_from), kv=kv)


def catch_up(draft: Draft, state: DecodeState, behind: mx.array) -> DecodeState:
    """Feed the draft a window of committed ids that steps without a draft have left out.

    A row that is n ids behind needs windows at n, n - 16, n - 32, ... behind the two ids that `propose` feeds itself.
    What a window writes depends on the row's own ids and on where it begins, never on the other rows.

    Args:
        draft: the model.
        state: B rows, `draft_kv` valid for positions [0, length - 2 - behind).
        behind: int32 [B], 1 or more; 0 for a row that is not behind, of which nothing is written.

    Returns:
        The state, with its `draft_kv` valid for 16 more positions of each such row, length - 2 at most.
    """
    capacity = state.tokens.shape[1]
    start = mx.maximum(state.length - 2 - behind, 0)
    start = mx.where(behind > 0, start, capacity)  # write_at drops what is out of range
    columns = mx.minimum(start[:, None] + indices(CATCH_UP_WIDTH), capacity - 1)
    window = mx.take_along_axis(state.tokens, columns, axis=1)  # [B, 16]
    _, kv = draft.forward(mx.minimum(window, draft.vocab_size - 1), state.draft_kv, start)
    return attrs.evolve(state, draft_kv=kv)


def _known(ids: mx.array, draft: Draft, config: StepConfig, *, committed: bool) -> mx.array:
    """Ids that the draft has rows for: a committed one may be another, since a prompt may hold any of the target's."""
    return mx.minimum(ids, draft.vocab_size - 1) if committed or draft.vocab_size < config.vocab_size else ids


def _room(draft: Draft, state: DecodeState) -> mx.array:
    """int32 [B]: proposals that end before the row's limit and need no position behind the draft's context."""
    return mx.minimum(state.limit - state.length, draft.context - state.length + 1)


def _fit(logits: mx.array, vocab_size: int) -> mx.array:
    """Cut the draft's logits [B, N, V_draft] to the emitted vocabulary, or fill them up with ids it never proposes."""
    logits = logits[..., :vocab_size].astype(mx.float32)
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf)
