"""Keys and values in 8 or 4 bits: every promise holds over them, and what cannot read them is refused."""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache
from support import bare_tokenizer, decode, random_weights, without_draft
from test_cli import invoke as invoke_words
from test_families import FAMILIES, family_module
from test_prefix_cache import bits, engine_of, prefilled, request_of
from test_replay_command import assert_one_line
from tinygpt_files import save_tinygpt

from posttrainllm.adapters.gate.key import setting_of
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.module import model_from_module
from posttrainllm.adapters.loading.pair import Pair, load_pair
from posttrainllm.adapters.replay.reading import read_trace
from posttrainllm.adapters.runtime import start
from posttrainllm.kernel.errors import LoadError, UnsupportedModelError
from posttrainllm.kernel.quantized_cache import ENTRIES, Packing

PACKINGS = {bits: Packing(bits=bits, group_size=32) for bits in (8, 4)}
PROMPTS = ([3], [4, 5, 6, 7], [8, 9] * 20)
HEADS = {"head_dim": 32, "hidden_size": 128}  # the smallest group
# Gemma-2 computes attention itself, over keys that are arrays
READERS = [name for name in FAMILIES if not name.startswith("gemma2")]


def invoke(*arguments):
    return invoke_words(*map(str, arguments))


def module_of(family, *, dtype="float32", seed=1, noise=0.0, **changes):
    changes = HEADS | changes
    if family == "phi3, longrope":  # a factor for every pair of the head
        factors = {"long_factor": [1.5] * 16, "short_factor": [1.0] * 16}
        changes["rope_scaling"] = {"type": "longrope", **factors}
    module = family_module(family, dtype, seed=seed, **changes)[0]
    if not noise:
        return module
    other = family_module(family, dtype, **changes)[0]
    random_weights(other, seed=7, dtype=getattr(mx, dtype), noise_on=module, scale=noise)
    return other


def quantised(family, packing, *, dtype="float32", **options):
    module = module_of(family, dtype=dtype, **options)
    return model_from_module(module, name=family, dtype=dtype, context=512, packing=packing)


def pair_of(family, packing, *, draft="noisy", dtype="float32"):
    """A pair of one family whose draft is the target with noise on it, another model, or the target itself."""
    target = quantised(family, packing, dtype=dtype)
    drafts = {"noisy": {"noise": 0.05}, "random": {"seed": 2}}
    model = target if draft == "same" else quantised(family, packing, dtype=dtype, **drafts[draft])
    return Pair(target=target, draft=model, tokenizer=bare_tokenizer(512), runtime=start(), reason=None)


def at(position):
    return mx.array([position], dtype=mx.int32)


# the mathematics


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=[] if size == 8 or family == "llama" else pytest.mark.slow)
        for family in READERS
        for size in PACKINGS
    ],
)
def test_logits_are_those_of_mlx_lms_quantised_cache(family, size):
    """A prompt, then windows whose tails are rejected; mlx-lm trims its cache there."""
    packing = PACKINGS[size]
    full = {"sliding_window": 512} if FAMILIES[family].get("sliding_window") else {}  # mlx-lm's has no windows
    module = module_of(family, **full)
    model = model_from_module(module, name=family, dtype="float32", context=512, packing=packing)
    caches = [QuantizedKVCache(group_size=packing.group_size, bits=packing.bits) for _ in model.windows]
    generator, kv, length = np.random.default_rng(2), model.make_kv(1, 128), 0
    for width, kept in ((20, 20), (5, 2), (5, 0), (5, 5), (1, 1), (7, 3)):
        ids = mx.array(generator.integers(0, 512, (1, width)), dtype=mx.int32)
        ours, kv = model.forward(ids, kv, at(length))
        theirs = module(ids, cache=caches)
        for cache in caches:
            cache.trim(width - kept)
        length += kept
        assert float(mx.max(mx.abs(ours - theirs)) / mx.max(mx.abs(theirs))) < 2e-5


