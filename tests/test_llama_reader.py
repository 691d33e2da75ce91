"""Checkpoints of the Llama shape, read without mlx-lm: the very weights of its modules, or none."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from support import FAMILY_CONFIG, random_weights, save_tiny_llama

from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.llama_reader import read_llama
from posttrainllm.adapters.loading.module_loader import load_module

BASE = FAMILY_CONFIG | {"vocab_size": 96}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama, untied, as many kv heads": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "num_key_value_heads": None,
    },
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, larger heads": {"model_type": "llama", "head_dim": 32},
    "llama3 rope": {"model_type": "llama", "rope_scaling": LLAMA3},
    "linear rope": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 1e6},
    "mistral": {"model_type": "mistral", "sliding_window": 4096, "head_dim": None},
    "qwen2": {"model_type": "qwen2", "head_dim": None, "rope_theta": 1e6},
    "qwen2, untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, rope parameters": {
        "model_type": "qwen3",
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
}
FORMATS = ["float32", "bfloat16", "4-bit", "mixed by layer"]


def config_of(**changes):
    return {key: value for key, value in (BASE | changes).items() if value is not None}


def save(path, config, form="float32"):
    """Write a random model in mlx-lm's layout; norms are random, too, so that mixing them up would show."""
    model_class, args_class = _get_classes(config)
    module = model_class(args_class.from_dict(config))
    random_weights(module, seed=1, dtype=mx.bfloat16 if form == "bfloat16" else mx.float32)
    generator = np.random.default_rng(2)
    norms = {name: array for name, array in tree_flatten(module.parameters()) if "norm" in name}
    drawn = {
        name: mx.array(generator.standard_normal(array.shape)).astype(array.dtype) for name, array in norms.items()
    }
    module.load_weights(list(drawn.items()), strict=False)
    if form in ("4-bit", "mixed by layer"):
        config = config | {"quantization": {"group_size": 32, "bits": 4}}

        def bits_of(name, layer):
            if not hasattr(layer, "to_quantized"):
                return False
            wide = form == "mixed by layer" and (".1." in name or "down_proj" in name or "embed" in name)
            if wide:
                config["quantization"][name] = {"group_size": 64, "bits": 8}
            return {"group_size": 64, "bits": 8} if wide else True

        nn.quantize(module, group_size=32, bits=4, class_predicate=bits_of)
    write(path, config, dict(tree_flatten(module.parameters())))
    return read_checkpoint(path)


