"""Which pairs work, and which models can stand in them at all."""

import json
import shutil

import attrs
import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import mamba
from mlx_lm.models.cache import KVCache, RotatingKVCache
from support import bare_tokenizer, decode, random_weights, tiny_config, tiny_module, tiny_pair, without_draft

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.memory import cast_bytes
from posttrainllm.adapters.loading.module import model_from_module
from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.adapters.loading.pairing import check_pair, model_notes
from posttrainllm.kernel.errors import CheckpointError, PairError, UnsupportedModelError


@pytest.fixture(scope="module")
def state_space_checkpoint(tmp_path_factory):
    """A tiny Mamba with the embedded tokenizer."""
    path = tmp_path_factory.mktemp("mamba") / "model"
    path.mkdir()
    config = {
        "model_type": "mamba",
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }
    module = mamba.Model(mamba.ModelArgs.from_dict(config))
    random_weights(module, seed=1, dtype=mx.float32)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_path("target-16m") / name, path / name)
    return path


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_state_space_model_is_refused_at_load_naming_the_layer(state_space_checkpoint, tiny_checkpoint, role):
    """Case: a cache that cannot be rewound fails at the first request."""
    models = (
        (state_space_checkpoint, tiny_checkpoint) if role == "target" else (tiny_checkpoint, state_space_checkpoint)
    )
    with pytest.raises(UnsupportedModelError, match=r"layer 0 has the cache ArraysCache.*cannot be rewound"):
        load_pair(*models)


def test_a_cache_that_keeps_its_first_tokens_for_good_is_refused():
    module = tiny_module(tiny_config(vocab=32), seed=1)
    module.make_cache = lambda: [KVCache(), RotatingKVCache(max_size=32, keep=4)]
    with pytest.raises(UnsupportedModelError, match="layer 1 has the cache RotatingKVCache with keep=4"):
        model_from_module(module, name="sinks", dtype="float32", context=64)


def test_a_forward_that_reads_the_value_of_a_position_is_refused():
    module = tiny_module(tiny_config(vocab=32) | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, seed=1)
    with pytest.raises(UnsupportedModelError, match="dynamic: its forward cannot be compiled"):
        model_from_module(module, name="dynamic", dtype="float32", context=64)


def with_added(size, *pieces, special=True, **fields):
    """A tokenizer of `size` characters and some tokens added behind them."""
    plain = bare_tokenizer(size)
    added = {size + index: piece for index, piece in enumerate(pieces)}
    return attrs.evolve(
        plain,
        vocabulary=plain.vocabulary | added,
        added_ids=frozenset(added),
        special_ids=frozenset(added if special else ()),
        **fields,
    )


def test_tokens_that_only_one_of_them_has_added_are_noted_and_do_no_harm():
    target, draft = with_added(10, "<end>", "<tool>"), with_added(10, "<end>")
    assert check_pair(target, draft, draft_rows=16) == (
        "only the target has 1 of the added tokens, the first '<tool>'",
    )
    assert check_pair(draft, target, draft_rows=16) == ("only the draft has 1 of the added tokens, the first '<tool>'",)


def test_added_tokens_that_differ_are_refused_naming_the_first():
    """Case: a draft with another tokenizer gives junk or a crash."""
    with pytest.raises(PairError, match="id 11 is '<think>', expected '<tool>'"):
        check_pair(with_added(10, "<end>", "<tool>"), with_added(10, "<end>", "<think>"), draft_rows=16)


def test_an_added_token_of_one_in_the_place_of_a_trained_token_of_the_other_is_refused():
    with pytest.raises(PairError, match="id 10 is '<end>', expected"):
        check_pair(bare_tokenizer(11), with_added(10, "<end>"), draft_rows=16)


def test_other_ends_of_text_and_other_special_ids_are_noted():
    target = with_added(10, "<a>", "<b>", eos_ids=frozenset({10, 11}))
    draft = with_added(10, "<a>", "<b>", special=False, eos_ids=frozenset({10}))
    assert check_pair(target, draft, draft_rows=16) == (
        "2 ids are special to one of the two only, the first 10",
        "text ends at the target's ids [10, 11], not the draft's [10]",
    )
    assert check_pair(target, target, draft_rows=16) == ()


