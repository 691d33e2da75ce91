"""Forwards of our own for Llama-shaped models: mlx-lm's mathematics, in fewer operations."""

import platform

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.utils import _get_classes
from support import decode, fused_weights, random_weights, tiny_config, tiny_module, tiny_pair, without_draft

from posttrainllm.adapters.loading import variants
from posttrainllm.adapters.loading.cpu_llama import briefly, cpu_llama_forward
from posttrainllm.adapters.loading.fused_llama import fused_llama_forward
from posttrainllm.adapters.loading.module import model_from_module
from posttrainllm.adapters.loading.pair import load_pair, with_draft
from posttrainllm.adapters.loading.variants import drafting, model_from_weights

IDS = mx.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]], dtype=mx.int32)
FORWARDS = {"cpu": cpu_llama_forward, "fused": fused_llama_forward}
NOT_HERE = "a GPU makes its products of float32 of TensorFloat-32's, and never takes this forward"
on_a_cpu = pytest.mark.skipif(mx.default_device() == mx.gpu, reason=NOT_HERE)
HERE = [
    pytest.param(name, marks=pytest.mark.skipif(name == "cpu" and mx.default_device() == mx.gpu, reason=NOT_HERE))
    for name in FORWARDS
]
MODELS = {
    "llama": {},
    "as many kv heads": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "untied": {"tie_word_embeddings": False},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 1e6},
    "llama3 rope": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}},
    "larger heads": {"head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "4-bit": {},
    "4-bit qwen2": {"model_type": "qwen2"},
}


def module_of(name, dtype):
    """A random module and its config; norms are random, too: with ones the order of rotating and scaling is free."""
    config = tiny_config() | MODELS[name]
    model_class, args_class = _get_classes(config)
    module = model_class(args_class.from_dict(config))
    random_weights(module, seed=3, dtype=getattr(mx, dtype))
    generator = np.random.default_rng(4)
    for layer in module.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(layer.self_attn)):
            norm.weight = mx.array(generator.uniform(0.5, 1.5, norm.weight.shape)).astype(norm.weight.dtype)
    if name.startswith("4-bit"):
        nn.quantize(module, group_size=32, bits=4)
        config["quantization"] = {"group_size": 32, "bits": 4}
    return module, config


def _head_norms(attention):
    return (attention.q_norm, attention.k_norm) if "q_norm" in attention else ()


def last_logits(forward, kv):
    """Two prefilled rows at different positions, a window whose tail is rejected, and the window that overwrites it."""
    start = mx.array([0, 0], dtype=mx.int32)
    _, kv = forward(IDS[:, :4], kv, start)
    at = mx.array([4, 3], dtype=mx.int32)
    _, kv = forward(mx.array([[99, 98], [97, 96]], dtype=mx.int32), kv, at)
    logits, kv = forward(IDS[:, 4:], kv, at)
    return logits.astype(mx.float32), kv


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_a_forward_agrees_with_the_module_to_rounding(variant, name, dtype, tolerance):
    module, config = module_of(name, dtype)
    model = model_from_module(module, name="tiny", dtype=dtype, context=512)
    weights = fused_weights(module, config, dtype)
    ours, our_kv = last_logits(FORWARDS[variant](weights), model.make_kv(2, 64))
    theirs, their_kv = last_logits(model.forward, model.make_kv(2, 64))
    assert mx.max(mx.abs(ours - theirs)) < tolerance * mx.max(mx.abs(theirs))
    for one, other in zip(our_kv, their_kv, strict=True):
        for array, expected in zip(one, other, strict=True):
            assert array.dtype == expected.dtype
            assert mx.max(mx.abs(array - expected)) <= tolerance * mx.max(mx.abs(expected))