def write(path, config, arrays):
    path.mkdir(exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")


def parts_of(weights):
    """Every array by the names of mlx-lm's modules, fused ones as tuples of names."""
    shape = weights.shape
    found = {("model.norm.weight",): weights.norm}
    linears = {("model.embed_tokens",): weights.embedding}
    if weights.head is not weights.embedding:
        linears[("lm_head",)] = weights.head
    for index, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        linears[tuple(f"{attention}{name}_proj" for name in "qkv")] = layer.qkv
        linears[(f"{attention}o_proj",)] = layer.output
        linears[(f"{mlp}gate_proj", f"{mlp}up_proj")] = layer.gate_up
        linears[(f"{mlp}down_proj",)] = layer.down
        found[(f"model.layers.{index}.input_layernorm.weight",)] = layer.input_norm
        found[(f"model.layers.{index}.post_attention_layernorm.weight",)] = layer.mlp_norm
        if layer.query_norm is not None:
            found[(f"{attention}q_norm.weight",)] = layer.query_norm
            found[(f"{attention}k_norm.weight",)] = layer.key_norm
    for names, linear in linears.items():
        for part in ("weight", "bias", "scales", "biases"):
            if getattr(linear, part) is not None:
                found[tuple(f"{name}.{part}" for name in names)] = getattr(linear, part)
    assert len(weights.layers) == shape.layers
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_arrays_are_bit_for_bit_those_of_mlx_lms_module(family, form, dtype, tmp_path):
    checkpoint = save(tmp_path / "model", config_of(**FAMILIES[family]), form)
    weights, module = read_llama(checkpoint, dtype), load_module(checkpoint, dtype)
    expected = dict(tree_flatten(module.parameters()))
    for names, array in parts_of(weights).items():
        theirs = mx.concatenate([expected.pop(name) for name in names], axis=0)
        assert theirs.dtype == array.dtype, names
        assert mx.array_equal(theirs, array), names
    assert not expected, "the module has arrays that were left out"


@pytest.mark.parametrize("form", ["4-bit", "mixed by layer"])
def test_quantised_matrices_keep_the_packing_of_the_module(form, tmp_path):
    checkpoint = save(tmp_path / "model", config_of(model_type="llama"), form)
    weights, module = read_llama(checkpoint, "float32"), load_module(checkpoint, "float32")
    for ours, theirs in zip(weights.layers, module.layers, strict=True):
        for linear, layer in ((ours.qkv, theirs.self_attn.v_proj), (ours.down, theirs.mlp.down_proj)):
            assert (linear.group_size, linear.bits, linear.mode) == (layer.group_size, layer.bits, layer.mode)
    assert weights.embedding.bits == module.model.embed_tokens.bits


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_modes_with_scales_of_a_byte_are_read(mode, tmp_path):
    config = config_of(model_type="llama")
    model_class, args_class = _get_classes(config)
    module = model_class(args_class.from_dict(config))
    group_size = 16 if mode == "nvfp4" else 32
    bits = 8 if mode == "mxfp8" else 4
    nn.quantize(module, group_size=group_size, bits=bits, mode=mode)
    config["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode}
    write(tmp_path / "model", config, dict(tree_flatten(module.parameters())))
    weights = read_llama(read_checkpoint(tmp_path / "model"), "bfloat16")
    assert (weights.layers[0].qkv.mode, weights.layers[0].qkv.bits) == (mode, bits)
    assert weights.layers[0].qkv.scales.dtype == mx.uint8


@pytest.mark.parametrize("family", FAMILIES)
def test_its_frequencies_are_those_by_which_mlx_lm_rotates(family, tmp_path):
    """Heads of ones at position 1: the cosine of an angle minus its sine, and their sum, are what mlx-lm computes."""
    checkpoint = save(tmp_path / "model", config_of(**FAMILIES[family]))
    shape, module = read_llama(checkpoint, "float32").shape, load_module(checkpoint, "float32")
    half = shape.head_size // 2
    rotated = module.layers[0].self_attn.rope(mx.ones((1, 1, 1, shape.head_size)), offset=1)[0, 0, 0].tolist()
    assert len(shape.rope_frequencies) == half
    for index, frequency in enumerate(shape.rope_frequencies):
        assert rotated[index] == pytest.approx(math.cos(frequency) - math.sin(frequency), abs=1e-6)
        assert rotated[index + half] == pytest.approx(math.cos(frequency) + math.sin(frequency), abs=1e-6)
        if shape.rope_base is not None:
            expected = shape.rope_scale * shape.rope_base ** (-2 * index / shape.head_size)
            assert frequency == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_rope_base_that_newer_configs_nest_is_heeded_by_both_loaders(family, tmp_path):
    """transformers 5 writes `rope_parameters`; mlx-lm's Llama and Qwen2 alone would take a base of their own."""
    nested = {"rope_theta": None, "rope_parameters": {"rope_theta": 250000.0, "rope_type": "linear", "factor": 2.0}}
    flat = config_of(model_type=family, rope_theta=250000.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    save(tmp_path / "model", flat)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_of(model_type=family, **nested)))
    checkpoint = read_checkpoint(tmp_path / "model")
    shape, rope = read_llama(checkpoint, "float32").shape, load_module(checkpoint, "float32").layers[0].self_attn.rope
    assert (shape.rope_base, shape.rope_scale) == (rope.base, rope.scale) == (250000.0, 0.5)


OTHERS = {
    "another family": {"model_type": "gemma2", "query_pre_attn_scalar": 16},
    "pairs side by side": {"rope_traditional": True},
    "a sliding window in use": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_of_another_kind_is_left_to_mlx_lm(name, tmp_path):
    config = config_of(**{"model_type": "llama", **OTHERS[name]})
    assert read_llama(save(tmp_path / "model", config), "float32") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 97},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"hidden_size": 32},
        {"intermediate_size": 64},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 3},
        {"head_dim": 8},
        {"head_dim": 15},
        {"head_dim": 0},
        {"attention_bias": True},
        {"attention_bias": "yes"},
        {"tie_word_embeddings": False},
        {"tie_word_embeddings": 1},
        {"rms_norm_eps": None},
        {"rms_norm_eps": "1e-5"},
        {"rope_theta": "x"},
        {"rope_theta": -1},
        {"rope_scaling": "x"},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"vocab_size": 10**12},
        {"hidden_act": "gelu"},
        {"model_file": "code.py"},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization": [4]},
        {"quantization": {}},
        {"text_config": {}},
        {"layer_types": ["full_attention"]},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_or_asks_for_more_is_left_to_mlx_lm(changes, tmp_path):
    save(tmp_path / "model", config_of(model_type="llama"))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_of(model_type="llama", **changes)))
    assert read_llama(read_checkpoint(tmp_path / "model"), "float32") is None


