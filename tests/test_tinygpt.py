"""`.tinygpt` checkpoints: read as the format says, computed as it says, and exact like every other model."""

import json
import struct

import attrs
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from serving import ServerProcess
from support import decode, without_draft
from tinygpt_files import (
    LAYOUTS,
    SIZES,
    body_of,
    file_bytes,
    header_of,
    random_weights,
    reference_logits,
    save_tinygpt,
)

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate import plan as plan_module
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.fingerprint import tokenizer_fingerprint
from posttrainllm.adapters.loading.gpt_forward import gpt_forward
from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.adapters.loading.tinygpt_reader import read_tinygpt
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.errors import CheckpointError, PairError, UnsupportedModelError

IDS = [104, 0, 255, 32, 104, 101, 7, 200, 201, 202, 9, 8, 7, 6, 5]
PROMPTS = ([3], [4, 5, 6, 7], [8, 9] * 10)
LARGER = {"ctx": 256}


def forward(model, ids, kv=None, start=0):
    kv = model.make_kv(1, 256) if kv is None else kv
    return model.forward(mx.array([ids], dtype=mx.int32), kv, mx.array([start], dtype=mx.int32))


def close(logits, expected, tolerance=2e-5):
    return np.abs(np.array(logits) - expected).max() < tolerance * np.abs(expected).max()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target and a draft in the two bodies, and an exported copy of the target."""
    folder = tmp_path_factory.mktemp("tinygpt")
    save_tinygpt(folder / "target.tinygpt", seed=1, **LARGER)
    save_tinygpt(folder / "draft.tinygpt", seed=2, layout="inference", layers=1, **LARGER)
    save_tinygpt(folder / "short.tinygpt", seed=1, layout="inference", ctx=48)
    done = invoke("export-mlx", folder / "target.tinygpt", "--out", folder / "exported")
    assert done.exit_code == 0, done.stderr
    return folder


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


# what is read


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logits_are_those_of_the_format_computed_in_float64(layout, tmp_path):
    """Heads that do not divide the MLP, an MLP that is no multiple: a matrix read the other way round would not fit."""
    weights = random_weights(SIZES, seed=1)
    model = load_pair(save_tinygpt(tmp_path / "model.tinygpt", layout=layout, weights=weights)).target
    assert (model.vocab_size, model.context, model.variant) == (256, 64, "gpt")
    assert close(forward(model, IDS)[0][0], reference_logits(weights, SIZES, IDS))


def test_a_square_matrix_is_turned_too(tmp_path):
    """The trap of the format: [in, out] in the body where the manifest says [out, in]; a square one fits both ways."""
    weights = random_weights(SIZES, seed=1)
    checkpoint = read_checkpoint(save_tinygpt(tmp_path / "model.tinygpt", weights=weights))
    layer = read_tinygpt(checkpoint.native, "float32").layers[1]
    prefix = "blocks.1.attn."
    expected = np.concatenate([weights[f"{prefix}{name}_proj.weight"] for name in "qkv"])
    assert np.array_equal(np.array(layer.qkv.weight), expected)
    assert np.array_equal(np.array(layer.output.weight), weights[f"{prefix}o_proj.weight"])
    assert np.array_equal(np.array(layer.fall.weight), weights["blocks.1.mlp.fc_out.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_body_holds_the_same_bits(layout, tmp_path):
    weights = random_weights(SIZES, seed=3)
    found, expected = (
        read_tinygpt(
            read_checkpoint(save_tinygpt(tmp_path / f"{name}.tinygpt", layout=body, weights=weights)).native, "float32"
        )
        for name, body in (("one", layout), ("other", "training"))
    )
    assert len(found.arrays) == len(expected.arrays)
    assert all(mx.array_equal(one, other) for one, other in zip(found.arrays, expected.arrays, strict=True))


def test_tensors_may_lie_apart_and_without_offsets_they_follow_each_other(tmp_path):
    weights = random_weights(SIZES, seed=1)
    header = header_of(SIZES, "inference")
    for entry in header["manifest"]:
        del entry["floatOffset"]
    packed = b"".join(body_of({name: array}, "inference") for name, array in weights.items())
    (tmp_path / "packed.tinygpt").write_bytes(file_bytes(header, packed))
    spread, gap = header_of(SIZES, "inference"), 7
    for entry in spread["manifest"]:
        entry["floatOffset"] += gap
    (tmp_path / "spread.tinygpt").write_bytes(file_bytes(spread, b"\xff" * 2 * gap + body_of(weights, "inference")))
    for name in ("packed", "spread"):
        model = load_pair(tmp_path / f"{name}.tinygpt").target
        assert close(forward(model, IDS)[0][0], reference_logits(weights, SIZES, IDS))


def test_the_optimizers_state_is_not_counted_and_takes_no_memory(tmp_path):
    path = save_tinygpt(tmp_path / "model.tinygpt", dModel=64, dMlp=256)
    checkpoint = read_checkpoint(path)
    assert checkpoint.weight_bytes < path.stat().st_size / 2.9
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    weights = read_tinygpt(checkpoint.native, "float32")
    assert mx.get_active_memory() - before < 1.1 * weights.nbytes
    assert mx.get_peak_memory() - before < 1.5 * weights.nbytes


def test_a_file_is_known_by_how_it_begins_whatever_its_name(tmp_path):
    save_tinygpt(tmp_path / "model.bin")
    assert load_pair(tmp_path / "model.bin").target.family == "tinygpt"


def test_a_missing_file_is_said_to_be_missing_and_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"some/model\.tinygpt: got nothing there"):
        load_pair("some/model.tinygpt")


# what is computed


def test_a_cache_with_a_rejected_tail_gives_the_logits_of_the_whole(files):
    model = load_pair(files / "target.tinygpt").target
    whole = forward(model, IDS)[0][0]
    _, kv = forward(model, IDS[:6])
    _, kv = forward(model, [99, 98, 97], kv, 6)
    second = forward(model, IDS[6:], kv, 6)[0][0]
    assert close(second, np.array(whole)[6:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tokens_logits_do_not_depend_on_its_place_in_the_window_nor_on_the_rows_beside_it(dtype, files):
    model = load_pair(files / "target.tinygpt", dtype=dtype).target
    _, kv = forward(model, IDS[:8])
    together = forward(model, IDS[8:13], kv, 8)[0][0]
    for column in range(5):
        alone, kv = forward(model, [IDS[8 + column], 99, 99, 99, 99], kv, 8 + column)
        assert mx.array_equal(alone[0, 0], together[column]), column
    rows = mx.array([IDS[:5], IDS[5:10], IDS[10:15]], dtype=mx.int32)
    start = mx.zeros((3,), dtype=mx.int32)
    batch = model.forward(rows, model.make_kv(3, 256), start)[0]
    turned = model.forward(rows[::-1], model.make_kv(3, 256), start)[0]
    assert mx.array_equal(turned[::-1], batch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft_k", [1, 4])
@pytest.mark.parametrize("draft", ["draft.tinygpt", "target.tinygpt", "exported"])
def test_greedy_output_equals_the_reference(dtype, draft_k, draft, files):
    pair = load_pair(files / "target.tinygpt", files / draft, dtype=dtype)
    ids = decode(pair, PROMPTS, width=draft_k + 1, count=40)
    assert ids == decode(without_draft(pair), PROMPTS, width=draft_k + 1, count=40)


@pytest.mark.parametrize("draft", ["draft.tinygpt", "exported"])
def test_coupled_output_equals_plain_sampling(draft, files):
    pair, options = load_pair(files / "target.tinygpt", files / draft), {"temperature": 1.0, "coupled": True}
    ids = decode(pair, PROMPTS, width=5, count=40, **options)
    assert ids == decode(without_draft(pair), PROMPTS, width=5, count=40, **options)


def test_a_file_may_draft_for_a_directory_with_the_same_tokens(files):
    pair = load_pair(files / "exported", files / "draft.tinygpt")
    ids = decode(pair, PROMPTS, width=5, count=40)
    assert ids == decode(without_draft(pair), PROMPTS, width=5, count=40)
    assert ids == decode(load_pair(files / "target.tinygpt", files / "draft.tinygpt"), PROMPTS, width=5, count=40)


def test_a_pair_with_other_tokens_is_refused_naming_the_first(files, tiny_checkpoint):
    with pytest.raises(PairError, match="id 0 is"):
        load_pair(tiny_checkpoint, files / "draft.tinygpt")


def test_a_draft_of_a_shorter_context_stops_proposing_there_and_decoding_goes_on(files):
    """It has 48 positions: it may be fed the 48th token, whose logits are of the 49th."""
    pair = load_pair(files / "target.tinygpt", files / "short.tinygpt")
    assert (pair.target.context, pair.draft.context) == (256, 48)
    engine = Engine(pair, capacity=256, width=5)
    engine.insert(0, RowRequest(prompt=[8, 9] * 10, limit=120, draft_k=4))
    ids, proposed = [], {}
    while len(ids) < 100:
        step = engine.step()[0]
        proposed[20 + len(ids)] = step.proposed
        ids += step.tokens
    assert all(count == min(4, max(48 - length + 1, 0)) for length, count in proposed.items() if length + 4 < 120)
    assert {count > 0 for length, count in proposed.items() if length < 44} == {True}
    assert any(length > 60 for length in proposed)
    assert ids == decode(without_draft(pair), [[8, 9] * 10], width=5, count=100)[0][: len(ids)]


def test_a_prompt_beyond_the_drafts_context_is_decoded_without_proposals(files):
    pair = load_pair(files / "target.tinygpt", files / "short.tinygpt")
    prompt = [index % 256 for index in range(100)]
    assert decode(pair, [prompt], width=5, count=40) == decode(without_draft(pair), [prompt], width=5, count=40)


def test_it_decodes_to_the_last_position_of_the_context(files):
    """The windows of the last steps end behind it, where there is no position to look up."""
    pair = load_pair(files / "target.tinygpt", files / "draft.tinygpt")
    prompt = [index % 256 for index in range(200)]
    ids = decode(pair, [prompt], width=5, count=56, capacity=512)
    assert ids == decode(without_draft(pair), [prompt], width=5, count=56, capacity=512)


def test_a_position_behind_the_context_takes_the_last_ones_embedding(tmp_path):
    """MLX checks no index of a gather: the end of a window would be looked up in memory of something else."""
    header = read_checkpoint(save_tinygpt(tmp_path / "model.tinygpt")).native
    weights = read_tinygpt(header, "float32")
    rows = mx.concatenate([weights.positions, mx.broadcast_to(weights.positions[-1:], (10**5, 32))])
    longer = attrs.evolve(weights, positions=rows, shape=attrs.evolve(weights.shape, context=64 + 10**5))
    model = load_pair(header.path).target
    for start in (60, 64, 90_000):
        arguments = mx.array([IDS[:8]], dtype=mx.int32), model.make_kv(1, 256), mx.array([start], dtype=mx.int32)
        assert mx.array_equal(gpt_forward(weights)(*arguments)[0], gpt_forward(longer)(*arguments)[0])


# its tokenizer


@pytest.mark.parametrize("text", ["plain", "", "tab\tnewline\n\0", "Grüße, 世界 🎉", " leading and trailing "])
def test_bytes_are_tokens_and_come_back_as_text(text, files):
    tokenizer = load_pair(files / "target.tinygpt").tokenizer
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.size == 256
    assert not tokenizer.eos_ids


def test_bytes_that_are_no_text_become_the_replacement_character(files):
    assert load_pair(files / "target.tinygpt").tokenizer.decode([104, 0xC3, 105]) == "h\ufffdi"


@pytest.mark.parametrize("named", ["absolute", "relative", "moved"])
def test_the_tokenizer_that_the_header_names_is_used(named, tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded_path("target-16m") / name).read_bytes())
    source = {"absolute": str(folder), "relative": "words", "moved": "/home/nobody/words"}[named]
    path = save_tinygpt(tmp_path / "model.tinygpt", vocabSize=4096, tokenizerSource=source)
    pair, embedded = load_pair(path), load_pair()
    assert pair.tokenizer.vocabulary == embedded.tokenizer.vocabulary
    assert pair.tokenizer.encode("def add(a, b):") == embedded.tokenizer.encode("def add(a, b):")
    assert pair.vocab_size == 4096
    # so it drafts for a directory with that tokenizer
    both = attrs.evolve(load_pair(None, path))
    assert decode(both, [[5, 6]], width=3, count=12) == decode(without_draft(both), [[5, 6]], width=3, count=12)
    # a trace made here is of the same tokenizer wherever it is asked for
    assert tokenizer_fingerprint(path) == tokenizer_fingerprint(pair.tokenizer.path)


def test_a_tokenizer_json_alone_is_enough(tmp_path):
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((embedded_path("target-16m") / "tokenizer.json").read_bytes())
    path = save_tinygpt(tmp_path / "model.tinygpt", vocabSize=4096, tokenizerSource="words")
    tokenizer = load_pair(path).tokenizer
    assert tokenizer.encode("def add(a, b):") == load_pair().tokenizer.encode("def add(a, b):")
    assert tokenizer.eos_ids == frozenset()


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    path = save_tinygpt(tmp_path / "model.tinygpt", vocabSize=4096, tokenizerSource="/nowhere/words")
    with pytest.raises(CheckpointError, match=r"tokenizerSource: got /nowhere/words, expected a directory with tok"):
        load_pair(path)


def test_byte_files_have_one_tokenizer_by_its_fingerprint(files):
    prints = {tokenizer_fingerprint(files / name) for name in ("target.tinygpt", "draft.tinygpt")}
    assert len(prints) == 1


# where a model is named


def test_sample_record_and_replay_take_files(files, tmp_path):
    options = (
        files / "target.tinygpt",
        "--draft-model",
        files / "draft.tinygpt",
        "--prompt",
        "Grüße",
        "--max-tokens",
        30,
    )
    result = invoke("sample", *options, "--json", "--record", tmp_path / "trace.jsonl")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["usage"]["prompt_tokens"] == 7
    assert value["usage"]["completion_tokens"] == 30
    replayed = invoke("replay", tmp_path / "trace.jsonl")
    assert replayed.exit_code == 0, replayed.stdout + replayed.stderr
    assert replayed.stderr == ""
    assert "as recorded" in replayed.stdout


def test_the_gate_finds_it_identical_or_width_identical(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_module, "_DRAWN", dict.fromkeys(("cpu", "gpu"), 2))
    options = ("--prompts", "4", "--max-tokens", "16", "--draft-k", "2", "--json")
    for draft in ("draft.tinygpt", "exported"):
        result = invoke("gate", files / "target.tinygpt", "--draft-model", files / draft, *options)
        assert result.exit_code == 0, result.stdout + result.stderr
        assert json.loads(result.stdout)["verdict"] in ("identical", "width-identical")


def test_bench_takes_files(files):
    options = ("--json", "--repeats", "1", "--draft-k", "2", "--max-tokens", "8")
    result = invoke("bench", files / "target.tinygpt", "--draft-model", files / "draft.tinygpt", *options)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["name"] for row in rows] == ["plain, width 1", "speculative, K=2"]
    assert not any(row["failed"] for row in rows)
    installed = invoke("bench", files / "target.tinygpt", *options, "--as-installed")
    assert (installed.exit_code, len(installed.stderr.splitlines())) == (2, 1)
    assert "expected a directory; export-mlx or convert write one" in installed.stderr


def test_serve_takes_files_and_gives_the_text_of_sample(files, tmp_path):
    models = (str(files / "target.tinygpt"), "--draft-model", str(files / "draft.tinygpt"))
    expected = invoke("sample", *models, "--prompt", "hello", "--max-tokens", 12, "--json")
    with ServerProcess(tmp_path, *models, "--gate", "off") as server:
        answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 12, "temperature": 0}).json()
    assert answer["choices"][0]["text"] == json.loads(expected.stdout)["text"]
    assert answer["usage"]["draft_proposed"] > 0
    assert answer["model"] == "target.tinygpt"


def test_mlx_lms_module_is_refused_for_a_file(files):
    with pytest.raises(UnsupportedModelError, match=r"got module for a \.tinygpt file, expected auto"):
        load_pair(files / "target.tinygpt", forward="module")


def test_the_step_counter_is_skipped(tmp_path):
    """Four bytes behind the header that belong to no tensor."""
    weights = random_weights(SIZES, seed=1)
    contents = file_bytes(header_of(SIZES, "training"), body_of(weights, "training"), step=-1)
    place = contents.index(struct.pack("<i", -1), 12)
    first = read_checkpoint_bytes(tmp_path, contents).native.tensors["token_embedding.weight"].offset
    assert first == place + 4


def read_checkpoint_bytes(folder, contents):
    (folder / "model.tinygpt").write_bytes(contents)
    return read_checkpoint(folder / "model.tinygpt")
