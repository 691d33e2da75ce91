import json
import shutil
import struct

import mlx.core as mx
import pytest
from support import bare_tokenizer, tiny_config, tiny_module

from posttrainllm.adapters.loading import memory
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.module import model_from_module
from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.adapters.loading.pairing import check_pair
from posttrainllm.kernel.errors import (
    CheckpointError,
    MemoryLimitError,
    PairError,
    UnsupportedModelError,
    UsageError,
)


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def test_no_arguments_load_the_embedded_pair(embedded_pair):
    assert embedded_pair.target.name.endswith("target-16m")
    assert embedded_pair.draft.name.endswith("draft-3m")
    assert embedded_pair.vocab_size == 4096
    assert embedded_pair.tokenizer.eos_ids == {0}


def test_a_model_alone_decodes_plainly_and_says_why(tiny_checkpoint):
    pair = load_pair(tiny_checkpoint)
    assert pair.draft is None
    assert pair.reason == "no draft model was given"


def test_a_draft_alone_gets_the_embedded_target(tiny_draft_checkpoint):
    pair = load_pair(None, tiny_draft_checkpoint)
    assert pair.target.name.endswith("target-16m")
    assert pair.draft.name == str(tiny_draft_checkpoint)


def test_auto_is_float32_where_a_real_blas_makes_it_faster_and_the_checkpoints_own_elsewhere(embedded_pair, runtime):
    fast = runtime.device == "cpu" and runtime.fast_float32
    assert embedded_pair.target.dtype == ("float32" if fast else "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_given_dtype_is_used_for_both_models(tiny_checkpoint, tiny_draft_checkpoint, dtype):
    pair = load_pair(tiny_checkpoint, tiny_draft_checkpoint, dtype=dtype)
    assert pair.target.dtype == pair.draft.dtype == dtype
    assert pair.target.kv_dtype == pair.draft.kv_dtype == getattr(mx, dtype)


def test_the_forward_agrees_with_mlx_lms_own_cache_path(tiny_checkpoint):
    from mlx_lm.models.cache import make_prompt_cache

    from posttrainllm.adapters.loading.module_loader import load_module

    module = load_module(read_checkpoint(tiny_checkpoint), "float32")
    model = model_from_module(module, name="tiny", dtype="float32", context=512)
    ids, cache = mx.array([[5, 6, 7, 8, 9, 10]], dtype=mx.int32), make_prompt_cache(module)
    expected = mx.concatenate([module(ids[:, :4], cache=cache), module(ids[:, 4:], cache=cache)], axis=1)
    first, kv = model.forward(ids[:, :4], model.make_kv(1, 64), mx.array([0], dtype=mx.int32))
    # a rejected tail at 4 and 5, then the window that overwrites it
    _, kv = model.forward(mx.array([[99, 98]], dtype=mx.int32), kv, mx.array([4], dtype=mx.int32))
    second, _ = model.forward(ids[:, 4:], kv, mx.array([4], dtype=mx.int32))
    assert mx.allclose(mx.concatenate([first, second], axis=1), expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_dtype_is_a_usage_error():
    with pytest.raises(UsageError, match="dtype: got 'int3'"):
        load_pair(dtype="int3")


def test_an_unknown_forward_is_a_usage_error():
    with pytest.raises(UsageError, match="forward: got 'mine', expected one of auto, module"):
        load_pair(forward="mine")


def test_a_switch_takes_mlx_lms_module_for_all(tiny_checkpoint):
    ours, theirs = load_pair(tiny_checkpoint), load_pair(tiny_checkpoint, forward="module")
    assert (ours.target.variant == "module", theirs.target.variant) == (False, "module")
    for name in ("vocab_size", "context", "kv_shapes", "kv_dtype", "windows", "family", "weight_bytes"):
        assert getattr(ours.target, name) == getattr(theirs.target, name), name
    logits = [
        pair.target.forward(
            mx.array([[5, 6, 7]], dtype=mx.int32), pair.target.make_kv(1, 64), mx.array([0], dtype=mx.int32)
        )[0]
        for pair in (ours, theirs)
    ]
    assert mx.allclose(*logits, rtol=1e-4, atol=1e-4)


def test_mlx_lms_module_is_loaded_once_when_it_is_asked_for(tiny_checkpoint, monkeypatch):
    from posttrainllm.adapters.loading import variants

    loaded = []
    monkeypatch.setattr(variants, "load_module", lambda *arguments: loaded.append(arguments) or object())
    target = load_pair(tiny_checkpoint).target
    assert not loaded
    assert target.module is target.module is not None
    assert len(loaded) == 1


def test_a_draft_and_no_speculation_contradict_each_other(tiny_checkpoint):
    with pytest.raises(UsageError, match="got both a draft model and --no-draft"):
        load_pair(None, tiny_checkpoint, speculate=False)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere: got nothing there, expected a model directory"):
        load_pair(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json is missing"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("model.safetensors", r"got no model\*.safetensors"),
    ],
)
def test_a_missing_file_is_named(checkpoint, name, message):
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        load_pair(checkpoint)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_weights_are_refused_before_they_are_read(checkpoint, keep):
    file = checkpoint / "model.safetensors"
    data = file.read_bytes()
    size = int(len(data) * keep) if isinstance(keep, float) else keep if keep >= 0 else len(data) + keep
    file.write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=f"(truncated|torn): got {size} bytes, expected"):
        load_pair(checkpoint)


