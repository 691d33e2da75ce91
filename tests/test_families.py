"""Families of mlx-lm, tiny and random: every one decodes exactly and agrees with mlx-lm's own loop."""

import json
import shutil

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes
from support import (
    FAMILY_CONFIG,
    decode,
    mostly_slow,
    random_weights,
    save_tiny_llama,
    tiny_module,
    tiny_pair,
    without_draft,
)

from posttrainllm.adapters.loading.module import model_from_module
from posttrainllm.adapters.loading.pair import load_pair

VOCAB = 512
BASE = FAMILY_CONFIG | {"vocab_size": VOCAB}
SLIDING = {"sliding_window": 32, "num_hidden_layers": 4}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama3 rope": {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "llama, sliding": {"model_type": "llama", "layer_types": ["sliding_attention", "full_attention"] * 2, **SLIDING},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16},
    "gemma2, one group": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "num_key_value_heads": 4},
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window_pattern": 2, **SLIDING},
    "phi3": {"model_type": "phi3"},
    "phi3, longrope": {
        "model_type": "phi3",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 256,
        "rope_scaling": {"type": "longrope", "long_factor": [1.5] * 8, "short_factor": [1.0] * 8},
    },
}
SLIDING_FAMILIES = [name for name in FAMILIES if FAMILIES[name].get("sliding_window")]
FORMATS = ["float32", "bfloat16", "4-bit", "8-bit", "mixed"]
PROMPTS = ([3], [4, 5, 6, 7], [8, 9] * 20)


def family_module(family: str, form: str, *, seed: int = 1, **changes):
    """A random model of a family, dense or quantised."""
    config = BASE | FAMILIES[family] | changes
    model_class, args_class = _get_classes(config)
    module = model_class(args_class.from_dict(config))
    dtype = form if form in ("float32", "bfloat16") else "float32"
    random_weights(module, seed=seed, dtype=getattr(mx, dtype))
    if form in ("4-bit", "8-bit"):
        nn.quantize(module, group_size=32, bits=int(form[0]))
    if form == "mixed":  # as recipes that spare some layers do: 8 bits for the values and the head, 4 for the rest
        nn.quantize(
            module,
            class_predicate=lambda path, layer: (
                hasattr(layer, "to_quantized")
                and {"group_size": 32, "bits": 8 if "v_proj" in path or "embed" in path else 4}
            ),
        )
    return module, dtype


def family_pair(family: str, form: str, *, draft: str = "random"):
    """A pair whose target is of the family, drafted for by itself, by a random Llama or by a noisy one."""
    module, dtype = family_module(family, form)
    target = model_from_module(module, name=family, dtype=dtype, context=512)
    pair = tiny_pair(dtype=dtype, vocab=VOCAB, draft="noisy" if draft == "noisy" else "random")
    return attrs.evolve(pair, target=target, draft=target if draft == "same" else pair.draft)


def check_against_the_reference(family, form, draft_k, draft, count):
    pair = family_pair(family, form, draft=draft)
    ids = decode(pair, PROMPTS, width=draft_k + 1, count=count)
    assert ids == decode(without_draft(pair), PROMPTS, width=draft_k + 1, count=count)


