"""MiniMax-M3: an indexer with keys of its own chooses the blocks of positions that a layer attends to.

mlx-lm cuts the blocks over the entries of its cache and takes a window to stand at their end, which is the capacity
here. The indexer's cache has no values.
"""

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from posttrainllm.adapters.loading.layer_caches import LayerViews
from posttrainllm.kernel.cache import CacheView

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["logits"]


def logits(module: "Module", tokens: mx.array, entries: LayerViews) -> mx.array:
    """Run a window, see `FamilyForward`."""
    text: Any = module.language_model
    model: Any = text.model
    hidden = model.embed_tokens(tokens)
    for layer, entry in zip(model.layers, entries, strict=True):
        assert isinstance(entry, tuple)
        attended = _attention(layer.self_attn, layer.input_layernorm(hidden), entry)
        hidden = hidden + attended
        feed_forward = layer.block_sparse_moe if layer.is_moe else layer.mlp
        hidden = hidden + feed_forward(layer.post_attention_layernorm(hidden))
    hidden = model.norm(hidden)
    head = model.embed_tokens.as_linear if text.args.tie_word_embeddings else text.lm_head
    logits: mx.array = head(hidden)
    return logits


def _attention(attention: Any, hidden: mx.array, views: tuple[CacheView, ...]) -> mx.array:
    rows, width, _ = hidden.shape
    view = views[0]

    def heads(projected: mx.array, count: int, norm: Any) -> mx.array:
        shaped = projected.reshape(rows, width, count, -1).transpose(0, 2, 1, 3)  # [B, H, W, D]
        return norm(shaped) if norm is not None else shaped

    normed = attention.use_qk_norm
    queries = heads(attention.q_proj(hidden), attention.num_attention_heads, attention.q_norm if normed else None)
    keys = heads(attention.k_proj(hidden), attention.num_key_value_heads, attention.k_norm if normed else None)
    values = heads(attention.v_proj(hidden), attention.num_key_value_heads, None)
    queries = attention.rope(queries, offset=view.offset)
    keys = attention.rope(keys, offset=view.offset)
    mask = view.make_mask(width)  # [B, 1, W, C]
    if attention.is_sparse_attn:
        mask = _kept(attention, hidden, mask, views[1])
    keys, values = view.update_and_fetch(keys, values)
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attention.scale, mask=mask)
    output: mx.array = attention.o_proj(attended.transpose(0, 2, 1, 3).reshape(rows, width, -1))  # [B, W, H D]
    return output


def _kept(attention: Any, hidden: mx.array, mask: mx.array, view: CacheView) -> mx.array:
    """The mask of the blocks that the indexer chooses for each query: bool [B, H, W, C]."""
    rows, width, _ = hidden.shape
    count, size, most = attention.index_n_heads, attention.index_block_size, attention.index_topk_blocks
    keys = attention.index_k_norm(attention.index_k_proj(hidden)[:, None])  # [B, W, D] -> [B, 1, W, D]
    keys = attention.index_rope(keys, offset=view.offset)
    keys, _ = view.update_and_fetch(keys, mx.zeros((rows, 1, width, 0), dtype=keys.dtype))
    capacity = keys.shape[2]
    blocks = -(-capacity // size)
    if blocks <= most:
        return mask
    queries = attention.index_q_proj(hidden).reshape(rows, width, count, -1)
    queries = attention.index_rope(attention.index_q_norm(queries).transpose(0, 2, 1, 3), offset=view.offset)
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)  # [B, index heads, W, C]
    scores = mx.where(mask, scores, -mx.inf)  # a slot that no query may see must not win its block
    scores = mx.pad(scores, [(0, 0)] * 3 + [(0, blocks * size - capacity)], constant_values=-mx.inf)
    best = scores.reshape(rows, count, width, blocks, size).max(axis=-1)  # [B, index heads, W, blocks]
    if attention.index_local_blocks > 0:
        own = ((view.offset[:, None] + mx.arange(width)) // size)[:, None, :, None]  # [B, 1, W, 1]
        number = mx.arange(blocks)
        best = mx.where((number <= own) & (number > own - attention.index_local_blocks), mx.inf, best)
    chosen = mx.argpartition(-best, kth=most - 1, axis=-1)[..., :most]
    keep = mx.put_along_axis(mx.zeros(best.shape, dtype=mx.bool_), chosen, mx.array(True), axis=-1)
    keep = mx.repeat(keep, size, axis=-1)[..., :capacity] & mask  # a chosen block may hold slots behind the query
    return mx.repeat(keep, attention.num_attention_heads // count, axis=1)