@pytest.mark.parametrize("header", [b"[]", b"{}x", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe"])
def test_a_header_that_is_not_safetensors_is_refused(checkpoint, header):
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="header is not that of a safetensors file"):
        load_pair(checkpoint)


def test_a_shard_that_the_index_names_must_be_there(tmp_path):
    path = shutil.copytree(embedded_path("target-16m"), tmp_path / "model")
    (path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is missing"):
        load_pair(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json: (cannot be read|got list)"):
        load_pair(checkpoint)


@pytest.mark.parametrize("field", ["hidden_size", "max_position_embeddings", "num_hidden_layers", "model_type"])
def test_a_config_without_a_field_names_it(checkpoint, field):
    edit_json(checkpoint / "config.json", **{field: None})
    with pytest.raises(CheckpointError, match=field):
        load_pair(checkpoint)


@pytest.mark.parametrize("value", [0, "many", 1.5, True, -3])
def test_a_context_that_is_no_length_is_refused(checkpoint, value):
    edit_json(checkpoint / "config.json", max_position_embeddings=value)
    with pytest.raises(CheckpointError, match="max_position_embeddings: got"):
        load_pair(checkpoint)


@pytest.mark.parametrize("changes", [{"vocab_size": 17}, {"num_hidden_layers": 3}, {"hidden_size": 32}])
def test_weights_that_do_not_fit_the_config_are_refused(checkpoint, changes):
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"weights and config\.json do not fit"):
        load_pair(checkpoint)


def test_an_unknown_architecture_is_named(checkpoint):
    edit_json(checkpoint / "config.json", model_type="perceptron9000")
    with pytest.raises(UnsupportedModelError, match="'perceptron9000'"):
        load_pair(checkpoint)


def test_a_torn_tokenizer_is_refused(checkpoint):
    text = (checkpoint / "tokenizer.json").read_text()
    (checkpoint / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_pair(checkpoint)


def test_every_source_of_eos_ids_counts(checkpoint):
    edit_json(checkpoint / "config.json", eos_token_id=[5, 6])
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_pair(checkpoint).tokenizer.eos_ids == {0, 5, 6, 7}  # 0 is the tokenizer's own


@pytest.mark.parametrize("eos", ["end", [1, "b"], -1, True])
def test_eos_ids_that_are_no_ids_are_refused(checkpoint, eos):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match="eos_token_id: got"):
        load_pair(checkpoint)


def test_a_draft_with_two_entries_swapped_is_refused_naming_the_first(tiny_draft_checkpoint, tmp_path):
    """Case: a draft with another tokenizer gives junk or a crash."""
    draft = shutil.copytree(tiny_draft_checkpoint, tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    pieces = {index: piece for piece, index in vocabulary.items()}
    vocabulary[pieces[300]], vocabulary[pieces[500]] = 500, 300
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PairError, match=f"id 300 is {pieces[500]!r}, expected {pieces[300]!r}"):
        load_pair(None, draft)


def test_a_draft_that_lacks_an_id_is_refused_naming_it():
    with pytest.raises(PairError, match="id 10 is None"):
        check_pair(bare_tokenizer(12), bare_tokenizer(10), draft_rows=12)


def test_padded_vocabularies_may_differ_in_size(tmp_path, tiny_checkpoint):
    import support
    from support import save_tiny_llama

    original = support.tiny_config
    try:
        support.tiny_config = lambda **options: original(**{**options, "vocab": 4160})
        draft = save_tiny_llama(tmp_path / "draft", seed=3, layers=1)
    finally:
        support.tiny_config = original
    pair = load_pair(tiny_checkpoint, draft)
    assert (pair.target.vocab_size, pair.draft.vocab_size, pair.vocab_size) == (4096, 4160, 4096)


def test_a_layer_that_cannot_be_rewound_is_named():
    from mlx_lm.models.cache import ArraysCache, KVCache

    module = tiny_module(tiny_config(vocab=32), seed=1)
    module.make_cache = lambda: [KVCache(), ArraysCache(2)]
    with pytest.raises(UnsupportedModelError, match="layer 1 has the cache ArraysCache"):
        model_from_module(module, name="hybrid", dtype="float32", context=64)


def test_weights_that_cannot_fit_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000_000)
    with pytest.raises(MemoryLimitError, match=r"the weights: got 0.01 GB free, expected 0.0\d GB"):
        load_pair()


def test_caches_that_cannot_fit_are_refused_with_the_numbers(embedded_pair, monkeypatch):
    from posttrainllm.adapters.engine import Engine

    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000_000)
    with pytest.raises(MemoryLimitError, match=r"caches \(B=4, C=1024\): got 0\.01 GB free, expected"):
        Engine(embedded_pair, rows=4, capacity=1024, width=5)


