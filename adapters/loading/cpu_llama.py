"""A forward of Llama-shaped models for MLX's CPU backend.

Same mathematics as mlx-lm's module, in half as many operations: of a small model's forward, what MLX does about each
operation takes as long as the products. And in operations that the C++ compiler vectorises: fused ones over arrays of
one shape, with nothing to broadcast, and powers of two in plain arithmetic (kernel/arithmetic.py).
GPUs have fused kernels for all of this.
"""

from collections.abc import Callable
from typing import TypeAlias

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.cpu_positions import Rotary, Window, make_rotary, make_window
from posttrainllm.adapters.loading.halves import keep_halves
from posttrainllm.adapters.loading.llama import Linear, LlamaLayer, LlamaShape, LlamaWeights
from posttrainllm.kernel.arithmetic import LOG2_E, exp2
from posttrainllm.kernel.cache import write_slots
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["briefly", "cpu_llama_forward"]

# up to here an `exp` that is a call an element costs less than the dozen operations that do without it
_BRIEF_ROWS = _BRIEF_WIDTH = 2
_BRIEF_SCORES = 8192  # of a token, over all heads and slots

_Product: TypeAlias = Callable[[mx.array], mx.array]


@attrs.frozen(eq=False, kw_only=True)
class _Dense:
    """x @ turned."""

    turned: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.turned


@attrs.frozen(eq=False, kw_only=True)
class _Layer:
    """A block's products; those of a gate and its partner apart, so that neither is a slice of anything."""

    norms: LlamaLayer
    qkv: _Product
    output: _Product
    gate: _Product
    up: _Product
    down: _Product


def cpu_llama_forward(weights: LlamaWeights) -> Forward:
    """Make the forward of a model.

    Args:
        weights: dense or quantised.

    Returns:
        The pure forward, which equals that of mlx-lm's module up to rounding.
    """
    shape = weights.shape
    return _CpuLlama(
        weights=weights,
        layers=tuple(_layer(layer, shape) for layer in weights.layers),
        head=_product(weights.head),
        rotary=make_rotary(shape),
    )


def briefly(forward: Forward) -> Forward | None:
    """The same forward with fewer operations in windows of a token or two of a row or two, in other last bits.

    Args:
        forward: any.

    Returns:
        It, on the same weights; None for a forward of another kind.
    """
    return attrs.evolve(forward, brief=True) if isinstance(forward, _CpuLlama) else None


