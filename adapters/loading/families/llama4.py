"""Llama 4: three layers in four attend inside chunks of positions, the others to everything, without rotation.

mlx-lm drops the chunks that are over, and counts positions in Python numbers. Here all are kept and masked.
"""

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from posttrainllm.adapters.loading.layer_caches import LayerViews, flat_views
from posttrainllm.kernel.cache import CacheView

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["logits"]


def logits(module: "Module", tokens: mx.array, entries: LayerViews) -> mx.array:
    """Run a window, see `FamilyForward`."""
    text: Any = module.language_model
    model, width, views = text.model, tokens.shape[1], flat_views(entries)
    first = views[0]
    places = first.offset[:, None] + mx.arange(width)  # [B, W]
    everything = first.make_mask(width)  # [B, 1, W, C]
    size = model.attention_chunk_size
    slots = mx.arange(everything.shape[-1])
    chunk = everything & (slots // size == places[:, None, :, None] // size)
    hidden = model.embed_tokens(tokens)
    for index, (layer, view) in enumerate(zip(model.layers, views, strict=True)):
        mask = everything if (index + 1) % 4 == 0 else chunk
        hidden = hidden + _attention(layer.self_attn, layer.input_layernorm(hidden), mask, view, places)
        hidden = hidden + layer.feed_forward(layer.post_attention_layernorm(hidden))
    logits: mx.array = text.lm_head(model.norm(hidden))
    return logits


def _attention(attention: Any, hidden: mx.array, mask: mx.array, view: CacheView, places: mx.array) -> mx.array:
    rows, width, _ = hidden.shape

    def heads(projected: mx.array, count: int) -> mx.array:
        return projected.reshape(rows, width, count, -1).transpose(0, 2, 1, 3)  # [B, H, W, D]

    queries = heads(attention.q_proj(hidden), attention.n_heads)
    keys = heads(attention.k_proj(hidden), attention.n_kv_heads)
    values = heads(attention.v_proj(hidden), attention.n_kv_heads)
    if attention.use_rope:
        queries = attention.rope(queries, offset=view.offset)
        keys = attention.rope(keys, offset=view.offset)
    elif attention.attn_temperature_tuning:
        steps = mx.floor((places + 1) / attention.floor_scale) + 1.0  # [B, W]
        scales = mx.log(steps) * attention.attn_scale + 1.0
        queries = (queries * scales[:, None, :, None]).astype(queries.dtype)
    if attention.use_qk_norm:
        queries = mx.fast.rms_norm(queries, weight=None, eps=1e-6)
        keys = mx.fast.rms_norm(keys, weight=None, eps=1e-6)
    keys, values = view.update_and_fetch(keys, values)
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attention.scale, mask=mask)
    output: mx.array = attention.o_proj(attended.transpose(0, 2, 1, 3).reshape(rows, width, -1))  # [B, W, H D]
    return output
