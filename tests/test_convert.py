"""`posttrainllm convert`: directories that mlx-lm loads, of GGUF files and of the first layers of a model."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import BOOL, TEXT, item, reference_logits, save_gguf
from mlx.utils import tree_flatten
from support import decode, tiny_config
from test_gguf import IDS, close, invoke, load, logits_of
from test_gguf_tokenizer import TEXTS

from posttrainllm.adapters.loading import conversion, new_directory
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.layer_cut import cut_config
from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.adapters.loading.tokenizer import load_tokenizer
from posttrainllm.evals.architectures.configurations import configurations
from posttrainllm.evals.architectures.tiny import random_module, save_model


def convert(*arguments):
    done = invoke("convert", *arguments)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def refused(*arguments, code=1):
    done = invoke("convert", *arguments)
    assert done.exit_code == code
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").strip()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, kind="Q4_0", kinds={"token_embd.weight": "Q8_0"})
    return path


# GGUF files


def test_packed_weights_keep_their_bits_and_the_directory_computes_what_the_file_does(file, tmp_path):
    out = tmp_path / "out"
    assert convert(file, "--out", out) == f"{out}: 2 layers, 0.1 MB\n"
    assert np.array_equal(logits_of(load(file)), logits_of(load(out)))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    one, other = read_checkpoint(file), read_checkpoint(out)
    for name in ("weight_bytes", "float_bytes", "dtype", "context", "quantized"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_makes_floats_of_everything(dtype, tmp_path):
    file, out = tmp_path / "model.gguf", tmp_path / "out"
    stored = save_gguf(file, kind="Q4_1")
    convert(file, "--out", out, "--dtype", dtype)
    arrays = mx.load(str(out / "model.safetensors"))
    assert {array.dtype for array in arrays.values()} == {getattr(mx, dtype)}
    assert read_checkpoint(out).dtype == dtype
    assert close(logits_of(load(out)), reference_logits(stored, IDS), 2e-5 if dtype == "float32" else 3e-2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_mlx_lm_loads_the_directory_with_the_same_logits_and_ids(family, tmp_path):
    import mlx_lm

    file, out = tmp_path / "model.gguf", tmp_path / "out"
    pre = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}[family]
    extra = {"tokenizer.ggml.pre": item(TEXT, pre), "tokenizer.ggml.add_bos_token": item(BOOL, family == "llama")}
    stored = save_gguf(file, family, kind="Q8_0", extra=extra)
    convert(file, "--out", out)
    module, tokenizer = mlx_lm.load(str(out))
    module.set_dtype(mx.float32)
    assert close(module(mx.array([IDS], dtype=mx.int32))[0], reference_logits(stored, IDS, family))
    ours, written = (load_tokenizer(read_checkpoint(path)) for path in (file, out))
    asked = [{"role": "user", "content": "hello world"}]
    assert ours.encode("hello")[0] == 1 or family != "llama"
    for text in TEXTS:
        assert ours.encode(text) == written.encode(text) == tokenizer.encode(text), text
    assert ours.encode_chat(asked) == written.encode_chat(asked)
    assert ours.encode_chat(asked) == tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert ours.eos_ids == written.eos_ids
    assert ours.vocabulary == written.vocabulary
    assert ours.special_ids == written.special_ids


def test_types_that_mlx_does_not_read_become_floats(tmp_path):
    pytest.importorskip("gguf", reason="what turns K-quants into floats: pip install 'posttrainllm[gguf]'")
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "mlp": 256, "layers": 1}
    file = tmp_path / "model.gguf"
    stored = save_gguf(file, sizes=sizes, kind="Q6_K", kinds={"attn_output.weight": "Q4_0", "ffn_up.weight": "Q8_0"})
    for dtype, tolerance in (("float32", 2e-5), ("auto", 2e-3)):
        out = tmp_path / dtype
        convert(file, "--out", out, "--dtype", dtype)
        assert close(logits_of(load(out)), reference_logits(stored, IDS, sizes=sizes), tolerance)
    config = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4}  # of the one weight that stays packed
    arrays = mx.load(str(tmp_path / "auto" / "model.safetensors"))
    assert arrays["model.layers.0.self_attn.o_proj.weight"].dtype == mx.uint32
    assert arrays["model.layers.0.mlp.up_proj.weight"].dtype == mx.float16  # its neighbour is not packed


def test_types_that_nobody_reads_and_a_package_that_is_missing_are_named(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    sizes = {"hidden": 256, "heads": 4, "mlp": 32, "layers": 1}
    save_gguf(file, sizes=sizes, kinds={"attn_q.weight": "Q6_K"})
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "gguf.quants", None)
        assert refused(file, "--out", tmp_path / "out") == (
            f"{file}: blk.0.attn_q.weight is Q6_K, which the package gguf turns into floats: got none, expected "
            "`pip install 'posttrainllm[gguf]'`"
        )
    pytest.importorskip("gguf")
    raw = file.read_bytes()
    name = b"blk.0.attn_q.weight"
    place = raw.index(name) + len(name) + 4 + 16
    file.write_bytes(raw[:place] + (15).to_bytes(4, "little") + raw[place + 4 :])  # Q8_K is longer: the file is cut
    assert "Q8_K" in refused(file, "--out", tmp_path / "out") or "overlaps" in refused(file, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_large_models_are_written_in_several_files(file, tmp_path, monkeypatch):
    monkeypatch.setattr(new_directory, "_MOST_FILE_BYTES", 20_000)
    convert(file, "--out", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("model*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert np.array_equal(logits_of(load(file)), logits_of(load(tmp_path / "out")))
    convert(tmp_path / "out", "--layers", 1, "--out", tmp_path / "cut")
    monkeypatch.undo()
    convert(file, "--layers", 1, "--out", tmp_path / "other")
    assert np.array_equal(logits_of(load(tmp_path / "cut")), logits_of(load(tmp_path / "other")))


# first layers


def test_a_drafts_logits_are_those_of_the_first_layers(tmp_path):
    file, out = tmp_path / "model.gguf", tmp_path / "draft"
    stored = save_gguf(file, sizes={"layers": 3}, kind="Q8_0")
    convert(file, "--layers", 2, "--out", out)
    assert close(logits_of(load(out)), reference_logits(stored, IDS, sizes={"layers": 2}))
    assert not close(logits_of(load(out)), reference_logits(stored, IDS, sizes={"layers": 3}), 1e-2)


def test_a_directorys_and_a_files_first_layers_are_the_same(file, tmp_path):
    convert(file, "--out", tmp_path / "whole", "--dtype", "float16")
    convert(tmp_path / "whole", "--layers", 1, "--out", tmp_path / "one")
    convert(file, "--layers", 1, "--dtype", "float16", "--out", tmp_path / "other")
    one, other = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(mx.array_equal(one[name], other[name]) for name in one)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "one" / name).read_text()) == json.loads((tmp_path / "other" / name).read_text())


def test_weights_of_a_directory_stay_as_they_are_and_the_pair_decodes(tmp_path):
    target = embedded_path("target-16m")
    count = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    said = convert(target, "--layers", count // 2, "--out", tmp_path / "draft")
    assert f": {count // 2} layers, " in said
    whole = {name: array for file in target.glob("model*.safetensors") for name, array in mx.load(str(file)).items()}
    cut = mx.load(str(tmp_path / "draft" / "model.safetensors"))
    assert 0 < len(cut) < len(whole)
    assert all(cut[name].dtype == whole[name].dtype and mx.array_equal(cut[name], whole[name]) for name in cut)
    assert not (tmp_path / "draft" / "MODEL_CARD.md").exists()
    pair = load_pair(target, tmp_path / "draft")
    assert not pair.notes
    prompts = [pair.tokenizer.encode("def add(a, b):")]
    assert decode(pair, prompts, width=5, count=24) == decode(pair.plain("test"), prompts, width=5, count=24)


def test_settings_of_each_layer_are_cut_with_them():
    types = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    inner = {"num_hidden_layers": 6, "layer_types": types[:6]}  # nested, as models of text and pictures have it
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)} | {"model.norm.weight"}
    config = cut_config(Path("model"), {"model_type": "x", "text_config": inner}, tensors, 4)
    assert config == {"model_type": "x", "text_config": {"num_hidden_layers": 4, "layer_types": types[:4]}}


@pytest.mark.parametrize("family", ["gpt2", "olmo3", "mellum", "dbrx"])
def test_first_layers_of_other_architectures_load(family, tmp_path, monkeypatch):
    """Cases: two names for the number of layers; kinds of layers in lists."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    out = tmp_path / "draft"
    convert(saved_model(family, tmp_path / "model"), "--layers", 3, "--out", out)
    pair = load_pair(tmp_path / "model", out)
    assert len(pair.draft.kv_shapes) == 3