@pytest.mark.parametrize("field", ["hidden_size", "head_dim", "vocab_size", "num_attention_heads"])
def test_a_size_beyond_all_memory_is_refused_without_taking_it(field, tmp_path):
    save(tmp_path / "model", config_of(model_type="llama"))
    config = config_of(model_type="llama", num_key_value_heads=None, **{field: 10**12})
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert read_llama(read_checkpoint(tmp_path / "model"), "float32") is None


def edited(path, edit, form="float32"):
    """A checkpoint whose arrays were changed after it was written."""
    save(path, config_of(model_type="llama"), form)
    arrays = mx.load(str(path / "model.safetensors"))
    mx.eval(arrays)
    edit(arrays)
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    return read_checkpoint(path)


EDITS = {
    "one more": lambda arrays: arrays.update({"model.layers.0.extra.weight": mx.zeros((2, 2))}),
    "one less": lambda arrays: arrays.pop("model.layers.1.mlp.up_proj.weight"),
    "of another shape": lambda arrays: arrays.update({"model.norm.weight": mx.zeros((63,))}),
    "of integers": lambda arrays: arrays.update({"model.norm.weight": mx.zeros((64,), dtype=mx.int32)}),
}


@pytest.mark.parametrize("name", EDITS)
def test_tensors_that_are_not_the_expected_ones_are_left_to_mlx_lm(name, tmp_path):
    assert read_llama(edited(tmp_path / "model", EDITS[name]), "float32") is None


def test_what_mlx_lm_drops_is_dropped(tmp_path):
    def add(arrays):
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((8,))
        arrays["lm_head.weight"] = mx.zeros((96, 64))

    assert read_llama(edited(tmp_path / "model", add), "float32") is not None


def test_bits_that_differ_inside_a_fused_matrix_are_left_to_mlx_lm(tmp_path):
    config = config_of(model_type="llama")
    model_class, args_class = _get_classes(config)
    module = model_class(args_class.from_dict(config))

    def bits_of(name, layer):
        return hasattr(layer, "to_quantized") and {"group_size": 32, "bits": 8 if "v_proj" in name else 4}

    nn.quantize(module, class_predicate=bits_of)
    arrays = dict(tree_flatten(module.parameters()))
    write(tmp_path / "model", config | {"quantization": {"group_size": 32, "bits": 4}}, arrays)
    assert read_llama(read_checkpoint(tmp_path / "model"), "float32") is None


def test_an_entry_of_the_config_that_contradicts_the_shapes_is_left_to_mlx_lm(tmp_path):
    save(tmp_path / "model", config_of(model_type="llama"), "4-bit")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization"]["model.layers.0.mlp.down_proj"] = {"group_size": 32, "bits": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert read_llama(read_checkpoint(tmp_path / "model"), "float32") is None


def test_no_more_than_one_matrix_is_in_memory_twice(tmp_path):
    """Peak beside what stays: the parts of the largest fused matrix. All parts of all layers would be 12 times that."""
    path = save_tiny_llama(tmp_path / "model", seed=1, layers=8)
    checkpoint = read_checkpoint(path)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    weights = read_llama(checkpoint, "float32")
    kept, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    assert peak - kept < 1.5 * weights.layers[0].gate_up.weight.nbytes