def test_quantising_changes_logits_by_as_much_as_its_bits_say():
    """The caches are read: 4 bits are further from floats than 8, and neither is far."""
    ids, apart = mx.array(np.random.default_rng(1).integers(0, 512, (1, 60)), dtype=mx.int32), {}
    exact = None
    for packing in (None, *PACKINGS.values()):
        model = quantised("llama", packing)
        logits = model.forward(ids, model.make_kv(1, 128), at(0))[0]
        exact = logits if exact is None else exact
        if packing is not None:
            apart[packing.bits] = float(mx.max(mx.abs(logits - exact)) / mx.max(mx.abs(exact)))
    assert 1e-5 < apart[8] < 0.05 < apart[4] < 1.0, apart


def test_an_entry_is_a_function_of_what_was_written_there_alone():
    """Case: a rewind leaves other bits than a plain step. Garbage is written over the end, then the true ids."""
    model = quantised("llama", PACKINGS[8])
    ids = mx.array(np.random.default_rng(3).integers(0, 512, (1, 30)), dtype=mx.int32)
    _, kv = model.forward(ids[:, :20], model.make_kv(1, 64), at(0))
    plain_logits, plain = model.forward(ids[:, 20:25], kv, at(20))
    _, dirty = model.forward(mx.full((1, 5), 99, dtype=mx.int32), kv, at(21))
    again_logits, again = model.forward(ids[:, 20:25], dirty, at(20))
    assert mx.array_equal(plain_logits, again_logits)
    for one, other in zip(plain, again, strict=True):
        for ours, others in zip(one, other, strict=True):
            assert mx.array_equal(ours[:, :, :25], others[:, :, :25])
    assert not mx.array_equal(plain[0][0][:, :, 25], again[0][0][:, :, 25])  # the garbage was there


@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_logits_do_not_depend_on_its_place_in_the_window(dtype, width):
    for packing in PACKINGS.values():
        model = quantised("llama", packing, dtype=dtype)
        ids = mx.array([[7 + 13 * place for place in range(20 + width)]], dtype=mx.int32)
        _, kv = model.forward(ids[:, :20], model.make_kv(1, 64), at(0))
        together, _ = model.forward(ids[:, 20:], kv, at(20))
        for column in range(width):
            filler = mx.full((1, width - 1), 99, dtype=mx.int32)
            window = mx.concatenate([ids[:, 20 + column : 21 + column], filler], axis=1)
            alone, kv = model.forward(window, kv, at(20 + column))
            assert mx.array_equal(alone[0, 0], together[0, column]), f"column {column}"


def test_caches_have_the_shapes_and_bytes_that_are_forecast():
    model, floats = quantised("llama", PACKINGS[4]), quantised("llama", None)
    kv = model.make_kv(2, 64)
    assert len(kv) == ENTRIES * len(model.windows)
    assert sum(array.nbytes for pair in kv for array in pair) == 2 * model.kv_bytes(64)
    assert floats.kv_bytes(64) == 2 * 2 * 64 * (32 + 32) * 4  # layers, H, C, keys and values, bytes
    assert model.kv_bytes(64) == 2 * 2 * 64 * 2 * (32 // 2 + 2 * 4)  # 4 bits, and a scale and a bias a group


# the promises

# one in each of the kinds of cache; all others are in the slower set
CASES = [
    ("llama", 8, "float32", 4, "noisy"),
    ("gemma3", 4, "bfloat16", 2, "random"),
    ("phi3, longrope", 4, "float32", 1, "same"),
]
MORE = [
    case
    for case in itertools.product(READERS, PACKINGS, ("float32", "bfloat16"), (1, 4), ("noisy", "same", "random"))
    if case not in CASES
]


@pytest.mark.parametrize(
    ("family", "size", "dtype", "draft_k", "draft"),
    CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE],
)
def test_greedy_ids_are_those_of_plain_decoding(family, size, dtype, draft_k, draft):
    pair = pair_of(family, PACKINGS[size], draft=draft, dtype=dtype)
    ids = decode(pair, PROMPTS, width=draft_k + 1, count=24)
    assert ids == decode(without_draft(pair), PROMPTS, width=draft_k + 1, count=24)


