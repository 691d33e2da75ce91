"""Moving the state on: the end of every step, speculative or plain."""

import mlx.core as mx

from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.logprobs import token_logprobs
from posttrainllm.kernel.state import DecodeState, KVCache, StepOutput

__all__ = ["commit"]


def commit(
    config: StepConfig,
    state: DecodeState,
    tokens: mx.array,
    accepted: mx.array,
    proposed: mx.array,
    proposals: mx.array,
    logits: mx.array,
    target_kv: KVCache,
    draft_kv: KVCache,
) -> tuple[DecodeState, StepOutput]:
    """Cut `accepted` + 1 ids at the row's limit, write them behind the committed ones and move the length.

    Args:
        config: static shape of the step.
        state: B rows, before the step.
        tokens: int32 [B, W], the ids to emit; behind `accepted` + 1 they mean nothing.
        accepted: int32 [B], how many proposals stand, 0 to K.
        proposed: int32 [B], how many there were.
        proposals: int32 [B, W-1], for the output alone.
        logits: float32 [B, W, V] of the target, raw; where one that decides an emitted id is not finite, the row emits
            none.
        target_kv: the target's cache after its forward.
        draft_kv: the draft's cache after its forwards.

    Returns:
        The next state and what was emitted.
    """
    column = indices(config.width)[None]  # [1, W]
    used = column <= accepted[:, None]  # [B, W]
    finite = mx.all(mx.isfinite(mx.sum(logits, axis=-1)) | ~used, axis=1)  # [B, W, V] -> [B]
    remaining = mx.maximum(state.limit - state.length, 0)
    finite = finite | (remaining == 0)
    emitted = mx.where(finite, mx.minimum(accepted + 1, remaining), 0)
    offset = indices(state.tokens.shape[1])[None] - state.length[:, None]  # [B, C]
    committed = state.tokens
    for index in range(config.width):  # fused to one operation, where a gather would be one of its own
        committed = mx.where((offset == index) & (index < emitted[:, None]), tokens[:, index : index + 1], committed)
    batch = tokens.shape[0]
    if config.logprobs:
        logprob, top_ids, top_logprobs = token_logprobs(logits, tokens)
    else:
        logprob, top_logprobs = mx.zeros((batch, 0)), mx.zeros((batch, 0, 0))
        top_ids = top_logprobs.astype(mx.int32)
    output = StepOutput(
        tokens=mx.where(column < emitted[:, None], tokens, -1),
        emitted=emitted,
        proposed=proposed,
        accepted=mx.minimum(accepted, emitted),
        finite=finite,
        proposals=proposals,
        margin=_margin(logits) if config.diagnostics else mx.zeros((batch, 0)),
        logprob=logprob,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    moved = DecodeState(
        tokens=committed,
        length=state.length + emitted,
        limit=state.limit,
        target_kv=target_kv,
        draft_kv=draft_kv,
        key=state.key,
    )
    return moved, output


def _margin(logits: mx.array) -> mx.array:
    """Best logit minus second best, [B, W, V] to [B, W]."""
    best = mx.argmax(logits, axis=-1, keepdims=True)
    others = mx.where(indices(logits.shape[-1]) == best, -mx.inf, logits)
    return mx.max(logits, axis=-1) - mx.max(others, axis=-1)
