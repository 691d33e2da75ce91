"""Adapters as `mlx_lm.lora` writes them: adapter_config.json and adapters.safetensors."""

from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.loading.adapter import CONFIG, Adapter, Update, checked, count_of, number_of, read_entries
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["read_mlx_lm"]

_KINDS = ("lora", "dora", "full")


def read_mlx_lm(path: Path, config: dict[str, Any]) -> Adapter:
    """Describe an adapter of mlx-lm's; its config is that of the training run, most of which says nothing here.

    Args:
        path: the directory.
        config: of adapter_config.json.

    Returns:
        The description.

    Raises:
        CheckpointError: a field or a tensor is missing, or not what it should be.
    """
    if not {"fine_tune_type", "lora_parameters"} & config.keys():
        raise CheckpointError(
            f"{path}/{CONFIG}: got neither peft_type nor fine_tune_type, expected an adapter of PEFT or mlx-lm"
        )
    kind = config.get("fine_tune_type", "lora")
    checked(path, "fine_tune_type", kind, kind in _KINDS, f"one of {', '.join(_KINDS)}")
    file, entries = read_entries(path, "adapters.safetensors")
    if kind == "full":
        return Adapter(name=str(path), path=path, file=file, kind="full", entries=entries, updates={})
    given = config.get("lora_parameters")
    parameters = checked(path, "lora_parameters", given, isinstance(given, dict), "an object with rank and scale")
    rank = count_of(path, "lora_parameters.rank", parameters.get("rank"))
    scale = number_of(path, "lora_parameters.scale", parameters.get("scale"))
    keys = parameters.get("keys")
    named = keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys))
    checked(path, "lora_parameters.keys", keys, named, "a list of modules")
    given = config.get("num_layers")
    layers: int = checked(path, "num_layers", given, type(given) is int, "a whole number, -1 for all")
    adapter = Adapter(
        name=str(path),
        path=path,
        file=file,
        kind="dora" if kind == "dora" else "lora",
        entries=entries,
        updates={},
        last_layers=max(layers, 0) or None,
        keys=None if keys is None else frozenset(keys),
    )
    return _with_updates(adapter, rank, scale)


def _with_updates(adapter: Adapter, rank: int, scale: float) -> Adapter:
    """Tensors in twos or threes: a module's lora_a and lora_b, and the m of DoRA."""
    parts = ("lora_a", "lora_b", "m") if adapter.kind == "dora" else ("lora_a", "lora_b")
    for name in adapter.entries:
        module, _, part = name.rpartition(".")
        if part not in parts or not module:
            adapter.refuse(f"got the tensor {name!r:.200}, expected {', '.join(parts)} of modules")
        for other in parts:
            if f"{module}.{other}" not in adapter.entries:
                adapter.refuse(f"{module:.200}.{other} is missing, {part} of the same module is there")
    modules = dict.fromkeys(name.rpartition(".")[0] for name in adapter.entries)
    updates = {
        module: Update(
            rank=rank,
            scale=scale,
            a=f"{module}.lora_a",
            b=f"{module}.lora_b",
            magnitude=f"{module}.m" if adapter.kind == "dora" else None,
        )
        for module in modules
    }
    return attrs.evolve(adapter, updates=updates)
