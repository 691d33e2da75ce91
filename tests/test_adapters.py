"""LoRA and DoRA: the logits are mlx-lm's, the promises hold, and what is changed shows in every fingerprint."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from adapter_files import MATRICES, RANK, SCALE, factors, modules_of, save_mlx_lm, save_peft
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import _get_classes, load_model
from support import FAMILY_CONFIG, decode, random_weights, without_draft

from posttrainllm.adapters.gate.key import models_of
from posttrainllm.adapters.loading.adapter import read_adapter
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.fused_llama import fused_llama_forward
from posttrainllm.adapters.loading.llama_reader import read_llama
from posttrainllm.adapters.loading.pair import load_pair, with_draft
from posttrainllm.adapters.replay.describe import fingerprints_of

KINDS = ("lora", "dora")
IDS = mx.array([[5, 6, 7, 8, 9, 10, 11, 300, 4000, 2]], dtype=mx.int32)
PROMPTS = ([3], [4, 5, 6, 7], [8, 9] * 20)
EXACT = 2e-5  # float32: of the largest logit, which is about 7; measured: 1.1e-6


@pytest.fixture(scope="module", params=KINDS)
def adapter(request, tmp_path_factory):
    return save_mlx_lm(tmp_path_factory.mktemp("adapter") / request.param, modules_of(2), kind=request.param)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return save_mlx_lm(tmp_path_factory.mktemp("lora") / "adapter", modules_of(2))


@pytest.fixture(scope="module")
def draft_lora(tmp_path_factory):
    return save_mlx_lm(tmp_path_factory.mktemp("draft") / "adapter", modules_of(1), seed=9)


def save_family(path, base, config, *, bits=None):
    """A random model of any architecture, with the tokenizer of another directory."""
    model_class, args_class = _get_classes(config)
    module = model_class(args_class.from_dict(config))
    random_weights(module, seed=1, dtype=mx.float32)
    if bits is not None:
        nn.quantize(module, group_size=32, bits=bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    shutil.copytree(base, path)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    return path


def target_of(path, adapter=None, **options):
    return load_pair(path, changes=ModelChanges(adapter_path=adapter), **options).target


def logits_of(model, ids=IDS):
    return model.forward(ids, model.make_kv(1, 64), mx.zeros((1,), dtype=mx.int32))[0]


def theirs(path, adapter, ids=IDS, dtype=None):
    """What mlx-lm's `load(path, adapter_path=adapter)` computes; its tokenizer is left out."""
    module = load_model(path)[0]
    if dtype is not None:
        module.set_dtype(dtype)
    load_adapters(module, str(adapter)).eval()
    return module(ids)


def apart(ours, others):
    """The largest difference, of the largest logit."""
    ours, others = ours.astype(mx.float32), others.astype(mx.float32)
    return float(mx.max(mx.abs(ours - others)) / mx.max(mx.abs(others)))


# the mathematics


def test_fused_logits_are_those_of_mlx_lm_up_to_rounding(tiny_checkpoint, adapter):
    model, expected = target_of(tiny_checkpoint, adapter), theirs(tiny_checkpoint, adapter)
    assert model.variant != "module"
    assert apart(logits_of(model), expected) < EXACT
    assert apart(logits_of(target_of(tiny_checkpoint)), expected) > 0.1  # it is the adapter that is compared
    weights = read_llama(read_checkpoint(tiny_checkpoint), "float32", read_adapter(adapter))
    fused = fused_llama_forward(weights)(IDS, model.make_kv(1, 64), mx.zeros((1,), dtype=mx.int32))[0]
    assert apart(fused, expected) < EXACT


def test_in_bfloat16_fused_logits_are_as_close_as_its_rounding(tiny_checkpoint, adapter):
    model = target_of(tiny_checkpoint, adapter, dtype="bfloat16")
    assert model.variant != "module"
    difference = apart(logits_of(model), theirs(tiny_checkpoint, adapter, dtype=mx.bfloat16))
    assert difference < 5e-2  # measured: 1e-2
    plain = apart(logits_of(target_of(tiny_checkpoint, dtype="bfloat16")), logits_of(target_of(tiny_checkpoint)))
    assert difference < 4 * plain  # rounding without any adapter


