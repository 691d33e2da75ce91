"""One decoding step as a pure function, which `compiled.py` compiles.

    step : (DecodeState, Sampling) -> (DecodeState, StepOutput)

The draft proposes K ids, the target scores all of them in one forward of width W, a prefix is accepted, the state moves
on. K is W - 1, or less where `StepConfig.draft_k` says so; the target's bits depend on W alone. There is no global
randomness, no hidden cache, no host sync; shapes are static and whatever changes from step to step is an array.
"""

import mlx.core as mx

from posttrainllm.kernel import accept, noise
from posttrainllm.kernel.adjust import adjust, history_of
from posttrainllm.kernel.commit import commit
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.draft import Draft, Proposal, propose
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.laws import joined, laws
from posttrainllm.kernel.sampling import choose, filtered, ids_of_best, scaled, warp
from posttrainllm.kernel.state import DecodeState, KVCache, Sampling, StepOutput

__all__ = ["plain_step", "speculative_step"]


def speculative_step(
    config: StepConfig, target: Forward, draft: Draft, state: DecodeState, sampling: Sampling
) -> tuple[DecodeState, StepOutput]:
    """Propose K ids a row, verify them in one target forward, commit what stands and one id more.

    At T=0, and with the coupled rule at any T, the emitted ids equal those of `plain_step` at the same width bit for
    bit. With the leviathan rule they follow the target's law exactly.

    Args:
        config: static shape of the step; K = config.proposals must be at least 1.
        target: the model whose output this is.
        draft: the model that proposes.
        state: B rows.
        sampling: B rows.

    Returns:
        The next state and what was emitted.
    """
    K = config.proposals
    draws: noise.StepNoise | None = None
    if config.mode != "greedy":
        draws = noise.step_noise(config, state.key, state.length, sampling.coupled)
    history = history_of(config, state, sampling)
    drawing_noise = None if draws is None else draws.draft
    proposal = propose(config, draft, state, sampling, history, drawing_noise=drawing_noise)
    window, proposed = proposal.ids[:, : config.width], proposal.ids[:, 1 : K + 1]  # [B, W], [B, K]
    # a token's logits do not depend on what follows it, so neither do they on how much of the window is filled up
    logits, target_kv = _score(config, target, state, window)
    judged = logits[:, : K + 1]  # [B, W, V] -> [B, K + 1, V]
    adjusted = adjust(judged, sampling, None if history is None else history.through(proposed))
    judged = filtered(adjusted, sampling, mode=config.mode)
    if draws is None or config.rules == "leviathan":  # what is chosen here is for greedy rows
        choice = choose(judged, sampling, None)  # [B, K + 1]
    else:
        choice = choose(scaled(judged, sampling, mode=config.mode), sampling, draws.target)
    accepts = accept.coupled_accepts(proposed, choice)
    tokens = _filled_up(choice, config.width)  # [B, K + 1] -> [B, W]: what stands is what the target chose
    if draws is None or config.rules == "coupled":
        accepted = accept.prefix_length(accepts, proposal.count)
    else:
        by_ratio = _by_ratio(config, sampling)
        accepted, drawn = _judge_by_ratio(config, sampling, proposal, judged, draws, by_ratio, accepts)
        stands = indices(config.width)[None] < accepted[:, None]  # [B, W]
        tokens = mx.where(by_ratio, mx.where(stands, proposal.ids[:, 1:], drawn), tokens)
    return commit(config, state, tokens, accepted, proposal.count, window[:, 1:], logits, target_kv, proposal.kv)


