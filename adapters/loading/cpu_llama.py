"""A forward of Llama models for MLX's CPU backend.

Same weights and mathematics as mlx-lm's module, in fewer operations: the rotary embedding's angles are computed once
for all layers, and `exp` is written out in arithmetic that the C++ compiler vectorises (MLX's own is scalar on x86).
GPUs have fused kernels for all of this.
"""

import math

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import llama

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


def cpu_llama_forward(module: Module) -> Forward | None:
    """Wrap a module whose layers are all of the plain Llama kind.

    Args:
        module: an mlx-lm model, its weights loaded; dense or quantised.

    Returns:
        The pure forward, which equals the module's up to rounding; None for any other model.
    """
    if type(module) is not llama.Model or any(layer.use_sliding for layer in module.layers):
        return None
    rope = module.layers[0].self_attn.rope
    if type(rope) is not RoPE or rope.traditional or rope.dims != module.layers[0].self_attn.head_dim:
        return None
    exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
    frequencies = rope.scale * mx.exp(-math.log(rope.base) * exponents)  # [D / 2]
    mx.eval(frequencies)

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        width, capacity = tokens.shape[1], kv[0][0].shape[2]
        mask = attention_mask(position, width, capacity)
        rotation = _rotation(position, width, frequencies)
        hidden = module.model.embed_tokens(tokens)  # [B, W] -> [B, W, N]
        written = []
        for layer, (keys, values) in zip(module.layers, kv, strict=True):
            attended, keys, values = _attention(
                layer.self_attn, layer.input_layernorm(hidden), keys, values, position, mask, rotation
            )
            hidden = hidden + attended
            hidden = hidden + _mlp(layer.mlp, layer.post_attention_layernorm(hidden))
            written.append((keys, values))
        hidden = module.model.norm(hidden)
        head = module.model.embed_tokens.as_linear if module.args.tie_word_embeddings else module.lm_head
        return head(hidden), tuple(written)

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
    layer: Module,
    x: mx.array,
    keys: mx.array,
    values: mx.array,
    position: mx.array,
    mask: mx.array,
    rotation: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention of x [B, W, N] over the cache, and the cache with the window written."""
    batch, width, _ = x.shape

    def heads(projected: mx.array, count: int) -> mx.array:
        return projected.reshape(batch, width, count, -1).transpose(0, 2, 1, 3)  # [B, W, H D] -> [B, H, W, D]

    queries = _rotate(heads(layer.q_proj(x), layer.n_heads), rotation)
    keys = write_at(keys, _rotate(heads(layer.k_proj(x), layer.n_kv_heads), rotation), position)
    values = write_at(values, heads(layer.v_proj(x), layer.n_kv_heads), position)
    groups = layer.n_heads // layer.n_kv_heads
    grouped = queries.reshape(batch, layer.n_kv_heads, groups * width, -1)  # [B, Hkv, G W, D]
    scores = (grouped * layer.scale) @ keys.swapaxes(-1, -2)  # [B, Hkv, G W, C]
    admitted = mx.tile(mask, (1, 1, groups, 1)) if groups > 1 else mask  # [B, 1, G W, C]
    scores = mx.where(admitted, scores.astype(mx.float32), -mx.inf)
    weights = exp(scores - mx.max(scores, axis=-1, keepdims=True))
    weights = mx.where(admitted, weights, 0.0)
    weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    attended = weights.astype(values.dtype) @ values  # [B, Hkv, G W, D]
    attended = attended.reshape(batch, layer.n_heads, width, -1).transpose(0, 2, 1, 3)  # -> [B, W, H, D]
    return layer.o_proj(attended.reshape(batch, width, -1)), keys, values


def _mlp(layer: Module, x: mx.array) -> mx.array:
    gate = layer.gate_proj(x)
    activated = gate / (1.0 + exp(-gate.astype(mx.float32))) * layer.up_proj(x)
    projected: mx.array = layer.down_proj(activated.astype(x.dtype))
    return projected