def test_available_memory_is_a_plausible_number():
    assert 10**8 < memory.available_bytes() < 10**14


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_scaling": {"type": "nonsense"}},
        {"hidden_size": 0},
        {"vocab_size": 0},
        {"vocab_size": -1},
        {"vocab_size": 10**12},
        {"rope_theta": "x"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": "x"},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"quantization_config": {"quant_method": "awq"}},
    ],
    ids=str,
)
def test_a_config_that_describes_no_model_is_one_line(checkpoint, changes):
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError) as caught:
        load_pair(checkpoint)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors"], ids=["dangling", "to itself"])
def test_weights_that_are_a_broken_link_are_refused(checkpoint, target):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError):
        load_pair(checkpoint)


def test_weights_that_are_a_directory_are_refused(checkpoint):
    (checkpoint / "model-2.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: got something that is no file"):
        load_pair(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_nested_too_deep_is_refused(checkpoint, name):
    (checkpoint / name).write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError):
        load_pair(checkpoint)


def test_a_context_beyond_int32_still_decodes(checkpoint):
    from posttrainllm.adapters.facade import generate

    edit_json(checkpoint / "config.json", max_position_embeddings=10**18)
    assert generate(pair=load_pair(None, checkpoint), prompt="a", max_tokens=4).usage.completion_tokens == 4


@pytest.mark.parametrize("template", ["{% for", '{{ raise_exception("no") }}', "{{ 1/0 }}", "{{ messages[5].x }}"])
def test_a_chat_template_that_fails_is_one_line(checkpoint, template):
    edit_json(checkpoint / "tokenizer_config.json", chat_template=template)
    tokenizer = load_pair(checkpoint).tokenizer
    with pytest.raises(CheckpointError, match="its chat template cannot be used"):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])


def test_a_chat_template_is_applied(checkpoint):
    edit_json(
        checkpoint / "tokenizer_config.json", chat_template="<{{ messages[0].content }}>{{ add_generation_prompt }}"
    )
    tokenizer = load_pair(checkpoint).tokenizer
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == "<hello>True"


@pytest.mark.parametrize("path", ["", 5, b"/tmp"])
def test_a_model_that_is_no_path_is_a_usage_error(path):
    with pytest.raises(UsageError, match="expected the path of a directory"):
        load_pair(path)


def test_more_layers_than_tensors_are_refused_before_any_is_built(tiny_checkpoint, tmp_path):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers: got 1000000000, expected at most"):
        read_checkpoint(path)