@pytest.mark.parametrize("bits", [4, 8])
def test_on_quantised_weights_the_bits_are_those_of_mlx_lm(tiny_checkpoint, adapter, tmp_path, bits):
    """Nothing is quantised again: the packed weights are read as they are, and the update stays beside them."""
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    path = save_family(tmp_path / "quantised", tiny_checkpoint, config, bits=bits)
    model = target_of(path, adapter, dtype="float32")
    assert model.variant == "module"
    assert mx.array_equal(logits_of(model), theirs(path, adapter))
    assert not mx.array_equal(logits_of(model), logits_of(target_of(path, dtype="float32")))


@pytest.mark.parametrize("bits", [3, 6])
def test_dora_fits_bits_that_mlx_lm_takes_for_another_size(tiny_checkpoint, tmp_path, bits):
    """mlx-lm's own loader refuses these; so they are held against a dense model of the unpacked weights."""
    adapter = save_mlx_lm(tmp_path / "dora", modules_of(2), kind="dora")
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    path = save_family(tmp_path / "quantised", tiny_checkpoint, config, bits=bits)
    arrays = mx.load(str(path / "model.safetensors"))
    unpacked = {
        name: mx.dequantize(
            array, arrays[name.replace("weight", "scales")], arrays[name.replace("weight", "biases")], 32, bits
        )
        if array.dtype == mx.uint32
        else array
        for name, array in arrays.items()
        if not name.endswith((".scales", ".biases"))
    }
    dense = shutil.copytree(tiny_checkpoint, tmp_path / "dense")
    mx.save_safetensors(str(dense / "model.safetensors"), unpacked)
    ours = logits_of(target_of(path, adapter, dtype="float32"))
    assert apart(ours, logits_of(target_of(dense, adapter))) < EXACT
    with pytest.raises(ValueError, match="does not match"):
        theirs(path, adapter)


def test_with_forward_module_the_bits_are_those_of_mlx_lm(tiny_checkpoint, adapter):
    model = target_of(tiny_checkpoint, adapter, forward="module")
    assert mx.array_equal(logits_of(model), theirs(tiny_checkpoint, adapter))


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ({"model_type": "gemma2", "query_pre_attn_scalar": 16}, modules_of(2)),
        ({"model_type": "phi3"}, {f"model.layers.{layer}.self_attn.qkv_proj": (128, 64) for layer in range(2)}),
    ],
    ids=["gemma2", "phi3"],
)
def test_other_architectures_take_them_with_the_bits_of_mlx_lm(tiny_checkpoint, tmp_path, family, modules):
    path = save_family(tmp_path / "model", tiny_checkpoint, FAMILY_CONFIG | {"vocab_size": 4096} | family)
    for kind in KINDS:
        adapter = save_mlx_lm(tmp_path / kind, modules, kind=kind)
        ours = logits_of(target_of(path, adapter))
        assert mx.array_equal(ours, theirs(path, adapter))
        assert apart(ours, logits_of(target_of(path))) > 0.01


@pytest.mark.parametrize("bits", [None, 4])
def test_experts_take_lora_with_the_bits_of_mlx_lm(tiny_checkpoint, tmp_path, bits):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral", "vocab_size": 4096}
    path = save_family(tmp_path / "model", tiny_checkpoint, FAMILY_CONFIG | experts, bits=bits)
    generator, arrays = np.random.default_rng(1), {}
    for layer in range(2):
        name = f"model.layers.{layer}.block_sparse_moe.switch_mlp.up_proj"
        arrays[f"{name}.lora_a"] = mx.array(generator.standard_normal((4, RANK, 64)).astype(np.float32))
        arrays[f"{name}.lora_b"] = mx.array(generator.standard_normal((4, 128, RANK)).astype(np.float32))
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), arrays)
    ours = logits_of(target_of(path, adapter, dtype="float32"))
    assert mx.array_equal(ours, theirs(path, adapter))
    assert apart(ours, logits_of(target_of(path, dtype="float32"))) > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stabilised", [False, True])
