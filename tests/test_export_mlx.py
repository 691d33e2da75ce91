"""`posttrainllm export-mlx`: a directory that mlx-lm loads, with a `.tinygpt` file's very weights, ids and logits."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from test_tinygpt import IDS, close, forward, invoke
from tinygpt_files import SIZES, random_weights, reference_logits, save_tinygpt

from posttrainllm.adapters.loading import export as export_module
from posttrainllm.adapters.loading.gpt_reader import read_exported
from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError


def export(path, out):
    done = invoke("export-mlx", path, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    return out


@pytest.mark.parametrize("layout", ["training", "inference"])
def test_mlx_lm_loads_it_and_computes_the_files_logits(layout, tmp_path):
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    weights = random_weights(SIZES, seed=1)
    path = save_tinygpt(tmp_path / "model.tinygpt", weights=weights, layout=layout)
    module, tokenizer = mlx_lm.load(str(export(path, tmp_path / "out")))
    module.set_dtype(mx.float32)
    logits = module(mx.array([IDS], dtype=mx.int32))[0]
    assert close(logits, reference_logits(weights, SIZES, IDS))
    assert close(logits, np.array(forward(load_pair(path, dtype="float32").target, IDS)[0][0]), 1e-6)
    cache = make_prompt_cache(module)
    parts = [module(mx.array([part], dtype=mx.int32), cache=cache)[0] for part in (IDS[:9], IDS[9:])]
    assert close(mx.concatenate(parts), reference_logits(weights, SIZES, IDS))
    text = "Grüße, 世界 🎉\n\tx  y"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert isinstance(mlx_lm.generate(module, tokenizer, "hello", max_tokens=4), str)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["training", "inference"])
def test_it_is_loaded_here_with_the_files_own_bits(layout, dtype, tmp_path):
    path = save_tinygpt(tmp_path / "model.tinygpt", layout=layout)
    file = load_pair(path, dtype=dtype)
    directory = load_pair(export(path, tmp_path / "out"), dtype=dtype)
    assert mx.array_equal(*(forward(pair.target, IDS)[0] for pair in (file, directory)))
    assert file.tokenizer.vocabulary == directory.tokenizer.vocabulary
    assert file.tokenizer.eos_ids == directory.tokenizer.eos_ids
    for name in ("vocab_size", "context", "kv_shapes", "kv_dtype", "variant", "weight_bytes"):
        assert getattr(file.target, name) == getattr(directory.target, name), name


@pytest.mark.parametrize(("layout", "dtype"), [("training", mx.float32), ("inference", mx.float16)])
def test_tensors_are_as_stored(layout, dtype, tmp_path):
    weights = random_weights(SIZES, seed=1)
    out = export(save_tinygpt(tmp_path / "model.tinygpt", weights=weights, layout=layout), tmp_path / "out")
    arrays = mx.load(str(out / "model.safetensors"))
    assert {array.dtype for array in arrays.values()} == {dtype}
    assert np.array_equal(np.array(arrays["transformer.h.1.mlp.c_fc.weight"]), weights["blocks.1.mlp.fc_in.weight"])
    joined = np.concatenate([weights[f"blocks.0.attn.{name}_proj.bias"] for name in "qkv"])
    assert np.array_equal(np.array(arrays["transformer.h.0.attn.c_attn.bias"]), joined)
    assert sum(array.size for array in arrays.values()) == sum(array.size for array in weights.values())


def test_a_named_tokenizer_is_copied_with_its_end_of_text(tmp_path):
    shutil.copytree(embedded_path("target-16m"), tmp_path / "words", ignore=shutil.ignore_patterns("model*"))
    path = save_tinygpt(tmp_path / "model.tinygpt", vocabSize=4096, tokenizerSource="words")
    out = export(path, tmp_path / "out")
    file, directory, embedded = (load_pair(name).tokenizer for name in (path, out, None))
    assert file.eos_ids == directory.eos_ids == embedded.eos_ids == {0}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [0]
    for text in ("def add(a, b):\n    return a", "  two  spaces "):
        assert file.encode(text) == directory.encode(text) == embedded.encode(text)


def test_what_is_there_already_is_left_alone(tmp_path):
    path = save_tinygpt(tmp_path / "model.tinygpt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    done = invoke("export-mlx", path, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "which is there already, expected a new or an empty directory" in done.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    export(path, tmp_path / "out")


def test_a_failure_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch):
    def fails(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "_write_tokenizer", fails)
    path = save_tinygpt(tmp_path / "model.tinygpt")
    done = invoke("export-mlx", path, "--out", tmp_path / "out")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert "No space left" in done.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["nothing", "directory"])
def test_what_is_no_such_file_is_one_line(name, tmp_path, tiny_checkpoint):
    source = tiny_checkpoint if name == "directory" else tmp_path / "nothing.tinygpt"
    done = invoke("export-mlx", source, "--out", tmp_path / "out")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert ("expected a .tinygpt file" if name == "directory" else "got nothing there") in done.stderr


def edit_config(out, **changes):
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))


def test_another_writers_model_of_that_name_is_not_taken_for_ours(tmp_path):
    """transformers orders the rows of `c_attn` by heads; nothing in a config would say so."""
    out = export(save_tinygpt(tmp_path / "model.tinygpt"), tmp_path / "out")
    edit_config(out, exported_by=None)
    with pytest.raises(UnsupportedModelError, match="transformers writes them head by head"):
        load_pair(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 5}, "n_embd: got 32, expected a multiple of 5 heads"),
        ({"n_layer": 1}, r"got a tensor 'transformer\.h\.1\."),
        ({"n_layer": 3}, r"transformer\.h\.2\.ln_1\.weight: got nothing, expected floats \[32\]"),
        ({"n_inner": 64}, r"c_fc\.weight: got mlx\.core\.float32 \[80, 32\], expected floats \[64, 32\]"),
        ({"n_inner": 0}, "n_inner: got 0, expected a number above 0"),
        ({"layer_norm_epsilon": 0.0}, r"layer_norm_epsilon: got 0\.0"),
        ({"vocab_size": 10**12}, r"transformer\.wte\.weight: got"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused_with_got_and_expected(changes, message, tmp_path):
    out = export(save_tinygpt(tmp_path / "model.tinygpt"), tmp_path / "out")
    edit_config(out, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_pair(out)


def test_every_other_checkpoint_is_left_to_its_own_reader(tiny_checkpoint):
    from posttrainllm.adapters.loading.checkpoint import read_checkpoint

    assert read_exported(read_checkpoint(tiny_checkpoint), "float32") is None
