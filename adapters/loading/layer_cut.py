"""A model of another one's first layers: its embedding, its first N blocks, its last norm and its head."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrainllm.kernel.errors import UnsupportedModelError, UsageError

__all__ = ["cut_config", "layer_of"]

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# one entry a layer
_LISTS = (
    *("activation_sparsity_pattern", "block_configs", "hybrid_layer_pattern", "layer_types"),
    *("mlp_layer_types", "moe_layer_freq", "no_rope_layers"),
)


def layer_of(name: str) -> int | None:
    """The block that a tensor belongs to, None where it belongs to none."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def cut_config(path: Path, config: Mapping[str, Any], tensors: set[str], layers: int) -> dict[str, Any]:
    """The config of the model that is left.

    Args:
        path: of the model, for messages.
        config: of config.json.
        tensors: names of all tensors.
        layers: how many blocks are kept.

    Returns:
        A changed copy.

    Raises:
        UsageError: there are not more blocks than that.
        UnsupportedModelError: which tensors belong to which block cannot be told.
    """
    nested = config.get("text_config")
    scope: Mapping[str, Any] = nested if isinstance(nested, dict) and not set(_COUNTS) & config.keys() else config
    name = next((name for name in _COUNTS if type(scope.get(name)) is int), None)
    found = {layer for tensor in tensors if (layer := layer_of(tensor)) is not None}
    if name is None or found != set(range(scope[name])):
        got = "no number of layers" if name is None else f"{name} {scope[name]} and tensors of {len(found)} blocks"
        raise UnsupportedModelError(f"{path}: --layers: got {got}, expected a stack of numbered layers")
    if not 0 < layers < scope[name]:
        raise UsageError(f"--layers: got {layers}, expected 1 to {scope[name] - 1}, fewer than {path} has")
    total = scope[name]
    changed = {**scope, **{count: layers for count in _COUNTS if scope.get(count) == total}}
    for key in _LISTS:
        if isinstance(scope.get(key), list):
            changed[key] = scope[key][:layers]
    return changed if scope is config else {**config, "text_config": changed}