@attrs.frozen(eq=False, kw_only=True)
class _CpuLlama:
    """The forward; see `kernel.forward.BoundedForward`."""

    weights: LlamaWeights = attrs.field(repr=False)
    layers: tuple[_Layer, ...] = attrs.field(repr=False)
    head: _Product = attrs.field(repr=False)
    rotary: Rotary = attrs.field(repr=False)
    live: int | None = None
    brief: bool = False
    """Whether windows of a token or two are computed in fewer operations, which gives them other last bits than wider
    ones have: a draft's need not be the same at every width."""

    def within(self, live: int) -> Forward:
        """Attend to the first `live` slots alone.

        Behind them every weight is 0, and every sum over slots goes from the first up: 0 changes none of its bits.
        """
        return attrs.evolve(self, live=live)

    def __call__(self, tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        shape, (batch, width) = self.weights.shape, tokens.shape
        keys = kv[0][0]
        live = self.live if keys.dtype == mx.float32 else None  # in 16 bits the sums are MLX's, in blocks
        window = make_window(shape, position, width, keys.shape[2], live, self.rotary)
        # by the capacity and not by the slots that are looked at, on which no bit may depend
        few = batch <= _BRIEF_ROWS and width <= _BRIEF_WIDTH and shape.heads * keys.shape[2] <= _BRIEF_SCORES
        brief = self.brief and few and keys.dtype != mx.float16
        hidden = self.weights.embedding.rows(tokens.reshape(-1))  # [B, W] -> [B W] -> [B W, N]
        written = []
        for layer, (keys, values) in zip(self.layers, kv, strict=True):
            x = _norm(hidden, layer.norms.input_norm, shape)
            attended, keys, values = _attention(layer, shape, x, keys, values, window, brief=brief)
            hidden = hidden + attended
            hidden = hidden + _mlp(layer, _norm(hidden, layer.norms.mlp_norm, shape), brief=brief)
            written.append((keys, values))
        return self.head(_norm(hidden, self.weights.norm, shape)).reshape(batch, width, -1), tuple(written)


def _layer(layer: LlamaLayer, shape: LlamaShape) -> _Layer:
    return _Layer(
        norms=layer,
        qkv=_product(layer.qkv),
        output=_product(layer.output),
        gate=_product(layer.gate_up.part(0, shape.mlp)),
        up=_product(layer.gate_up.part(shape.mlp, 2 * shape.mlp)),
        down=_product(layer.down),
    )


def _product(linear: Linear) -> _Product:
    """The product with a matrix; a dense one is turned here and not in every step, which copies nothing."""
    if linear.scales is not None or linear.bias is not None:
        return linear
    dense = _Dense(turned=linear.weight.T)
    mx.eval(dense.turned)
    keep_halves(dense, linear.weight)
    return dense


def _norm(x: mx.array, weight: mx.array, shape: LlamaShape) -> mx.array:
    """RMS norm of the last axis."""
    normed: mx.array = mx.fast.rms_norm(x, weight, shape.norm_eps)
    return normed


def _attention(
    layer: _Layer, shape: LlamaShape, x: mx.array, keys: mx.array, values: mx.array, window: Window, *, brief: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Attention of x [B W, N] over the cache, and the cache with the window written."""
    batch, width = window.rotation.shape[:2]
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_size
    projected = layer.qkv(x).reshape(batch, width, heads + 2 * kv_heads, size)  # [B W, ...] -> [B, W, heads + 2 H, D]
    turned, new_values = projected[:, :, : heads + kv_heads], projected[:, :, heads + kv_heads :]
    if layer.norms.query_norm is not None and layer.norms.key_norm is not None:
        queries, new_keys = turned[:, :, :heads], turned[:, :, heads:]
        normed = [_norm(queries, layer.norms.query_norm, shape), _norm(new_keys, layer.norms.key_norm, shape)]
        turned = mx.concatenate(normed, axis=2)
    turned = (turned.astype(mx.float32) @ window.rotation).astype(x.dtype)  # [B, W, heads + H, D] @ [B, W, D, D]
    keys = write_slots(keys, _swapped(turned[:, :, heads:]), window.slots)
    values = write_slots(values, _swapped(new_values), window.slots)
    groups, live = heads // kv_heads, window.admitted.shape[-1]
    queries = _swapped(turned[:, :, :heads])  # [B, heads, W, D]
    grouped = queries.reshape(batch, kv_heads, groups * width, size) if groups > 1 else queries  # -> [B, H, G W, D]
    small = x.dtype == mx.float16  # ends at 65504: scaled and divided before a product, not behind it
    grouped = grouped * size**-0.5 if small else grouped
    scores = (grouped @ keys[:, :, :live].swapaxes(-1, -2)).astype(mx.float32)  # [B, H, G W, L]
    scale, seen = 1.0 if small else size**-0.5, values[:, :, :live]
    if brief:
        weights = mx.softmax(mx.where(window.admitted, scores * scale, -mx.inf), axis=-1)
        attended = weights.astype(values.dtype) @ seen  # [B, H, G W, D]
    else:
        attended = _attend(mx.where(window.admitted, scores * (scale * LOG2_E), -mx.inf), seen, divided=small)
    attended = _swapped(attended.reshape(batch, heads, width, size))  # -> [B, W, heads, D]
    return layer.output(attended.astype(x.dtype).reshape(batch * width, heads * size)), keys, values


def _attend(scores: mx.array, values: mx.array, *, divided: bool) -> mx.array:
    """Means of the values [B, H, G W, D], weighted by two to the power of the scores; finite scores stay finite."""
    # flat, or the subtraction's broadcast and the power are one kernel, which is not vectorised
    below = (scores - mx.max(scores, axis=-1, keepdims=True)).reshape(-1)
    weights = exp2(below).reshape(scores.shape)
    # all weights of a row are 0 where a score is not a number: then 0 / 0 tells
    total = mx.sum(weights, axis=-1, keepdims=True)
    if divided:
        return (weights / total).astype(values.dtype) @ values
    return weights.astype(values.dtype) @ values / total


def _swapped(x: mx.array) -> mx.array:
    """[B, M, N, D] with its middle axes swapped; where one of them is 1, the same memory in another shape."""
    batch, first, second, size = x.shape
    return x.reshape(batch, second, first, size) if 1 in (first, second) else x.transpose(0, 2, 1, 3)


def _mlp(layer: _Layer, x: mx.array, *, brief: bool) -> mx.array:
    gate = layer.gate(x).astype(mx.float32)
    if brief:
        return layer.down((gate * mx.sigmoid(gate) * layer.up(x)).astype(x.dtype))
    activated = gate / (1.0 + exp2(gate, -LOG2_E)) * layer.up(x)
    return layer.down(activated.astype(x.dtype))