def test_adapters_of_peft_are_its_formula_in_float64(tiny_checkpoint, tmp_path, kind, stabilised):
    """W + alpha / r B A, rows scaled to m under DoRA; alpha / sqrt(r) with use_rslora."""
    path = save_peft(tmp_path / "peft", modules_of(2), kind=kind, use_rslora=stabilised)
    layer = read_llama(read_checkpoint(tiny_checkpoint), "float32", read_adapter(path)).layers[1]
    base = mx.load(str(tiny_checkpoint / "model.safetensors"))
    fused = {"mlp.down_proj": layer.down, "self_attn.o_proj": layer.output, "mlp.up_proj": layer.gate_up.part(128, 256)}
    for name, linear in fused.items():
        module, shape = f"model.layers.1.{name}", MATRICES[name]
        found = {part: array.astype(np.float64) for part, array in factors(module, *shape).items()}
        scale = 12 / (2 if stabilised else 4)
        expected = np.array(base[f"{module}.weight"]).astype(np.float64) + scale * found["b"] @ found["a"]
        if kind == "dora":
            expected *= (found["m"] / np.linalg.norm(expected, axis=1))[:, None]
        np.testing.assert_allclose(np.array(linear.weight), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_factors_are_the_same_model_in_both_formats(tiny_checkpoint, tmp_path, kind):
    one = save_mlx_lm(tmp_path / "mlx-lm", modules_of(2), kind=kind)
    other = save_peft(tmp_path / "peft", modules_of(2), kind=kind)  # 12 / 4 is the other's scale
    assert SCALE == 12 / RANK
    for options in ({}, {"forward": "module"}):
        ours, others = (logits_of(target_of(tiny_checkpoint, path, **options)) for path in (one, other))
        assert mx.array_equal(ours, others)


def test_a_full_fine_tune_replaces_weights(tiny_checkpoint, tmp_path):
    base = mx.load(str(tiny_checkpoint / "model.safetensors"))
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight")
    adapter = tmp_path / "full"
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {name: base[name] * 1.5 + 0.1 for name in names})
    (adapter / "adapter_config.json").write_text('{"fine_tune_type": "full", "num_layers": 1}')
    expected = theirs(tiny_checkpoint, adapter)
    assert mx.array_equal(logits_of(target_of(tiny_checkpoint, adapter, forward="module")), expected)
    assert apart(logits_of(target_of(tiny_checkpoint, adapter)), expected) < EXACT
    assert apart(logits_of(target_of(tiny_checkpoint)), expected) > 0.1


def test_layers_that_an_adapter_leaves_out_stay_as_they_are(tiny_checkpoint, tmp_path):
    modules = {name: shape for name, shape in modules_of(2).items() if ".1.self_attn.q" in name or ".1.mlp.up" in name}
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    adapter = save_mlx_lm(tmp_path / "last", modules, num_layers=1, lora_parameters=parameters)
    assert apart(logits_of(target_of(tiny_checkpoint, adapter)), theirs(tiny_checkpoint, adapter)) < EXACT
    ours = read_llama(read_checkpoint(tiny_checkpoint), "float32", read_adapter(adapter))
    plain = read_llama(read_checkpoint(tiny_checkpoint), "float32")
    assert all(mx.array_equal(a, b) for a, b in zip(ours.layers[0].arrays, plain.layers[0].arrays, strict=True))


# pairs


PAIRS = [
    (kind, where, forward) for kind in KINDS for where in ("target", "draft", "both") for forward in ("auto", "module")
]
FAST = {("lora", "target", "auto"), ("dora", "both", "module"), ("lora", "draft", "auto")}