def plain_step(
    config: StepConfig, target: Forward, state: DecodeState, sampling: Sampling
) -> tuple[DecodeState, StepOutput]:
    """Emit one id a row with no draft, in a window of any width: the reference for `speculative_step`.

    The window is filled up with id 0 behind the last committed one; a token's logits do not depend on what follows it.

    Args:
        config: static shape of the step; config.width is W, 1 or more.
        target: the model.
        state: B rows; `draft_kv` passes through.
        sampling: B rows; `draft_k` and `coupled` are not read.

    Returns:
        The next state and what was emitted; nothing is proposed.
    """
    window = _filled_up(_last_token(state), config.width)  # [B, 1] -> [B, W]
    logits, target_kv = _score(config, target, state, window)
    first_noise = None
    if config.mode != "greedy":
        keys = noise.position_keys(state.key, state.length[:, None], noise.TARGET)
        first_noise = noise.gumbel(keys, config.vocab_size, arithmetic=config.arithmetic)
    adjusted = adjust(logits[:, :1], sampling, history_of(config, state, sampling))  # [B, W, V] -> [B, 1, V]
    choice = choose(warp(adjusted, sampling, mode=config.mode), sampling, first_noise)  # [B, 1]
    tokens = _filled_up(choice, config.width)  # [B, 1] -> [B, W]
    none = mx.zeros_like(state.length)
    return commit(config, state, tokens, none, none, mx.zeros_like(tokens[:, 1:]), logits, target_kv, state.draft_kv)


def _score(config: StepConfig, target: Forward, state: DecodeState, window: mx.array) -> tuple[mx.array, KVCache]:
    """Target logits of the window, float32 [B, W, V], and the cache it wrote."""
    position = mx.maximum(state.length - 1, 0)
    logits, kv = target(window, state.target_kv, position)
    return logits[..., : config.vocab_size].astype(mx.float32), kv


def _filled_up(ids: mx.array, count: int) -> mx.array:
    """Ids [B, N] and id 0 behind them, int32 [B, count]."""
    have = ids.shape[1]
    if have == 1 and count > 1:  # broadcast and fused, where a pad copies
        return mx.where(indices(count)[None] == 0, ids, 0)
    return mx.pad(ids, [(0, 0), (0, count - have)]) if have < count else ids


def _by_ratio(config: StepConfig, sampling: Sampling) -> mx.array:
    """Which rows the leviathan rule judges, bool [B, 1]."""
    sampled = (sampling.temperature > 0)[:, None]
    return sampled & ~sampling.coupled[:, None] if config.rules == "both" else sampled


def _judge_by_ratio(
    config: StepConfig,
    sampling: Sampling,
    proposal: Proposal,
    judged: mx.array,
    draws: noise.StepNoise,
    by_ratio: mx.array,
    accepts: mx.array,
) -> tuple[mx.array, mx.array]:
    """How many proposals stand, int32 [B], and the id that follows them, int32 [B, 1].

    Where `by_ratio`, bool [B, 1], is False: the first as `accepts`, bool [B, K], says; the second means nothing.
    """
    K = config.proposals
    # behind the last proposal none is refused
    logits = joined(judged[:, :-1], proposal.logits, arithmetic=config.arithmetic)  # [B, K, V] -> [B, 2 K, V]
    both = laws(scaled(logits, sampling, mode=config.mode), arithmetic=config.arithmetic)
    target_probs, draft_probs = both.of(proposal.ids[:, 1 : K + 1])  # [B, K] each
    ratio_accepts = accept.leviathan_accepts(target_probs, draft_probs, draws.uniforms)
    accepted = accept.prefix_length(mx.where(by_ratio, ratio_accepts, accepts), proposal.count)
    place = accepted[:, None]  # [B, 1]
    final_noise = draws.target_at(place)  # [B, 1, V]
    refused = accept.residual_scores(*both.at(mx.minimum(place, K - 1)), final_noise)
    stood = scaled(judged[indices(judged.shape[0])[:, None], place], sampling, mode=config.mode) + final_noise
    # the scores of a row are those of one case: a choice that is fused costs less than a second argmax
    scores = mx.where(accepted[:, None, None] < proposal.count[:, None, None], refused, stood)
    return accepted, ids_of_best(scores)  # [B, 1, V] -> [B, 1]


def _last_token(state: DecodeState) -> mx.array:
    """int32 [B, 1]: the last committed id; id 0's slot for a row that was never filled."""
    return mx.take_along_axis(state.tokens, mx.maximum(state.length - 1, 0)[:, None], axis=1)
