"""Every decoder module of mlx-lm: the table, what it rests on, and what is refused."""

import json
import pkgutil
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mlx.utils import tree_map
from support import decode, without_draft

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.families import family_forward, family_of
from posttrainllm.adapters.loading.layer_caches import read_caches
from posttrainllm.adapters.loading.module import model_from_module
from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.evals.architectures.command import command
from posttrainllm.evals.architectures.comparing import compare
from posttrainllm.evals.architectures.configurations import configurations, helpers, stateful
from posttrainllm.evals.architectures.examine import TOLERANCE, Outcome, examine
from posttrainllm.evals.architectures.run import page
from posttrainllm.evals.architectures.table import MLX_LM, render
from posttrainllm.evals.architectures.tiny import random_module, save_model
from posttrainllm.kernel import cache
from posttrainllm.kernel.errors import UnsupportedModelError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architectures.md"
CONFIGURATIONS = {each.module: each for each in (*configurations(), *stateful())}
REPRESENTATIVES = {
    "llama": "sliding windows beside full attention",
    "deepseek_v3": "latent attention and experts",
    "deepseek_v32": "a list of two caches a layer",
    "llama4": "chunks, by a forward of ours",
    "minimax_m3_vl": "lists of which one has no values, by a forward of ours",
    "gemma3n": "layers that share what another one wrote",
    "afm7": "the same, by a forward of ours",
    "gpt_bigcode": "learned positions, by a forward of ours",
}
of_its_version = pytest.mark.skipif(version("mlx-lm") != MLX_LM, reason=f"the table is of mlx-lm {MLX_LM}")


@pytest.fixture
def quiet(monkeypatch):
    """transformers warns of every configuration that it does not know."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


def tiny_model(name):
    module = random_module(CONFIGURATIONS[name])
    return model_from_module(module, name=name, dtype="float32", context=512)


def saved(name, path, *, noise=0.0):
    """The directory of a module's random model, or of the same with noise on its weights."""
    module, generator = random_module(CONFIGURATIONS[name]), np.random.default_rng(3)
    if noise:
        module.update(
            tree_map(
                lambda array: array + noise * mx.array(generator.standard_normal(array.shape).astype(np.float32)),
                module.parameters(),
            )
        )
    save_model(module, CONFIGURATIONS[name].config, path)
    return path


@of_its_version
def test_every_module_of_mlx_lm_stands_in_one_list():
    import mlx_lm.models

    listed = [*CONFIGURATIONS, *helpers()]
    assert sorted(listed) == sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))


def test_the_page_claims_nine_in_ten_and_the_readme_says_the_same():
    claims = re.search(r"\*\*(\d+) of (\d+) decoder modules are supported", PAGE.read_text(encoding="utf-8"))
    supported, count = int(claims[1]), int(claims[2])
    assert count == len(configurations())
    assert supported / count >= 0.9
    assert f"{supported} of {count} decoder modules" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_one_of_every_kind_of_cache_gives_mlx_lms_logits(name, quiet):
    outcome = examine(CONFIGURATIONS[name])
    assert outcome.supported, outcome.reason
    assert outcome.own_forward == REPRESENTATIVES[name].endswith("of ours")


def test_a_window_that_is_one_too_long_is_seen(monkeypatch):
    model = tiny_model("llama")
    assert compare(model, model.module).error < TOLERANCE
    right = cache.attention_mask
    monkeypatch.setattr(
        cache,
        "attention_mask",
        lambda position, width, slots, window: right(position, width, slots, window and window + 1),
    )
    assert compare(model, model.module).error > 100 * TOLERANCE


def test_a_cache_that_forgets_what_was_written_over_a_rejected_tail_is_seen():
    model = tiny_model("deepseek_v3")

    def stale(tokens, kv, position):
        """The newest position keeps what stood there before, as if a rewind had not been followed by a write."""
        logits, written = model.forward(tokens, kv, position)
        if tokens.shape[0] == 1:
            return logits, written
        slots = mx.arange(kv[0][0].shape[2])[None, None, :, None] == position[:, None, None, None]
        return logits, tuple(
            tuple(mx.where(slots, old, new) for old, new in zip(before, after, strict=True))
            for before, after in zip(kv, written, strict=True)
        )

    assert compare(attrs.evolve(model, forward=stale), model.module).error > 100 * TOLERANCE


