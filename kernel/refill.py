"""One recorded step repeated for its caches alone: what a replay does with the steps before the one it starts at."""

import attrs
import mlx.core as mx

from posttrainllm.kernel.commit import commit
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.draft import Draft, propose
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import DecodeState, Sampling

__all__ = ["refill_step"]


def refill_step(
    config: StepConfig,
    target: Forward,
    draft: Draft | None,
    state: DecodeState,
    window: mx.array,
    tokens: mx.array,
    emitted: mx.array,
) -> DecodeState:
    """Run the forwards of a recorded step, at its widths and positions, and commit what it emitted.

    Nothing is drawn or judged, so it needs neither noise nor sampling values; what a forward writes does not depend on
    them. The caches get the bits that the step itself would write.

    Args:
        config: static shape of the step.
        target: the model whose output was recorded.
        draft: the model that proposed; None for a plain run.
        state: B rows, before the step.
        window: int32 [B, W], what the target was fed: the last committed id and, with a draft, its proposals.
        tokens: int32 [B, W], the ids that were emitted; behind `emitted` they mean nothing.
        emitted: int32 [B], how many there were, 0 to W.

    Returns:
        The state after the step.
    """
    config = attrs.evolve(config, logprobs=False)
    _, target_kv = target(window, state.target_kv, mx.maximum(state.length - 1, 0))
    draft_kv, proposals = state.draft_kv, window[:, 1:]
    batch = window.shape[0]
    if draft is not None and config.proposals > 0:
        draft_kv = propose(config, draft, state, _greedy(batch), None, recorded=proposals).kv
    none = mx.zeros((batch,), dtype=mx.int32)
    judged = mx.zeros((batch, config.width, 1))  # finite: what a step emitted was not refused
    return commit(config, state, tokens, emitted - 1, none, proposals, judged, target_kv, draft_kv)[0]


def _greedy(batch: int) -> Sampling:
    """Values that are not read: the proposals are known."""
    return Sampling(
        temperature=mx.zeros((batch,)),
        top_k=mx.zeros((batch,), dtype=mx.int32),
        top_p=mx.ones((batch,)),
        min_p=mx.zeros((batch,)),
        draft_k=mx.zeros((batch,), dtype=mx.int32),
        coupled=mx.zeros((batch,), dtype=mx.bool_),
        prompt_length=mx.zeros((batch,), dtype=mx.int32),
        presence_penalty=mx.zeros((batch,)),
        frequency_penalty=mx.zeros((batch,)),
        repetition_penalty=mx.ones((batch,)),
        bias=mx.zeros((batch, 0)),
    )
