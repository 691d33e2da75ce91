"""GPT-2 and GPT-BigCode: positions are looked up, and MLX checks no index.

A window's padding may stand behind the last position. GPT-BigCode counts them in Python numbers, too.
"""

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from posttrainllm.adapters.loading.layer_caches import LayerViews, flat_views

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["logits"]


def logits(module: "Module", tokens: mx.array, entries: LayerViews) -> mx.array:
    """Run a window, see `FamilyForward`."""
    model: Any = module.model if "model" in module else module.transformer
    width, views = tokens.shape[1], flat_views(entries)
    first = views[0]
    places = mx.minimum(first.offset[:, None] + mx.arange(width), model.wpe.weight.shape[0] - 1)  # [B, W]
    hidden = model.wte(tokens) + model.wpe(places)
    mask = first.make_mask(width)
    for layer, view in zip(model.h, views, strict=True):
        hidden = layer(hidden, mask, cache=view)
    tied = getattr(module.args, "tie_word_embeddings", True)  # GPT-2 has no other head
    logits: mx.array = (model.wte.as_linear if tied else module.lm_head)(model.ln_f(hidden))
    return logits
