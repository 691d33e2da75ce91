"""A forward of Llama-shaped models for MLX's CPU backend.

Same mathematics as mlx-lm's module, in fewer operations: products of the same input are one, the rotary embedding's
angles are computed once for all layers, and `exp` is written out in arithmetic that the C++ compiler vectorises (MLX's
own is scalar on x86). GPUs have fused kernels for all of this.
"""

import math

import mlx.core as mx

from posttrainllm.adapters.loading.llama import LlamaLayer, LlamaShape, LlamaWeights
from posttrainllm.kernel.cache import attention_mask, write_at
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["cpu_llama_forward", "exp"]

# exp(x) = 2**exponent * exp(remainder), with exponent = round(x / ln 2) and |remainder| <= ln(2) / 2
_LOG2_E = 1.0 / math.log(2.0)
_ROUND = 1.5 * 2.0**23  # adding it rounds to an integer, which then stands in the low bits
_LN2_HIGH = 0.693145751953125  # 16 bits, so that exponent * _LN2_HIGH is exact
_LN2_LOW = math.log(2.0) - _LN2_HIGH
# degree 6, the first two as in the series; the others fitted on that interval for the least relative error (3e-9), by
# least squares with Lawson's weights
_COEFFICIENTS = (1.0, 1.0, 0.49999994, 0.16666521, 0.041668389, 0.0083687101, 0.0013814613)


def exp(x: mx.array) -> mx.array:
    """e**x in plain arithmetic, at most 2e-7 off relative to the value; NaN stays NaN.

    Args:
        x: float32 of any shape; taken as -87 below it and as 88 above, where float32 ends.

    Returns:
        float32 of the same shape, always above 0.
    """
    x = mx.clip(x, -87.0, 88.0)
    shifted = x * _LOG2_E + _ROUND
    exponent = shifted - _ROUND
    remainder = x - exponent * _LN2_HIGH - exponent * _LN2_LOW
    series = mx.full((), _COEFFICIENTS[-1])
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        series = coefficient + remainder * series
    power = mx.left_shift(mx.view(shifted, mx.int32) + 127, 23)  # the integer in the place of a float's exponent
    return series * mx.view(power, mx.float32)


def cpu_llama_forward(weights: LlamaWeights) -> Forward:
    """Make the forward of a model.

    Args:
        weights: dense or quantised.

    Returns:
        The pure forward, which equals that of mlx-lm's module up to rounding.
    """
    shape = weights.shape
    frequencies = mx.array(shape.rope_frequencies, dtype=mx.float32)  # [D / 2]

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        width, capacity = tokens.shape[1], kv[0][0].shape[2]
        mask = attention_mask(position, width, capacity)
        rotation = _rotation(position, width, frequencies)
        hidden = weights.embedding.rows(tokens)  # [B, W] -> [B, W, N]
        written = []
        for layer, (keys, values) in zip(weights.layers, kv, strict=True):
            x = mx.fast.rms_norm(hidden, layer.input_norm, shape.norm_eps)
            attended, keys, values = _attention(layer, shape, x, keys, values, position, mask, rotation)
            hidden = hidden + attended
            hidden = hidden + _mlp(layer, mx.fast.rms_norm(hidden, layer.mlp_norm, shape.norm_eps))
            written.append((keys, values))
        return weights.head(mx.fast.rms_norm(hidden, weights.norm, shape.norm_eps)), tuple(written)

    return forward


def _rotation(position: mx.array, width: int, frequencies: mx.array) -> tuple[mx.array, mx.array]:
    """Cosines and signed sines of every position's angles, each float32 [B, 1, W, D]."""
    places = (position[:, None] + mx.arange(width)).astype(mx.float32)  # [B, W]
    angles = places[:, None, :, None] * frequencies  # [B, W] -> [B, 1, W, D / 2]
    cosine, sine = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([cosine, cosine], axis=-1), mx.concatenate([-sine, sine], axis=-1)


def _rotate(x: mx.array, rotation: tuple[mx.array, mx.array]) -> mx.array:
    """Rotate the pairs (i, i + D / 2) of [B, H, W, D]."""
    half = x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return (x * rotation[0] + swapped * rotation[1]).astype(x.dtype)


def _attention(
    layer: LlamaLayer,
    shape: LlamaShape,
    x: mx.array,
    keys: mx.array,
    values: mx.array,
    position: mx.array,
    mask: mx.array,
    rotation: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention of x [B, W, N] over the cache, and the cache with the window written."""
    batch, width, _ = x.shape
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
    # [B, W, (heads + 2 H) D] -> [B, W, heads + 2 H, D]
    projected = layer.qkv(x).reshape(batch, width, heads + 2 * kv_heads, size)
    queries, new_keys, new_values = mx.split(projected, (heads, heads + kv_heads), axis=2)
    if layer.query_norm is not None and layer.key_norm is not None:
        queries = mx.fast.rms_norm(queries, layer.query_norm, shape.norm_eps)
        new_keys = mx.fast.rms_norm(new_keys, layer.key_norm, shape.norm_eps)
    queries = _rotate(queries.transpose(0, 2, 1, 3), rotation)  # [B, W, heads, D] -> [B, heads, W, D]
    keys = write_at(keys, _rotate(new_keys.transpose(0, 2, 1, 3), rotation), position)
    values = write_at(values, new_values.transpose(0, 2, 1, 3), position)
    groups = heads // kv_heads
    grouped = queries.reshape(batch, kv_heads, groups * width, size)  # [B, heads, W, D] -> [B, H, G W, D]
    scores = (grouped * size**-0.5) @ keys.swapaxes(-1, -2)  # [B, H, G W, C]
    admitted = mx.tile(mask, (1, 1, groups, 1)) if groups > 1 else mask  # [B, 1, G W, C]
    scores = mx.where(admitted, scores.astype(mx.float32), -mx.inf)
    weights = exp(scores - mx.max(scores, axis=-1, keepdims=True))
    weights = mx.where(admitted, weights, 0.0)
    weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    attended = weights.astype(values.dtype) @ values  # [B, H, G W, D]
    attended = attended.reshape(batch, heads, width, size).transpose(0, 2, 1, 3)  # -> [B, W, heads, D]
    return layer.output(attended.reshape(batch, width, heads * size)), keys, values


def _mlp(layer: LlamaLayer, x: mx.array) -> mx.array:
    gate, up = mx.split(layer.gate_up(x), 2, axis=-1)
    activated = gate / (1.0 + exp(-gate.astype(mx.float32))) * up
    return layer.down(activated.astype(x.dtype))
