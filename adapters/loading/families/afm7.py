"""AFM: its last layers attend to what the last of the others has written.

mlx-lm rotates their queries by the number of entries in that cache, which is the capacity here.
"""

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from posttrainllm.adapters.loading.layer_caches import LayerViews, flat_views

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["logits"]


def logits(module: "Module", tokens: mx.array, entries: LayerViews) -> mx.array:
    """Run a window, see `FamilyForward`."""
    model: Any = module.model
    width, views = tokens.shape[1], flat_views(entries)
    cache = views[-1]
    hidden = model.embedding(tokens)
    mask = cache.make_mask(width)
    for layer, view in zip(model.layers, views, strict=True):
        hidden = layer(hidden, mask, cache=view)
    keys, values = cache.keys_and_values()
    for layer in model.kv_reuse_layers:
        attended = _attention(layer.self_attn, layer.input_layernorm(hidden), keys, values, mask, cache.offset)
        hidden = hidden + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: mx.array = model.embedding.as_linear(model.output_norm(hidden))
    return logits


def _attention(
    attention: Any, hidden: mx.array, keys: mx.array, values: mx.array, mask: mx.array, position: mx.array
) -> mx.array:
    rows, width, _ = hidden.shape
    queries = attention.q_proj(hidden).reshape(rows, width, attention.n_heads, -1).transpose(0, 2, 1, 3)  # [B, H, W, D]
    queries = attention.q_norm(attention.rope(queries, offset=position))
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attention.scale, mask=mask)
    output: mx.array = attention.out_proj(attended.transpose(0, 2, 1, 3).reshape(rows, width, -1))  # [B, W, H D]
    return output