@on_a_cpu
@pytest.mark.parametrize("name", MODELS)
# probabilities are rounded to bfloat16 before the product with the values here, and divided behind it elsewhere
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 8e-2)])
def test_a_drafts_short_windows_agree_with_the_module_to_rounding(name, dtype, tolerance):
    """Two tokens of one row and then one; wider windows have the bits of the other forward, these have others."""
    module, config = module_of(name, dtype)
    model = model_from_module(module, name="tiny", dtype=dtype, context=512)
    weights = fused_weights(module, config, dtype)
    usual = cpu_llama_forward(weights)
    draft = briefly(usual)
    kv, their_kv = model.make_kv(1, 64), model.make_kv(1, 64)
    differences = []
    for first, last in ((0, 3), (3, 5), (5, 6)):
        start = mx.array([first], dtype=mx.int32)
        same = usual(IDS[:1, first:last], kv, start)[0]
        ours, kv = draft(IDS[:1, first:last], kv, start)
        theirs, their_kv = model.forward(IDS[:1, first:last], their_kv, start)
        assert mx.max(mx.abs(ours - theirs)) < tolerance * mx.max(mx.abs(theirs))
        differences.append(mx.max(mx.abs(ours - same)).item())
    assert differences[0] == 0
    assert [difference == 0 for difference in differences[1:]] == [dtype == "float16"] * 2


@on_a_cpu
@pytest.mark.parametrize(
    ("rows", "width", "capacity", "brief"),
    [
        *[(1, 1, 64, True), (2, 1, 64, True), (2, 2, 64, True), (1, 2, 2048, True)],
        *[(3, 1, 64, False), (1, 3, 64, False), (1, 1, 2304, False)],
    ],
)
def test_a_drafts_bits_are_its_own_where_operations_are_what_costs(rows, width, capacity, brief):
    config = tiny_config()  # 4 heads
    weights = fused_weights(tiny_module(config, seed=3), config)
    model = model_from_weights(weights, name="tiny", dtype="float32", context=512)
    ids, start = mx.full((rows, width), 5, dtype=mx.int32), mx.full((rows,), 7, dtype=mx.int32)
    generator = np.random.default_rng(1)
    kv = tuple(
        tuple(mx.array(generator.normal(size=array.shape)).astype(array.dtype) for array in layer)
        for layer in model.make_kv(rows, capacity)
    )
    usual = cpu_llama_forward(weights)
    found = [forward(ids, kv, start)[0] for forward in (usual, briefly(usual))]
    assert mx.array_equal(*found).item() != brief


@on_a_cpu
@pytest.mark.parametrize("rows", [1, 2])
def test_a_drafts_bits_are_the_same_in_a_window_of_one_token_and_of_two(rows):
    """What its cache holds depends on no width, and so on nothing that was accepted."""
    config = tiny_config()
    weights = fused_weights(tiny_module(config, seed=3), config)
    model = model_from_weights(weights, name="tiny", dtype="float32", context=512)
    forward, at = briefly(cpu_llama_forward(weights)), mx.full((rows,), 3, dtype=mx.int32)
    kv = forward(IDS[:rows, :3], model.make_kv(rows, 64), mx.zeros((rows,), dtype=mx.int32))[1]
    first, one = forward(IDS[:rows, 3:4], kv, at)
    second, one = forward(IDS[:rows, 4:5], one, at + 1)
    both, two = forward(IDS[:rows, 3:5], kv, at)
    assert mx.array_equal(mx.concatenate([first, second], axis=1), both)
    for layer, also in zip(one, two, strict=True):
        assert all(mx.array_equal(apart, together) for apart, together in zip(layer, also, strict=True))


