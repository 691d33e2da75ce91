"""DBRX: mlx-lm chooses experts in a Python loop over their numbers.

Here every expert sees every token, and those that were not chosen count nothing: as many weights are read as a long
window reads anyway.
"""

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from posttrainllm.adapters.loading.layer_caches import LayerViews, flat_views

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["logits"]


def logits(module: "Module", tokens: mx.array, entries: LayerViews) -> mx.array:
    """Run a window, see `FamilyForward`."""
    model: Any = module.transformer
    views = flat_views(entries)
    hidden = model.wte(tokens)
    mask = views[0].make_mask(tokens.shape[1])
    for block, view in zip(model.blocks, views, strict=True):
        residual, normed = block.norm_attn_norm(hidden, mask, view)
        hidden = _experts(block.ffn, normed) + residual
    logits: mx.array = module.lm_head(model.norm_f(hidden))
    return logits


def _experts(block: Any, hidden: mx.array) -> mx.array:
    gates = mx.softmax(block.router(hidden).astype(mx.float32), axis=-1)  # [B, W, experts]
    count = block.num_experts_per_tok
    chosen = mx.argpartition(-gates, kth=count - 1, axis=-1)[..., :count]  # [B, W, count]
    scores = mx.take_along_axis(gates, chosen, axis=-1)
    scores = (scores / mx.sum(mx.abs(scores), axis=-1, keepdims=True)).astype(hidden.dtype)
    weights = mx.put_along_axis(mx.zeros(gates.shape, dtype=hidden.dtype), chosen, scores, axis=-1)
    parts = [weights[..., index, None] * expert(hidden) for index, expert in enumerate(block.experts)]
    return mx.sum(mx.stack(parts), axis=0)  # [experts, B, W, D] -> [B, W, D]