def test_coupled_ids_are_those_of_plain_sampling_and_a_row_does_not_depend_on_its_neighbours():
    pair, options = pair_of("llama", PACKINGS[8]), {"temperature": 0.8, "coupled": True}
    ids = decode(pair, PROMPTS, width=5, count=24, **options)
    assert ids == decode(without_draft(pair), PROMPTS, width=5, count=24, **options)
    greedy = decode(pair, PROMPTS, width=5, count=24)
    assert greedy == [decode(pair, [prompt], width=5, count=24)[0] for prompt in PROMPTS]
    assert greedy != ids


def test_a_kept_prompt_leaves_the_same_bits_in_its_row():
    pair = pair_of("llama", PACKINGS[8])
    prompt = np.random.default_rng(3).integers(1, 500, 50).tolist()
    engine, bare = engine_of(pair), engine_of(pair, prefix_bytes=0)
    prefilled(engine, request_of(pair, prompt))
    for ids in (prompt, [*prompt[:40], 3, 4, 5]):
        request = request_of(pair, ids)
        again = prefilled(engine, request)
        assert again.cached > 0
        assert bits(again) == bits(prefilled(bare, request))


# where it is asked for


@pytest.mark.parametrize("size", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_sample_decodes_as_without_a_draft_and_its_trace_replays(tmp_path, size):
    run = ("sample", "--prompt", "def add(a, b):", "--max-tokens", 24, "--kv-bits", size, "--quiet")
    trace = tmp_path / "trace.jsonl"
    result = invoke(*run, "--record", trace)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == invoke(*run, "--no-draft", "--plain-width", 5).stdout
    assert read_trace(trace).header.kv_packing == (size, 64)
    assert read_trace(trace).header.variants == dict.fromkeys(("target", "draft"), f"module-kv{size}g64")
    for options in ((), ("--from-step", 3)):
        replayed = invoke("replay", trace, *options)
        assert (replayed.exit_code, replayed.stderr) == (0, ""), replayed.stdout


def test_verbose_says_why_another_forward_computes():
    result = invoke("sample", "--prompt", "x", "--max-tokens", 2, "--kv-bits", 8, "--verbose")
    assert "forward: target module-kv8g64, draft module-kv8g64" in result.stderr
    assert "--kv-bits: mlx-lm's modules compute, since their attention alone reads quantised" in result.stderr


def test_the_gates_key_knows_the_packing():
    keys = [
        json.dumps(setting_of(load_pair(changes=ModelChanges(kv_bits=size, kv_group_size=group)), 4), sort_keys=True)
        for size, group in ((None, 64), (8, 64), (4, 64), (8, 32))
    ]
    assert len(set(keys)) == len(keys)


def test_what_cannot_read_quantised_entries_is_refused_in_one_line(tiny_checkpoint, tmp_path):
    """Case: a head of 16, attention of an architecture's own, a forward of ours alone."""
    assert_one_line(
        invoke("sample", tiny_checkpoint, "--prompt", "x", "--kv-bits", 8),
        1,
        "--kv-group-size: got 64, expected one that divides the head's 16",
    )
    with pytest.raises(UnsupportedModelError, match="cannot be compiled with quantised keys and values"):
        quantised("gemma2", PACKINGS[8])
    file = save_tinygpt(tmp_path / "model.tinygpt")
    with pytest.raises(UnsupportedModelError, match=r"--kv-bits: got 8 for a \.tinygpt file, expected none"):
        load_pair(file, changes=ModelChanges(kv_bits=8))
    assert invoke("sample", "--prompt", "x", "--kv-bits", 5).exit_code == 2
    with pytest.raises(LoadError):
        load_pair(tiny_checkpoint, changes=ModelChanges(kv_bits=4, kv_group_size=32))
