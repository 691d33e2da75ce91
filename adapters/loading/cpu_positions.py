"""What the layers of the CPU's forward need to know of a window's positions: rotation, mask and slots."""

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.llama import LlamaShape
from posttrainllm.kernel.cache import attention_mask, window_slots
from posttrainllm.kernel.constants import indices

__all__ = ["Rotary", "Window", "make_rotary", "make_window"]


@attrs.frozen(eq=False, kw_only=True)
class Rotary:
    """What a rotation is made of, whatever the position."""

    frequencies: mx.array
    """float32 [D]: radians a position, those of the D / 2 pairs twice."""
    own: mx.array
    """float32 [D, D]: 1 on the diagonal."""
    partner: mx.array
    """float32 [D, D]: -1 where row j + D / 2 meets column j, 1 where row j meets column j + D / 2."""


@attrs.frozen(eq=False, kw_only=True)
class Window:
    """What every layer needs to know of the positions."""

    rotation: mx.array
    """float32 [B, W, D, D]: a head times it is the head rotated."""
    admitted: mx.array
    """bool [B, H, G W, L], written out; L is C or the slots that hold the windows."""
    slots: mx.array
    """int32 [B, H, W, D]: where keys and values are written."""


def make_window(
    shape: LlamaShape, position: mx.array, width: int, capacity: int, live: int | None, rotary: Rotary
) -> Window:
    """Work out once what all layers share.

    Args:
        shape: of the model.
        position: int32 [B], absolute position of each window's first token.
        width: W.
        capacity: C.
        live: slots that are looked at, from the first; None for all.
        rotary: of the model.

    Returns:
        The window.
    """
    places = (position[:, None] + indices(width)).astype(mx.float32)  # [B, W]
    angles = places[:, :, None] * rotary.frequencies  # [B, W] -> [B, W, D]
    # a column of each head takes its own place's cosine and its partner's sine: all others add 0
    cosines, sines = mx.cos(angles)[:, :, None], mx.sin(angles)[:, :, None]  # [B, W, D] -> [B, W, 1, D]
    rotation = cosines * rotary.own + sines * rotary.partner  # [B, W, D, D]
    groups = shape.heads // shape.kv_heads
    live = capacity if live is None else live
    mask = attention_mask(position, width, capacity)[:, :, None, :, :live]  # [B, 1, W, C] -> [B, 1, 1, W, L]
    batch = position.shape[0]
    admitted = mx.contiguous(mx.broadcast_to(mask, (batch, shape.kv_heads, groups, width, live)))
    admitted = admitted.reshape(batch, shape.kv_heads, groups * width, live)
    slots = mx.contiguous(window_slots(position, (batch, shape.kv_heads, width, shape.head_size), capacity))
    return Window(rotation=rotation, admitted=admitted, slots=slots)


def make_rotary(shape: LlamaShape) -> Rotary:
    """Make the constants of a model's rotations.

    Args:
        shape: of the model.

    Returns:
        They, evaluated.
    """
    half = shape.head_size // 2
    own = mx.eye(shape.head_size)
    partner = mx.eye(shape.head_size, k=half) - mx.eye(shape.head_size, k=-half)
    frequencies = mx.array(shape.rope_frequencies * 2, dtype=mx.float32)
    mx.eval(own, partner)
    return Rotary(frequencies=frequencies, own=own, partner=partner)
