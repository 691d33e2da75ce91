"""A forward of a GPT with learned positions, in plain MLX for every device."""

import math

import mlx.core as mx

from posttrainllm.adapters.loading.gpt import GptLayer, GptShape, GptWeights
from posttrainllm.kernel.cache import attention_mask, write_at
from posttrainllm.kernel.constants import indices
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["gpt_forward"]


def gpt_forward(weights: GptWeights) -> Forward:
    """Make the forward of a model.

    Args:
        weights: in memory.

    Returns:
        The pure forward. Positions behind the context, where a window may end and whose logits nobody reads, get the
        last one's embedding, since MLX checks no index.
    """
    shape = weights.shape

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        width, capacity = tokens.shape[1], kv[0][0].shape[2]
        places = mx.minimum(position[:, None] + indices(width), shape.context - 1)  # [B, W]
        hidden = weights.tokens[tokens] + weights.positions[places]  # [B, W] -> [B, W, N]
        mask = attention_mask(position, width, capacity)
        written = []
        for layer, (keys, values) in zip(weights.layers, kv, strict=True):
            queries, new_keys, new_values = _heads(layer, shape, hidden)
            keys, values = write_at(keys, new_keys, position), write_at(values, new_values, position)
            hidden = hidden + _attended(layer, shape, queries, keys, values, mask)
            hidden = hidden + layer.fall(_gelu(layer.rise(layer.mlp_norm(hidden, shape.norm_eps))))
            written.append((keys, values))
        return weights.norm(hidden, shape.norm_eps) @ weights.tokens.T, tuple(written)

    return forward


def _heads(layer: GptLayer, shape: GptShape, hidden: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values, [B, H, W, D] each, of the stream [B, W, N]."""
    batch, width, _ = hidden.shape
    projected = layer.qkv(layer.attention_norm(hidden, shape.norm_eps))
    # [B, W, 3 N] -> [B, W, 3 H, D] -> [B, 3 H, W, D]
    projected = projected.reshape(batch, width, 3 * shape.heads, shape.head_size).transpose(0, 2, 1, 3)
    queries, keys, values = mx.split(projected, 3, axis=1)
    return queries, keys, values


def _attended(
    layer: GptLayer, shape: GptShape, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array
) -> mx.array:
    """What attention adds to the residual stream, [B, W, N]."""
    attended = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=shape.head_size**-0.5, mask=mask)
    batch, _, width, _ = attended.shape
    return layer.output(attended.transpose(0, 2, 1, 3).reshape(batch, width, -1))  # [B, H, W, D] -> [B, W, N]


def _gelu(x: mx.array) -> mx.array:
    """The exact one, by the error function."""
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2
