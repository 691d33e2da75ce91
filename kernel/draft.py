"""The draft's K forwards.

The first has width 2: it feeds the last two committed tokens, so there is no special case after a window that was
accepted whole. The others feed the newest proposal, and the one before it again unless `StepConfig.narrow_draft`: at
one width everywhere, the draft's cache at a position does not depend on what was accepted before it.
"""

import attrs
import mlx.core as mx

from posttrainllm.kernel import noise
from posttrainllm.kernel.adjust import History, adjust
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.sampling import choose, warp
from posttrainllm.kernel.state import DecodeState, KVCache, Sampling

__all__ = ["Draft", "Proposal", "propose"]


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

    tokens: mx.array
    """int32 [B, K]."""
    count: mx.array
    """int32 [B]: how many of them exist, from 0 to K."""
    warped: mx.array
    """float32 [B, K, V]: the draft's warped logits that they were drawn from."""
    kv: KVCache


def propose(
    config: StepConfig,
    draft: Draft,
    state: DecodeState,
    sampling: Sampling,
    history: History | None,
    *,
    target_noise: mx.array | None = None,
    recorded: mx.array | None = None,
) -> Proposal:
    """Draw K ids a row from the draft, one after the other.

    A row proposes fewer where its request says so, where its limit or the draft's context ends, and from the first
    position at which the draft's logits are not finite.

    Args:
        config: K = config.width - 1.
        draft: the model.
        state: B rows, `draft_kv` valid for positions [0, length - 2).
        sampling: B rows; the same adjustments and warps apply to draft and target.
        history: of the committed ids, from `history_of`; None where the step adjusts nothing.
        target_noise: float32 [B, W, V], what the target draws with, which rows of the coupled rule share; None where it
            is not at hand.
        recorded: int32 [B, K], proposals of an earlier run, to be fed in place of what the draft draws now.

    Returns:
        The proposals and the draft's cache, valid up to the last proposal but one.
    """
    own_noise: mx.array | None
    if config.rules == "coupled" and target_noise is not None:
        own_noise = target_noise[:, : config.width - 1]  # [B, W, V] -> [B, K, V]
    else:
        own_noise = _noise(config, state, sampling)
    kv, warped, tokens, finite = state.draft_kv, [], [], []
    length = mx.maximum(state.length, 1)  # a row that was never filled is fed like one of one token
    start = mx.maximum(length - 2, 0)
    columns = mx.minimum(start[:, None] + indices(2), state.tokens.shape[1] - 1)
    window = mx.take_along_axis(state.tokens, columns, axis=1)  # [B, 2]
    # a one-token prompt starts at 0 and reads its first column, every other the second
    column = (length - 1 - start)[:, None]  # [B, 1]
    last = mx.take_along_axis(window, column, axis=1)  # [B, 1]
    for index in range(config.width - 1):
        logits, kv = draft.forward(mx.minimum(window, draft.vocab_size - 1), kv, start)
        if index == 0:
            logits = mx.take_along_axis(logits, column[..., None], axis=1)  # [B, 2, V] -> [B, 1, V]
        logits = _fit(logits[:, -1:], config.vocab_size)  # [B, 1 or 2, V] -> [B, 1, V]
        warped.append(warp(adjust(logits, sampling, history), sampling, filters=config.filters))
        finite.append(mx.all(mx.isfinite(logits[..., : draft.vocab_size]), axis=-1))
        if recorded is None:
            drawn = choose(warped[-1], sampling, None if own_noise is None else own_noise[:, index : index + 1])
        else:
            drawn = recorded[:, index : index + 1]
        tokens.append(drawn)  # [B, 1]
        history = None if history is None else history.followed_by(drawn)
        if config.narrow_draft:
            window, start = drawn, length + index
        else:
            window, start = mx.concatenate([last, drawn], axis=1), length - 1 + index
        last = drawn
    proposals = mx.concatenate(tokens, axis=1)  # K x [B, 1] -> [B, K]
    usable = mx.sum(mx.cumprod(mx.concatenate(finite, axis=1).astype(mx.int32), axis=1), axis=1)
    count = mx.minimum(mx.minimum(sampling.draft_k, usable), _room(draft, state))
    return Proposal(
        tokens=proposals, count=mx.clip(count, 0, config.width - 1), warped=mx.concatenate(warped, axis=1), kv=kv
    )


def _noise(config: StepConfig, state: DecodeState, sampling: Sampling) -> mx.array | None:
    """float32 [B, K, V]: the target's noise for a coupled row, the draft's own for another."""
    if config.mode == "greedy":
        return None
    positions = state.length[:, None] + indices(config.width - 1)  # [B, K]
    purpose = mx.where(sampling.coupled, noise.TARGET, noise.DRAFT).astype(mx.uint32)
    return noise.gumbel(noise.position_keys(state.key, positions, purpose), config.vocab_size)


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