def test_real_tokenizers_tell_their_added_and_special_tokens(embedded_pair):
    tokenizer = embedded_pair.tokenizer
    assert tokenizer.special_ids <= tokenizer.added_ids <= tokenizer.vocabulary.keys()
    assert tokenizer.eos_ids <= tokenizer.special_ids


@pytest.mark.parametrize("options", [{}, {"temperature": 5.0}, {"temperature": 5.0, "coupled": True}], ids=str)
def test_ids_behind_the_tokenizer_are_never_emitted(options):
    """Padded rows of random models are as likely as any other: 512 rows, of which the tokenizer knows 100.

    At temperature 5 the chance that 300 draws from 512 ids all stay below 100 by themselves is under 1e-100.
    """
    pair = attrs.evolve(tiny_pair(vocab=512, draft_vocab=480), tokenizer=bare_tokenizer(100))
    prompts = [[3], [4, 5, 6], [99]]
    emitted = decode(pair, prompts, width=5, count=100, **options)
    assert max(map(max, emitted)) < 100
    if not options or "coupled" in options:
        assert emitted == decode(without_draft(pair), prompts, width=5, count=100, **options)


def test_a_config_that_leaves_the_context_to_its_class_takes_it_from_there(tmp_path, tiny_checkpoint):
    """Gemma-3's multimodal configs do: a text_config without max_position_embeddings."""
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 32}
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert read_checkpoint(path).context == 131072


def test_a_config_that_says_nothing_of_the_context_is_refused(tmp_path, tiny_checkpoint):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    del config["max_position_embeddings"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: max_position_embeddings is missing"):
        load_pair(path)


def test_what_two_checkpoints_differ_in_is_told_with_verbose(tmp_path, tiny_checkpoint):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "draft")
    (path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    notes = ("text ends at the target's ids [0], not the draft's [0, 7]",)
    assert load_pair(tiny_checkpoint, path).notes == notes
    arguments = ["sample", str(tiny_checkpoint), "--draft-model", str(path), "--prompt", "x", "--max-tokens", "2"]
    assert notes[0] in CliRunner().invoke(cli, [*arguments, "--verbose"]).stderr
    assert notes[0] not in CliRunner().invoke(cli, arguments).stderr


def test_the_forecast_of_quantised_weights_counts_their_floats_as_they_are_cast(tmp_path, tiny_checkpoint):
    module = tiny_module(tiny_config(), seed=1, dtype=mx.bfloat16)
    nn.quantize(module, group_size=32, bits=4)
    path = shutil.copytree(tiny_checkpoint, tmp_path / "quantized")
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    config = json.loads((path / "config.json").read_text()) | {"quantization": {"group_size": 32, "bits": 4}}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(path)
    for dtype in ("bfloat16", "float32"):
        pair = load_pair(path, dtype=dtype)
        assert cast_bytes(checkpoint, dtype) == pair.target.weight_bytes


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"sliding_window": 64}, "names a sliding window of 64, which mlx-lm's llama does not have"),
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": 512}, None),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, None),
    ],
)
def test_a_window_that_mlx_lm_does_not_have_is_noted(tmp_path, tiny_checkpoint, changes, note):
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | changes))
    notes = load_pair(path).notes
    assert (note in notes[0]) if note else notes == ()


def test_a_draft_with_a_shorter_context_and_ids_without_a_token_are_noted():
    def model(context):
        return model_from_module(tiny_module(tiny_config(vocab=32), seed=1), name="x", dtype="float32", context=context)

    checkpoints = [read_checkpoint(embedded_path("target-16m"))] * 2
    full = bare_tokenizer(32)
    assert model_notes(checkpoints, [model(64), model(64)], full) == ()
    short = model_notes(checkpoints, [model(64), model(48)], full)
    assert short == ("nothing is proposed beyond the draft's context of 48; the target's is 64",)
    holed = attrs.evolve(full, vocabulary={index: piece for index, piece in full.vocabulary.items() if index != 7})
    assert model_notes(checkpoints[:1], [model(64)], holed)[0].startswith("1 ids below 32 have no token")