# every family once, formats, K and drafts in turn; the rest is in the slower set
PAIRWISE = [
    (family, FORMATS[index % len(FORMATS)], (1, 4)[(index // 2 + index) % 2], ("same", "random")[index % 2])
    for index, family in enumerate(FAMILIES)
]
REST = [
    (family, form, draft_k, draft)
    for family in FAMILIES
    for form in FORMATS
    for draft_k, draft in ((1, "random"), (4, "same"))
    if (family, form, draft_k, draft) not in PAIRWISE
]


@pytest.mark.parametrize(("family", "form", "draft_k", "draft"), PAIRWISE)
def test_greedy_output_equals_the_reference(family, form, draft_k, draft):
    check_against_the_reference(family, form, draft_k, draft, 128 if family in SLIDING_FAMILIES else 40)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form", "draft_k", "draft"), REST)
def test_greedy_output_equals_the_reference_in_the_whole_matrix(family, form, draft_k, draft):
    check_against_the_reference(family, form, draft_k, draft, 128 if family in SLIDING_FAMILIES else 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_emits_what_mlx_lms_own_cache_path_would(family):
    """Case: a rotating cache keeps rejected tokens after it wraps. Ours keeps all and masks; theirs rotates at 32.

    Theirs is fed our ids one by one: at every position ours has to be its best id, or tie with it to rounding.
    """
    ids = decode(family_pair(family, "float32"), [PROMPTS[1]], width=5, count=128)[0]
    module, _ = family_module(family, "float32")
    cache = make_prompt_cache(module)
    logits = [module(mx.array([PROMPTS[1]], dtype=mx.int32), cache=cache)[0, -1]]
    for index in ids[:-1]:
        logits.append(module(mx.array([[index]], dtype=mx.int32), cache=cache)[0, -1])
    theirs = mx.stack(logits)  # [128, V]
    short_of_best = mx.max(theirs, axis=-1) - mx.take_along_axis(theirs, mx.array(ids)[:, None], axis=-1)[:, 0]
    assert mx.max(short_of_best) < 1e-3 * mx.max(mx.abs(theirs))


# masks and ropes tell them apart, and rows apart
@pytest.mark.parametrize(
    "family",
    mostly_slow({name: name for name in FAMILIES}, "llama, sliding", "qwen2", "gemma2", "gemma3", "phi3, longrope"),
)
def test_a_row_does_not_depend_on_the_rows_beside_it(family):
    """Three rows of a batch against each alone: a mask that is broadcast over the wrong axis shows here."""
    pair = family_pair(family, "float32")
    together = decode(pair, PROMPTS, width=5, count=40)
    assert together == [decode(pair, [prompt], width=5, count=40)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("family", SLIDING_FAMILIES)
def test_a_window_changes_nothing_until_something_has_left_it(family):
    """The same weights with a window of 4 and one that holds all: equal logits for four tokens, others from then on."""
    short, long = (
        model_from_module(
            family_module(family, "float32", sliding_window=window)[0], name=family, dtype="float32", context=512
        )
        for window in (4, 512)
    )
    ids, start = mx.arange(2, 42, dtype=mx.int32)[None], mx.zeros((1,), dtype=mx.int32)
    windowed, full = (model.forward(ids, model.make_kv(1, 64), start)[0][0] for model in (short, long))
    assert mx.array_equal(windowed[:4], full[:4])
    assert not any(mx.array_equal(windowed[place], full[place]) for place in range(4, 40))


def test_quantised_checkpoints_compute_in_float32_on_a_cpu_by_default(tmp_path, runtime):
    """MLX's quantised products on a CPU are several times slower in 16 bits, and float32 holds the same weights."""
    path = save_tiny_llama(tmp_path / "dense", seed=1)
    quantized = tmp_path / "quantized"
    config = json.loads((path / "config.json").read_text())
    module = tiny_module(config, seed=1, dtype=mx.bfloat16)
    nn.quantize(module, group_size=32, bits=4)
    shutil.copytree(path, quantized)
    mx.save_safetensors(str(quantized / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (quantized / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))
    pair = load_pair(quantized, path)
    assert pair.target.dtype == ("float32" if runtime.device == "cpu" else "bfloat16")
    assert load_pair(quantized, path, dtype="bfloat16").target.dtype == "bfloat16"
    width_5 = decode(pair, PROMPTS, width=5, count=24)
    assert width_5 == decode(without_draft(pair), PROMPTS, width=5, count=24)


@pytest.mark.slow
@pytest.mark.parametrize("draft_k", [1, 2, 4, 8])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "4-bit"])
def test_a_hundred_prompts_are_decoded_as_without_a_draft(form, draft_k):
    """Case: T=0 text with a draft differs from plain text.

    Every id equals the reference; against width 1 an output may part at a near-tie, whose margin is then rounding.
    """
    pair, generator = family_pair("llama", form, draft="noisy"), np.random.default_rng(1)
    prompts = [generator.integers(0, VOCAB, size=generator.integers(1, 60)).tolist() for _ in range(100)]
    for start in range(0, 100, 20):
        some = prompts[start : start + 20]
        ids = decode(pair, some, width=draft_k + 1, count=128)
        assert ids == decode(without_draft(pair), some, width=draft_k + 1, count=128)
        for prompt, ours, width_1 in zip(some, ids, decode(without_draft(pair), some, width=1, count=128), strict=True):
            if ours != width_1:
                place = next(index for index in range(128) if ours[index] != width_1[index])
                assert top_margin(pair, [*prompt, *ours[:place]]) < 2e-2, (prompt, place)


def top_margin(pair, ids) -> float:
    """Best logit minus second best behind some ids."""
    kv, start = pair.target.make_kv(1, 256), mx.zeros((1,), dtype=mx.int32)
    logits = pair.target.forward(mx.array([ids], dtype=mx.int32), kv, start)[0][0, -1].astype(mx.float32)
    best = mx.sort(logits)[-2:].tolist()
    return best[1] - best[0]