@pytest.mark.parametrize(
    ("family", "part"),
    [("gemma3", "IndexError: list index out of range"), ("olmo3", "'full_attention' is not in list")],
)
def test_layers_that_are_no_model_of_their_own_are_refused_and_nothing_is_written(family, part, tmp_path):
    model = saved_model(family, tmp_path / "model")
    said = refused(model, "--layers", 1, "--out", tmp_path / "draft")
    assert said.startswith(f"{model}: --layers: got 1, expected as many as are a model of their own: ")
    assert said.endswith(part)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def saved_model(family, path):
    configuration = next(found for found in configurations() if found.module == family)
    save_model(random_module(configuration), configuration.config, path)
    return path


@pytest.mark.parametrize("layers", [0, -1, 2, 3])
def test_more_layers_than_there_are_or_none_are_refused(layers, file, tmp_path):
    said = refused(file, "--layers", layers, "--out", tmp_path / "out", code=2)
    assert said == f"--layers: got {layers}, expected 1 to 1, fewer than {file} has"
    assert not (tmp_path / "out").exists()


def test_layers_that_cannot_be_told_apart_are_refused(tmp_path):
    from support import save_tiny_llama

    path = save_tiny_llama(tmp_path / "model", seed=1, layers=2)
    config = tiny_config(layers=2)
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    said = refused(path, "--layers", 1, "--out", tmp_path / "out")
    assert said == (
        f"{path}: --layers: got num_hidden_layers 1 and tensors of 2 blocks, expected a stack of numbered layers"
    )


