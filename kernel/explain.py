"""What one step saw and decided, laid open: for people who ask why a step emitted what it did.

It is built from the step's own pieces (draft, warps, noise, accept rules) and never runs inside a step, so looking at a
step cannot change it. A test holds its decisions against those of the step.
"""

import attrs
import mlx.core as mx

from posttrainllm.kernel import accept, noise
from posttrainllm.kernel.adjust import adjust, history_of
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.draft import Draft, propose
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.laws import Laws, joined, laws
from posttrainllm.kernel.sampling import choose, filtered, ids_of_best, scaled
from posttrainllm.kernel.state import DecodeState, Sampling

__all__ = ["Explanation", "explain_step"]


@attrs.frozen(eq=False, kw_only=True)
class Explanation:
    """One step of B rows. N is K + 1: 1 without a draft, and the rest of the window decides nothing."""

    proposed: mx.array
    """int32 [B]: how many proposals exist."""
    target_probs: mx.array
    """float32 [B, K]: p of each proposal after adjustments and warps; at temperature 0, where p decides nothing, the
    softmax."""
    draft_probs: mx.array
    """float32 [B, K]: q of each proposal, likewise."""
    uniforms: mx.array
    """float32 [B, K]: what the ratio p / q is held against by `leviathan`."""
    by_ratio: mx.array
    """bool [B]: whether the ratio decides; else a proposal stands when it is the target's own draw."""
    accepts: mx.array
    """bool [B, K]: each proposal judged by itself, whatever came before it."""
    choice: mx.array
    """int32 [B, N]: the target's own draw at each position; at temperature 0 the likeliest id after
    adjustments."""
    residual: mx.array
    """int32 [B, K]: what would be drawn if the proposal were the first refused one: from max(p - q, 0), or from p where
    q is not a number."""
    best: mx.array
    """int32 [B, N, 2]: ids of the two largest target logits, raw: the model's own, before bias and penalties. The
    choice may be another id where a request uses these."""
    margin: mx.array
    """float32 [B, N]: the largest raw target logit minus the second largest."""


def explain_step(
    config: StepConfig,
    target: Forward,
    draft: Draft | None,
    state: DecodeState,
    sampling: Sampling,
    window: mx.array,
) -> Explanation:
    """Judge every proposal of a step that was run, or was recorded.

    Args:
        config: static shape of the step.
        target: the model whose output it is.
        draft: the model that proposed; None for the plain step.
        state: B rows, before the step.
        sampling: B rows.
        window: int32 [B, W], what the target was fed: the last committed id and, with a draft, K proposals.

    Returns:
        The explanation.
    """
    draft = draft if config.proposals > 0 else None
    raw, _ = target(window, state.target_kv, mx.maximum(state.length - 1, 0))
    count = 1 if draft is None else config.proposals + 1
    logits = raw[:, :count, : config.vocab_size].astype(mx.float32)  # [B, W, V] -> [B, N, V]
    history = history_of(config, state, sampling)
    # the plain step fills its window up with an id that is part of no history
    histories = history if history is None or draft is None else history.through(window[:, 1:count])
    judged = filtered(adjust(logits, sampling, histories), sampling, mode=config.mode)
    gumbel = None
    if config.mode != "greedy":
        positions = state.length[:, None] + indices(count)  # [B, N]
        keys = noise.position_keys(state.key, positions, noise.TARGET)
        gumbel = noise.gumbel(keys, config.vocab_size, arithmetic=config.arithmetic)
    choice = choose(scaled(judged, sampling, mode=config.mode), sampling, gumbel)
    by_ratio = ~sampling.coupled & (sampling.temperature > 0)
    descending = mx.argsort(-logits, axis=-1)[..., :2].astype(mx.int32)  # [B, N, V] -> [B, N, 2]
    pair = mx.take_along_axis(logits, descending, axis=-1)  # [B, N, 2]
    shared = {"by_ratio": by_ratio, "choice": choice, "best": descending, "margin": pair[..., 0] - pair[..., 1]}
    batch = window.shape[0]
    if draft is None:
        nothing = mx.zeros((batch, 0))
        return Explanation(
            proposed=mx.zeros((batch,), dtype=mx.int32),
            target_probs=nothing,
            draft_probs=nothing,
            uniforms=nothing,
            accepts=nothing.astype(mx.bool_),
            residual=nothing.astype(mx.int32),
            **shared,
        )
    proposals = window[:, 1:count]
    proposal = propose(config, draft, state, sampling, history, recorded=proposals)
    pairs = joined(judged[:, :-1], proposal.logits, arithmetic=config.arithmetic)  # [B, K, V] -> [B, 2 K, V]
    both = laws(scaled(pairs, sampling, mode=config.mode), arithmetic=config.arithmetic)
    p, q = both.of(proposals)  # [B, K] each
    positions = state.length[:, None] + indices(count - 1)  # [B, K]
    uniforms = noise.uniform(noise.position_keys(state.key, positions, noise.ACCEPT))
    by_choice = accept.coupled_accepts(proposals, choice)
    accepts = mx.where(by_ratio[:, None], accept.leviathan_accepts(p, q, uniforms), by_choice)
    return Explanation(
        proposed=proposal.count,
        target_probs=p,
        draft_probs=q,
        uniforms=uniforms,
        accepts=accepts,
        residual=_residuals(both, gumbel, count - 1),
        **shared,
    )


def _residuals(both: Laws, gumbel: mx.array | None, count: int) -> mx.array:
    """The residual draw at every position as if it were the refused one, int32 [B, K]."""
    batch = both.weights.shape[0]
    if gumbel is None:
        return mx.zeros((batch, count), dtype=mx.int32)
    drawn = []
    for index in range(count):  # one at a time, as in a step
        p, q = both.at(mx.full((batch, 1), index, dtype=mx.int32))  # [B, 1, V] each
        drawn.append(ids_of_best(accept.residual_scores(p, q, gumbel[:, index : index + 1])))
    return mx.concatenate(drawn, axis=1)  # K x [B, 1] -> [B, K]
