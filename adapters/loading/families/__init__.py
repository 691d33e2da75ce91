"""What mlx-lm's modules need beside views: forwards of our own for a few, and those that cannot be used.

A module that computes with the number of entries in its cache, or with a position as a Python number, gives a wrong
output or cannot be traced when the capacity is static and positions are arrays. Such a one gets a forward here that
calls the module's own layers and differs in that alone.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import mlx.core as mx

from posttrainllm.adapters.loading.layer_caches import LayerViews
from posttrainllm.kernel.errors import UnsupportedModelError

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["FamilyForward", "check_family", "family_forward", "family_of"]

FamilyForward = Callable[["Module", mx.array, LayerViews], mx.array]
"""(module, tokens int32 [B, W], its views) -> logits [B, W, V]."""

_FORWARDS = {
    "afm7": "afm7",
    "dbrx": "dbrx",
    "gpt2": "learned_positions",
    "gpt_bigcode": "learned_positions",
    "llama4": "llama4",
    "minimax_m3_vl": "minimax_m3_vl",
}
_UNUSABLE = {
    "phi3small": "mlx-lm's block-sparse attention lets a token of a window see the later ones of its block: "
    "what it computes is no function of what came before",
}


def family_of(module: "Module") -> str:
    """mlx-lm's name of a module's architecture."""
    return type(module).__module__.rsplit(".", 1)[-1]


def family_forward(family: str) -> FamilyForward | None:
    """A family's forward, None where its module is called as it is."""
    if family not in _FORWARDS:
        return None
    forward: FamilyForward = import_module(f"{__name__}.{_FORWARDS[family]}").logits
    return forward


def check_family(family: str, *, name: str) -> None:
    """Refuse an architecture whose module is known not to work.

    Args:
        family: mlx-lm's name of it.
        name: of the model, for the message.

    Raises:
        UnsupportedModelError: with the reason.
    """
    if family in _UNUSABLE:
        raise UnsupportedModelError(f"{name}: {family} cannot be used: {_UNUSABLE[family]}")