def test_what_there_is_nothing_to_convert_of_is_refused(tmp_path, file, tiny_checkpoint):
    out = tmp_path / "out"
    assert refused(tiny_checkpoint, "--out", out, code=2).startswith("--layers: got none for ")
    missing = tmp_path / "missing.gguf"
    assert refused(missing, "--out", out) == f"{missing}: got nothing there, expected a GGUF file or a model directory"
    assert refused("", "--out", out, code=2) == "MODEL: got an empty text, expected a GGUF file or a model directory"
    assert refused(tiny_checkpoint, "--out", out, "--layers", 1, "--dtype", "float16", code=2).startswith(
        "--dtype: got"
    )
    assert "expected a GGUF file or a model dir" in refused(tmp_path / "nothing", "--layers", 1, "--out", out)
    from tinygpt_files import save_tinygpt

    native = save_tinygpt(tmp_path / "model.tinygpt")
    assert refused(native, "--out", out, "--layers", 1).endswith(
        "got a .tinygpt file, expected a directory; export-mlx writes one"
    )
    out.mkdir()
    (out / "precious").touch()
    assert refused(file, "--out", out, code=2).startswith(f"--out: got {out}, which is there already")
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_a_failure_in_the_middle_leaves_nothing_behind(file, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(conversion, "write_weights", fails)
    before = sorted(tmp_path.iterdir())
    assert refused(file, "--out", tmp_path / "out") == f"{tmp_path / 'out'}: cannot be written: the disk is full"
    assert sorted(tmp_path.iterdir()) == before


def test_an_exported_tinygpt_file_is_cut_too(tmp_path):
    from tinygpt_files import save_tinygpt

    native = save_tinygpt(tmp_path / "model.tinygpt")
    assert invoke("export-mlx", native, "--out", tmp_path / "whole").exit_code == 0
    convert(tmp_path / "whole", "--layers", 1, "--out", tmp_path / "draft")
    pair = load_pair(tmp_path / "whole", tmp_path / "draft", dtype="float32")
    assert len(pair.draft.kv_shapes) == 1
    assert decode(pair, [[1, 2, 3]], width=5, count=12, capacity=64) == decode(
        pair.plain("test"), [[1, 2, 3]], width=5, count=12, capacity=64
    )


def test_a_directory_holds_every_array_of_its_model_and_no_other(file, tmp_path):
    convert(file, "--out", tmp_path / "out", "--dtype", "float32")
    module = load_pair(tmp_path / "out", dtype="float32").target.module
    written = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert {name for name, _ in tree_flatten(module.parameters())} == set(written)
