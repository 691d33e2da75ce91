"""Adapters as PEFT writes them: adapter_config.json with a `peft_type`, and adapter_model.safetensors."""

import re
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.loading.adapter import (
    CONFIG,
    Adapter,
    AdapterKind,
    Update,
    checked,
    count_of,
    number_of,
    read_entries,
)
from posttrainllm.kernel.errors import UnsupportedModelError

__all__ = ["read_peft"]

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+?)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
# what training, or the choice of modules, was told: the tensors themselves show it, or it changes no output
_SILENT = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version"),
    *("qalora_group_size", "r", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora"),
}
# the others (PiSSA, OLoRA, LoftQ and so on) take what they start from out of the model's own weights
_PLAIN_STARTS = (True, False, None, "gaussian", "eva")


def read_peft(path: Path, config: dict[str, Any]) -> Adapter:
    """Describe an adapter of PEFT's.

    Args:
        path: the directory.
        config: of adapter_config.json.

    Returns:
        The description.

    Raises:
        CheckpointError: a field or a tensor is missing, or not what it should be.
        UnsupportedModelError: it is no LoRA, or one with more to it than factors and magnitudes.
    """
    _refuse_foreign(path, config)
    rank, alpha = count_of(path, "r", config.get("r")), number_of(path, "lora_alpha", config.get("lora_alpha"))
    flags = {name: config.get(name, False) for name in ("use_dora", "use_rslora")}
    for name, flag in flags.items():
        checked(path, name, flag, type(flag) is bool, "true or false")
    if (path / "adapter_model.bin").exists() and not (path / "adapter_model.safetensors").exists():
        raise UnsupportedModelError(f"{path}: got adapter_model.bin, expected adapter_model.safetensors")
    file, entries = read_entries(path, "adapter_model.safetensors")
    kind: AdapterKind = "dora" if flags["use_dora"] else "lora"
    adapter = Adapter(name=str(path), path=path, file=file, kind=kind, entries=entries, updates={}, turned=True)
    scale = alpha / (rank**0.5 if flags["use_rslora"] else rank)
    return _with_updates(adapter, rank, scale)


def _refuse_foreign(path: Path, config: dict[str, Any]) -> None:
    """Whatever asks for something, and is not known to change nothing, is refused by its name."""

    def refuse(name: str, expected: str) -> None:
        raise UnsupportedModelError(f"{path}/{CONFIG}: {name}: got {config[name]!r:.100}, expected {expected}")

    if config["peft_type"] != "LORA":
        refuse("peft_type", "LORA")
    if config.get("bias", "none") != "none":
        refuse("bias", "none: biases of an adapter are not read")
    start = config.get("init_lora_weights")
    if not any(start is known or (isinstance(known, str) and start == known) for known in _PLAIN_STARTS):
        refuse("init_lora_weights", "true: an adapter that starts from the model's own weights fits no unchanged model")
    if config.get("alpha_pattern"):
        refuse("alpha_pattern", "one lora_alpha for all modules")
    for name in sorted(config.keys() - _SILENT):
        if config[name]:  # what is not set is null, false or empty
            refuse(name, "none: factors of linear layers, with one rank, are what is read")


def _with_updates(adapter: Adapter, rank: int, scale: float) -> Adapter:
    """Tensors in twos or threes: a module's lora_A and lora_B, and DoRA's magnitude."""
    parts = ["lora_A", "lora_B", *(["lora_magnitude_vector"] if adapter.kind == "dora" else [])]
    found: dict[str, dict[str, str]] = {}
    for name in adapter.entries:
        match = _TENSOR.fullmatch(name)
        if match is None or match["part"] not in parts or (name.endswith((".lora_A", ".lora_B"))):
            raise UnsupportedModelError(
                f"{adapter.file}: got the tensor {name!r:.200}, expected {', '.join(parts)} of linear layers: "
                "no embeddings, biases or whole modules"
            )
        names = found.setdefault(match["module"], {})
        if match["part"] in names:
            adapter.refuse(f"got both {names[match['part']]!r:.200} and {name!r:.200}, expected one of them")
        names[match["part"]] = name
    updates = {}
    for module, names in found.items():
        for part in parts:
            if part not in names:
                adapter.refuse(f"{part} of {module:.200} is missing")
        updates[module] = Update(
            rank=rank,
            scale=scale,
            a=names["lora_A"],
            b=names["lora_B"],
            magnitude=names.get("lora_magnitude_vector"),
        )
    return attrs.evolve(adapter, updates=updates)