@pytest.mark.parametrize(
    ("kind", "where", "forward"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in PAIRS],
)
def test_speculation_changes_nothing_with_an_adapter(
    tiny_checkpoint, tiny_draft_checkpoint, draft_lora, tmp_path, kind, where, forward
):
    adapter = save_mlx_lm(tmp_path / kind, modules_of(2), kind=kind)
    changes = ModelChanges(
        adapter_path=adapter if where != "draft" else None,
        draft_adapter_path=draft_lora if where != "target" else None,
    )
    pair = load_pair(tiny_checkpoint, tiny_draft_checkpoint, forward=forward, changes=changes)
    bare = load_pair(tiny_checkpoint, tiny_draft_checkpoint, forward=forward)
    ids = decode(pair, PROMPTS, width=5, count=32)
    assert ids == decode(without_draft(pair), PROMPTS, width=5, count=32)
    assert (ids == decode(bare, PROMPTS, width=5, count=32)) == (where == "draft")
    coupled = {"temperature": 0.8, "coupled": True}
    sampled = decode(pair, PROMPTS, width=5, count=32, **coupled)
    assert sampled == decode(without_draft(pair), PROMPTS, width=5, count=32, **coupled)


def test_each_model_gets_its_own_adapter(tiny_checkpoint, tiny_draft_checkpoint, lora, draft_lora):
    changes = ModelChanges(adapter_path=lora, draft_adapter_path=draft_lora)
    pair = load_pair(tiny_checkpoint, tiny_draft_checkpoint, changes=changes)
    assert apart(logits_of(pair.target), theirs(tiny_checkpoint, lora)) < EXACT
    assert apart(logits_of(pair.draft), theirs(tiny_draft_checkpoint, draft_lora)) < EXACT
    alone = load_pair(tiny_checkpoint, tiny_draft_checkpoint, changes=ModelChanges(adapter_path=lora))
    plain = load_pair(tiny_checkpoint, tiny_draft_checkpoint)
    assert mx.array_equal(logits_of(alone.draft), logits_of(plain.draft))
    assert (pair.target.adapter, pair.draft.adapter, alone.draft.adapter) == (str(lora), str(draft_lora), None)


def test_what_was_changed_is_still_said_of_a_pair_whose_draft_was_added(tiny_checkpoint, tiny_draft_checkpoint, lora):
    plain = load_pair(tiny_checkpoint, changes=ModelChanges(adapter_path=lora))
    pair = with_draft(plain, tiny_draft_checkpoint)
    assert pair.adapters == {"target": str(lora)}
    assert [line for line in pair.notes if line.startswith(f"target adapter {lora}: ")] == list(plain.notes[-1:])


def test_the_module_beside_a_forward_of_ours_has_the_adapter(tiny_checkpoint, adapter):
    """What the gate compares with, and what `bench` runs as mlx-lm."""
    model = target_of(tiny_checkpoint, adapter)
    assert mx.array_equal(model.module(IDS), theirs(tiny_checkpoint, adapter))


def test_fingerprints_and_keys_are_those_of_the_adapters_content(
    tiny_checkpoint, tiny_draft_checkpoint, lora, tmp_path
):
    def pair(target=None, draft=None):
        changes = ModelChanges(adapter_path=target, draft_adapter_path=draft)
        return load_pair(tiny_checkpoint, tiny_draft_checkpoint, changes=changes)

    moved = shutil.copytree(lora, tmp_path / "moved")
    other = save_mlx_lm(tmp_path / "other", modules_of(2), seed=1)
    config = json.loads((lora / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = 2.0
    scaled = shutil.copytree(lora, tmp_path / "scaled")
    (scaled / "adapter_config.json").write_text(json.dumps(config))
    small = save_mlx_lm(tmp_path / "small", modules_of(1))
    pairs = [pair(), pair(lora), pair(other), pair(scaled), pair(None, small), pair(small), pair(small, small)]
    for name in (fingerprints_of, models_of):
        found = [json.dumps(name(one), sort_keys=True) for one in pairs]
        assert len(set(found)) == len(found)
        assert name(pair(moved)) == name(pair(lora))
    assert models_of(pairs[0])["adapter"] is None