def test_a_model_that_does_not_look_back_is_not_called_supported(quiet, monkeypatch):
    """It would agree with anything: its logits are a function of the newest id alone."""
    from mlx_lm.models.llama import Attention

    monkeypatch.setattr(Attention, "__call__", lambda self, x, mask=None, cache=None: written(x, cache))

    def written(x, cache):
        rows, width, _ = x.shape
        cache.update_and_fetch(*[mx.zeros((rows, 2, width, 16))] * 2)
        return mx.zeros_like(x)

    outcome = examine(CONFIGURATIONS["smollm3"])
    assert (outcome.verdict, outcome.supported) == ("differs", False)
    assert "the first id changes the last logits by 0.0e+00 alone" in outcome.reason


def test_a_pair_of_a_list_goes_to_its_place():
    """deepseek_v32: keys and values, then the indexer's keys, for each of four layers."""
    caches, vocab_size = read_caches(random_module(CONFIGURATIONS["deepseek_v32"]), name="x", dtype="float32")
    assert (caches.sizes, len(caches.kv_shapes), vocab_size) == ((2,) * 4, 8, 4096)
    assert caches.kv_shapes[:2] == ((1, 16, 8), (1, 16, 16))


def test_layers_of_experts_that_mlx_lm_sorts_and_loops_over_count_the_same():
    """dbrx: mlx-lm runs the chosen experts one by one, ours all of them, and weighs the others with 0."""
    model = tiny_model("dbrx")
    assert compare(model, model.module).error < TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_positions_behind_the_last_are_looked_up_at_the_last(name):
    """MLX checks no index: padding behind the context would read memory that is no position's."""
    configuration = CONFIGURATIONS[name]
    module = random_module(attrs.evolve(configuration, config=configuration.config | {"n_positions": 32}))
    model = model_from_module(module, name=name, dtype="float32", context=32)
    keys = model.forward(mx.array([[7] * 4], dtype=mx.int32), model.make_kv(1, 64), mx.array([30], dtype=mx.int32))[1][
        0
    ][0]
    assert not mx.array_equal(keys[:, :, 30], keys[:, :, 31])
    assert mx.array_equal(keys[:, :, 31], keys[:, :, 32])
    assert mx.array_equal(keys[:, :, 31], keys[:, :, 33])


SPECULATED = ["deepseek_v3", "deepseek_v32", "llama4"]


@pytest.mark.parametrize("name", SPECULATED)
def test_a_draft_changes_nothing(name, tmp_path, quiet):
    pair = load_pair(saved(name, tmp_path / "target"), saved(name, tmp_path / "draft", noise=0.05), dtype="float32")
    prompts = [[3], [4, 5, 6, 7], [8, 9] * 20]
    ids = decode(pair, prompts, width=5, count=40)
    assert ids == decode(without_draft(pair), prompts, width=5, count=40)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", ["falcon_h1", "longcat_flash_ngram"])
def test_a_list_of_which_one_cache_keeps_a_state_is_refused(name, role, quiet):
    outcome = examine(CONFIGURATIONS[name], draft=role == "draft")
    assert outcome.verdict == "refused"
    assert re.fullmatch(r"layer 0 has the cache ArraysCache.*, .*cannot be rewound.*", outcome.reason)


def test_a_module_that_misses_a_package_is_refused_in_one_line(tiny_checkpoint, tmp_path, capsys):
    """Case: mlx-lm's olmo prints and leaves the process when it is imported without ai2-olmo."""
    if any(module.name == "hf_olmo" for module in pkgutil.iter_modules()):
        pytest.skip("ai2-olmo is here")
    path = shutil.copytree(tiny_checkpoint, tmp_path / "olmo")
    config = (path / "config.json").read_text(encoding="utf-8")
    (path / "config.json").write_text(config.replace('"llama"', '"olmo"'), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"mlx-lm cannot load 'olmo' here: To run olmo install ai2-olmo"):
        load_pair(path)
    assert capsys.readouterr().out == ""


def test_a_module_that_is_wrong_in_mlx_lm_is_refused_with_the_reason():
    """Windows of phi3small see what comes later in their block."""
    outcome = examine(CONFIGURATIONS["phi3small"])
    assert outcome.reason.startswith("phi3small cannot be used: mlx-lm's block-sparse attention")


