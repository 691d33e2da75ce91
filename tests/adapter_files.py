"""Random adapters written by hand, in mlx-lm's layout and in PEFT's; nothing here is the reader's."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

# [out, in] of the tiny Llama of support.py
MATRICES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
RANK, SCALE = 4, 3.0


def factors(module: str, outputs: int, inputs: int, *, seed: int = 0, rank: int = RANK) -> dict[str, np.ndarray]:
    """A [R, in], B [out, R] and m [out] of a module, by its name and the seed."""
    generator = np.random.default_rng([seed, *module.encode()])
    return {
        "a": generator.standard_normal((rank, inputs)).astype(np.float32) * inputs**-0.5,
        "b": generator.standard_normal((outputs, rank)).astype(np.float32) * 0.3,
        "m": generator.uniform(0.5, 2.0, outputs).astype(np.float32),
    }


def modules_of(layers: int, names=tuple(MATRICES)) -> dict[str, tuple[int, int]]:
    return {f"model.layers.{layer}.{name}": MATRICES[name] for layer in range(layers) for name in names}


def save_mlx_lm(path: Path, modules: dict, *, kind: str = "lora", seed: int = 0, **config) -> Path:
    """As `mlx_lm.lora` writes one."""
    path.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for module, (outputs, inputs) in modules.items():
        found = factors(module, outputs, inputs, seed=seed)
        arrays[f"{module}.lora_a"] = mx.array(found["a"].T)
        arrays[f"{module}.lora_b"] = mx.array(found["b"].T)
        if kind == "dora":
            arrays[f"{module}.m"] = mx.array(found["m"])
    mx.save_safetensors(str(path / "adapters.safetensors"), arrays)
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.1}
    values = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, "model": "x", "iters": 600}
    (path / "adapter_config.json").write_text(json.dumps(values | config))
    return path


def save_peft(path: Path, modules: dict, *, kind: str = "lora", seed: int = 0, **config) -> Path:
    """As `PeftModel.save_pretrained` writes one."""
    path.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for module, (outputs, inputs) in modules.items():
        found = factors(module, outputs, inputs, seed=seed)
        prefix = f"base_model.model.{module}"
        arrays[f"{prefix}.lora_A.weight"] = found["a"]
        arrays[f"{prefix}.lora_B.weight"] = found["b"]
        if kind == "dora":
            arrays[f"{prefix}.lora_magnitude_vector"] = found["m"]
    save_file(arrays, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(PEFT | {"use_dora": kind == "dora"} | config))
    return path


# what peft 0.17 writes for LoraConfig(r=4, lora_alpha=12)
PEFT = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "x",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 12,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": RANK,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
