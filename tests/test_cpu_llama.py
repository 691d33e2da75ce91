"""The CPU's own Llama forward: mlx-lm's mathematics, in fewer operations."""

import platform

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import qwen2
from support import tiny_config, tiny_module

from posttrainllm.adapters.loading import module as module_file
from posttrainllm.adapters.loading.cpu_llama import cpu_llama_forward, exp
from posttrainllm.adapters.loading.module import model_from_module, module_forward

IDS = mx.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]], dtype=mx.int32)


@pytest.mark.parametrize("compiled", [True, False])
def test_exp_is_exact_to_a_few_units_in_the_last_place(compiled):
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    found = np.array((mx.compile(exp) if compiled else exp)(mx.array(x))).astype(np.float64)
    assert np.max(np.abs(found / np.exp(x.astype(np.float64)) - 1)) < 2e-7


def test_exp_of_what_float32_cannot_hold_stays_finite_and_nan_stays_nan():
    found = np.array(exp(mx.array([-mx.inf, -1e30, -88.0, 89.0, 1e30, mx.inf, mx.nan])))
    assert np.all((found[:3] > 0) & (found[:3] < 2e-38))
    assert np.all((found[3:6] > 1e38) & np.isfinite(found[3:6]))
    assert np.isnan(found[6])


def last_logits(forward, kv):
    """Two prefilled rows at different positions, a window whose tail is rejected, and the window that overwrites it."""
    start = mx.array([0, 0], dtype=mx.int32)
    _, kv = forward(IDS[:, :4], kv, start)
    at = mx.array([4, 3], dtype=mx.int32)
    _, kv = forward(mx.array([[99, 98], [97, 96]], dtype=mx.int32), kv, at)
    logits, kv = forward(IDS[:, 4:], kv, at)
    return logits.astype(mx.float32), kv


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": False},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 1e6},
        {"quantized": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_it_agrees_with_the_module_to_rounding(changes, dtype, tolerance):
    options = dict(changes)
    quantized, kv_heads = options.pop("quantized", False), options.pop("kv_heads", 2)
    module = tiny_module(tiny_config(kv_heads=kv_heads) | options, seed=3, dtype=getattr(mx, dtype))
    if quantized:
        nn.quantize(module, group_size=32, bits=4)
    model = model_from_module(module, name="tiny", dtype=dtype, context=512)
    ours, our_kv = last_logits(cpu_llama_forward(module), model.make_kv(2, 64))
    theirs, their_kv = last_logits(module_forward(module, [None] * 2), model.make_kv(2, 64))
    assert mx.max(mx.abs(ours - theirs)) < tolerance * mx.max(mx.abs(theirs))
    for one, other in zip(our_kv, their_kv, strict=True):
        for array, expected in zip(one, other, strict=True):
            assert array.dtype == expected.dtype
            assert mx.max(mx.abs(array - expected)) <= tolerance * mx.max(mx.abs(expected))


def test_models_of_another_kind_keep_their_module():
    config = tiny_config()
    others = [
        qwen2.Model(qwen2.ModelArgs.from_dict(config | {"model_type": "qwen2"})),
        tiny_module(config | {"rope_traditional": True}, seed=1),
        tiny_module(
            config | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            seed=1,
        ),
        tiny_module(config | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, seed=1),
    ]
    assert [cpu_llama_forward(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("changes", "machine", "taken"),
    [
        ({"device": "cpu", "compiled": True}, "x86_64", True),
        ({"device": "cpu", "compiled": False}, "x86_64", False),
        ({"device": "cpu", "compiled": True}, "arm64", False),
        ({"device": "gpu", "compiled": True}, "x86_64", False),
    ],
)
def test_it_is_taken_where_it_was_measured_to_pay(changes, machine, taken, runtime, monkeypatch):
    """Operation by operation it is slower than the module, and other processors have a vectorised `exp`."""
    monkeypatch.setattr(module_file, "start", lambda: attrs.evolve(runtime, **changes))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    model = model_from_module(tiny_module(tiny_config(), seed=1), name="tiny", dtype="float32", context=512)
    assert model.forward.__qualname__.startswith("cpu_llama_forward") == taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_stands_in_masked_slots_changes_no_bit(dtype):
    """Stale entries are finite but arbitrary: here keys that would win every maximum and huge values."""
    module = tiny_module(tiny_config(), seed=3, dtype=getattr(mx, dtype))
    model = model_from_module(module, name="tiny", dtype=dtype, context=512)
    forward, position = cpu_llama_forward(module), mx.array([3, 0], dtype=mx.int32)
    clean = model.make_kv(2, 64)
    slot = mx.arange(64)[None, None, :, None]
    stale = tuple(
        (mx.where(slot >= 3, 1e4, keys).astype(keys.dtype), mx.where(slot >= 3, 1e37, values).astype(values.dtype))
        for keys, values in clean
    )
    window = IDS[:, 3:]
    assert mx.array_equal(forward(window, clean, position)[0], forward(window, stale, position)[0])