@pytest.mark.skipif(mx.metal.is_available(), reason="it runs on Metal")
@pytest.mark.parametrize("name", ["bitnet", "muse_spark"])
def test_a_module_of_metal_kernels_is_refused_elsewhere(name, quiet):
    assert examine(CONFIGURATIONS[name]).reason == "its layers are kernels for Metal, which is not here"


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a GPU has experts of 16 bits")
def test_a_dtype_that_the_device_lacks_is_refused_at_load_with_the_remedy(tmp_path):
    """Case: experts in bfloat16 on a CPU fail in the middle of the first prompt."""
    path = saved("mixtral", tmp_path / "experts")
    with pytest.raises(UnsupportedModelError, match=r"does not run here in bfloat16: .*; --dtype float32 may"):
        load_pair(path, dtype="bfloat16")


@pytest.mark.parametrize(("name", "field"), [("openelm", "max_context_length"), ("lille-130m", "block_size")])
def test_a_familys_own_name_of_the_context_is_known(name, field, tmp_path):
    path = saved(name, tmp_path / name)
    assert CONFIGURATIONS[name].config[field] == read_checkpoint(path).context == 512


def test_the_page_counts_what_it_lists():
    outcomes = [
        Outcome(module="a", features="", caches="everything", verdict="exact"),
        Outcome(module="b", features="experts", caches="lists", verdict="within", own_forward=True),
        Outcome(module="c", features="", verdict="refused", reason="no"),
        Outcome(module="d", features="", caches="chunks", verdict="differs", reason="by 0.1"),
    ]
    text = render(outcomes, [(stateful()[0], outcomes[2])], {"base": "shared"}, versions="x")
    assert "**2 of 4 decoder modules are supported (50%).** 1 are exact, 1 within the tolerance, 1\nare refused" in text
    assert "Of all 5 modules that are models, 2 run here (40%)" in text
    assert "| b \\* | experts | lists | within |" in text
    assert "| c |  |  | refused: no |" in text
    assert "| d |  | chunks | differs: by 0.1 |" in text


def test_the_command_names_a_module_that_is_none():
    result = CliRunner().invoke(command, ["no_such_module"])
    assert (result.exit_code, "got 'no_such_module', expected modules of mlx-lm" in result.output) == (2, True)


def test_every_forward_of_ours_is_of_a_module_that_mlx_lm_has():
    own = {name for name in CONFIGURATIONS if family_forward(name) is not None}
    assert own == {"afm7", "dbrx", "gpt2", "gpt_bigcode", "llama4", "minimax_m3_vl"}
    assert family_of(random_module(CONFIGURATIONS["afm7"])) == "afm7"


def comparable(text: str) -> list[str]:
    """Lines without what another machine may change: the order of a sum, versions, and what Metal runs."""
    lines = re.sub(r"(?<=\| )(exact|within)(?= \||:)", "equal", text).splitlines()
    lines = [re.sub(r"\d+ are exact, \d+ within", "exact and within", line) for line in lines]
    metal = ("| bitnet |", "| muse_spark |")
    return [line for line in lines if not line.startswith(("Run on", *(metal if mx.metal.is_available() else ())))]


@pytest.mark.slow
@of_its_version
def test_the_page_is_what_the_modules_give(quiet):
    assert comparable(page()) == comparable(PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", [each.module for each in stateful()])
def test_every_module_with_a_state_is_refused_in_one_line(name, role, quiet):
    outcome = examine(CONFIGURATIONS[name], draft=role == "draft")
    assert outcome.verdict == "refused"
    assert re.fullmatch(r"layer \d+ has the cache \w+( in a \w+)?, expected .*cannot be rewound.*", outcome.reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REPRESENTATIVES, "mixtral", "dbrx", "longcat_flash", "gpt2", "qwen3_vl", "gemma4"])
def test_sample_emits_the_same_with_a_draft_and_without(name, tmp_path, quiet):
    target = saved(name, tmp_path / "target")
    draft = saved(name, tmp_path / "draft", noise=0.02)
    common = ["--prompt", "def main():\n    return 1\n" * 6, "--max-tokens", "48", "--ignore-eos", "--json"]
    results = []
    for options in (["--draft-model", str(draft), "--draft-k", "4"], ["--no-draft", "--plain-width", "5"]):
        result = CliRunner().invoke(cli, ["sample", str(target), *options, *common])
        assert result.exit_code == 0, result.output
        results.append(json.loads(result.stdout))
    assert 0 < results[0]["usage"]["draft_accepted"] < results[0]["usage"]["draft_proposed"]  # windows with tails
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert len(results[0]["token_ids"]) == 48