def test_drafts_alone_are_computed_in_bits_of_their_own(embedded_pair, runtime):
    if not (runtime.scalar_exp and runtime.compiled):
        pytest.skip("one forward for both here")
    assert (embedded_pair.target.variant, embedded_pair.draft.variant) == ("cpu", "cpu-draft")
    assert not embedded_pair.target.forward.brief
    assert embedded_pair.draft.forward.brief
    assert embedded_pair.draft.forward.within(256).brief
    same = load_pair(embedded_pair.draft.name, embedded_pair.draft.name)
    assert (same.target.variant, same.draft.variant) == ("cpu", "cpu-draft")
    added = with_draft(without_draft(embedded_pair), embedded_pair.draft.name)
    assert added.draft.variant == "cpu-draft"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ours_has_the_shapes_of_the_modules(name):
    module, config = module_of(name, "float32")
    theirs = model_from_module(module, name="tiny", dtype="float32", context=512)
    ours = model_from_weights(fused_weights(module, config), name="tiny", dtype="float32", context=512)
    for field in ("vocab_size", "kv_shapes", "kv_dtype", "windows", "family", "weight_bytes"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.variant != theirs.variant == "module"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", FORWARDS)
def test_what_stands_in_masked_slots_changes_no_bit(variant, dtype):
    """Stale entries are finite but arbitrary: here keys that would win every maximum and huge values."""
    config = tiny_config()
    weights = fused_weights(tiny_module(config, seed=3, dtype=getattr(mx, dtype)), config, dtype)
    model = model_from_weights(weights, name="tiny", dtype=dtype, context=512)
    forward, position = FORWARDS[variant](weights), mx.array([3, 0], dtype=mx.int32)
    clean = model.make_kv(2, 64)
    slot = mx.arange(64)[None, None, :, None]
    stale = tuple(
        (mx.where(slot >= 3, 1e4, keys).astype(keys.dtype), mx.where(slot >= 3, 1e37, values).astype(values.dtype))
        for keys, values in clean
    )
    window = IDS[:, 3:]
    assert mx.array_equal(forward(window, clean, position)[0], forward(window, stale, position)[0])


@pytest.mark.parametrize(
    ("changes", "machine", "target", "draft"),
    [
        ({"device": "cpu", "compiled": True}, "x86_64", "cpu", "cpu-draft"),
        ({"device": "cpu", "compiled": False}, "x86_64", "fused", "fused"),
        ({"device": "cpu", "compiled": True}, "arm64", "fused", "fused"),
    ],
)
def test_the_cpus_own_is_taken_where_it_was_measured_to_pay(changes, machine, target, draft, runtime, monkeypatch):
    """Operation by operation it is slower than the others, and other processors have a vectorised `exp`."""
    monkeypatch.setattr(variants, "start", lambda: attrs.evolve(runtime, **changes))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    config = tiny_config()
    weights = fused_weights(tiny_module(config, seed=1), config)
    model = model_from_weights(weights, name="tiny", dtype="float32", context=512)
    assert (model.variant, drafting(model).variant) == (target, draft)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("4-bit qwen2", "float32")],
)
@pytest.mark.parametrize("variant", FORWARDS)
def test_greedy_output_equals_the_reference_whatever_the_other_rows_hold(variant, name, dtype):
    """Invariant I2 with each forward as the target's, drafted for by a random model and by itself."""
    module, config = module_of(name, dtype)
    weights = fused_weights(module, config, dtype)
    target = model_from_weights(weights, name="tiny", dtype=dtype, context=512)
    target = attrs.evolve(target, forward=FORWARDS[variant](weights), variant=variant)
    random_draft = tiny_pair(dtype=dtype, vocab=target.vocab_size)
    prompts = ([3], [4, 5, 6, 7], [8, 9] * 20)
    for pair in (attrs.evolve(random_draft, target=target), attrs.evolve(random_draft, target=target, draft=target)):
        ids = decode(pair, prompts, width=5, count=24)
        assert ids == decode(without_draft(pair), prompts, width=5, count=24)
        assert ids[2] == decode(pair, ([11, 12], [13], prompts[2]), width=5, count=24)[2]


@pytest.mark.parametrize("variant", FORWARDS)
def test_attention_over_a_long_flat_text_stays_finite_in_float16(variant):
    """2000 values of 100 add up to more than float16 holds, their mean does not."""
    module, config = module_of("llama", "float16")
    model = model_from_module(module, name="tiny", dtype="float16", context=4096)
    kv = tuple(
        (mx.zeros_like(keys), mx.full(values.shape, 100, values.dtype)) for keys, values in model.make_kv(1, 2048)
    )
    forward = FORWARDS[variant](fused_weights(module, config, "float16"))
    logits, _ = forward(mx.array([[3]], dtype=mx.int32), kv, mx.array([2000], dtype=mx.int32))
    assert bool(mx.all(mx.isfinite(logits)))
