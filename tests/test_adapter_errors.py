"""Adapters that cannot be used end in one line with got and expected, and the commands that take them say it."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from adapter_files import RANK, modules_of, save_mlx_lm, save_peft
from serving import ServerProcess
from support import save_tiny_llama
from test_cli import invoke as invoke_words
from test_fuzz import with_evil_values
from test_replay_command import assert_one_line
from tinygpt_files import save_tinygpt

import posttrainllm
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.adapters.replay.reading import read_trace
from posttrainllm.evals import accept_rate, specdec_numerics, step_costs
from posttrainllm.kernel.errors import CheckpointError, LoadError, MemoryLimitError, UnsupportedModelError, UsageError


def invoke(*arguments):
    return invoke_words(*map(str, arguments))


Q = "model.layers.0.self_attn.q_proj"
PARAMETERS = {"rank": RANK, "scale": 3.0, "dropout": 0.0}


def load(model, adapter, **options):
    return load_pair(model, changes=ModelChanges(adapter_path=adapter), **options)


def tensors(adapter, **changes):
    """Replace tensors of an adapter: by name, or with no value dropped."""
    file = next(adapter.glob("*.safetensors"))
    arrays = {name: mx.array(np.array(array)) for name, array in mx.load(str(file)).items()}
    for name, array in changes.items():
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array
    mx.save_safetensors(str(file), arrays)


def config(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(model, adapter, error, *parts):
    """One line with all of the parts, on both paths that read adapters."""
    for options in ({}, {"forward": "module"}):
        with pytest.raises(error) as caught:
            load(model, adapter, **options)
        text = str(caught.value)
        assert "\n" not in text
        assert len(text) < 600
        assert all(part in text for part in parts), text


MLX_LM_CASES = {
    "no type": ({"fine_tune_type": None, "lora_parameters": None}, "fine_tune_type: got None"),
    "another type": ({"fine_tune_type": "ia3"}, "fine_tune_type: got 'ia3', expected one of lora, dora, full"),
    "no scale": ({"lora_parameters": {"rank": 4, "alpha": 8}}, "lora_parameters.scale: got None, expected a finite"),
    "no rank": ({"lora_parameters": {"scale": 2}}, "lora_parameters.rank: got None, expected a whole number from 1 up"),
    "a flag for a rank": ({"lora_parameters": {"rank": True, "scale": 2}}, "lora_parameters.rank: got True"),
    "infinite": ({"lora_parameters": {"rank": 4, "scale": float("inf")}}, "lora_parameters.scale: got inf"),
    "larger than a float": (
        {"lora_parameters": {"rank": 4, "scale": 10**400}},
        "lora_parameters.scale: got 1000",
        "expected a finite number",
    ),
    "larger than a size": ({"lora_parameters": {"rank": 10**4000, "scale": 2}}, "expected [128, 1000"),
    "no object": ({"lora_parameters": [4]}, "lora_parameters: got [4], expected an object with rank and scale"),
    "old layers": ({"num_layers": None}, "num_layers: got None, expected a whole number"),
    "keys": (
        {"lora_parameters": PARAMETERS | {"keys": "q_proj"}},
        "lora_parameters.keys: got 'q_proj', expected a list",
    ),
    "another rank": (
        {"lora_parameters": PARAMETERS | {"rank": 8}},
        "got the shape [128, 4], expected [128, 8]",
    ),
    "one layer": ({"num_layers": 1}, "got an update of model.layers.0", "expected one of the last 1 of 2 layers"),
    "other keys": (
        {"lora_parameters": PARAMETERS | {"keys": ["mlp.up_proj"]}},
        "got an update of model.layers.0",
        "expected one of its config's keys",
    ),
    "no magnitudes": ({"fine_tune_type": "dora"}, ".m is missing, lora_a of the same module is there"),
}


@pytest.mark.parametrize("case", MLX_LM_CASES)
def test_a_config_of_mlx_lm_that_does_not_fit_is_refused(tiny_checkpoint, tmp_path, case):
    changes, *parts = MLX_LM_CASES[case]
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    config(adapter, **changes)
    refused(tiny_checkpoint, adapter, CheckpointError, str(adapter), *parts)


PEFT_CASES = {
    "another method": ({"peft_type": "IA3"}, "peft_type: got 'IA3', expected LORA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save: got ['lm_head'], expected none"),
    "biases": ({"bias": "all"}, "bias: got 'all', expected none"),
    "biases of LoRA": ({"lora_bias": True}, "lora_bias: got True, expected none"),
    "ranks": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: got {'q_proj': 8}, expected none"),
    "alphas": ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern: got {'q_proj': 8}, expected one lora_alpha"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights: got 'pissa', expected true"),
    "turned": ({"fan_in_fan_out": True}, "fan_in_fan_out: got True, expected none"),
    "of tomorrow": ({"use_something_new": 3}, "use_something_new: got 3, expected none"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices: got [1], expected none"),
}


@pytest.mark.parametrize("case", PEFT_CASES)
def test_what_peft_has_beside_factors_is_refused_by_its_name(tiny_checkpoint, tmp_path, case):
    changes, part = PEFT_CASES[case]
    adapter = save_peft(tmp_path / "adapter", modules_of(2))
    config(adapter, **changes)
    refused(tiny_checkpoint, adapter, UnsupportedModelError, "adapter_config.json", part)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"r": 0}, "r: got 0, expected a whole number from 1 up"),
        ({"r": 8}, "lora_A.weight: got the shape [4, 128], expected [8, 128]"),
        ({"lora_alpha": None}, "lora_alpha: got None, expected a finite number"),
        ({"use_rslora": 1}, "use_rslora: got 1, expected true or false"),
        ({"use_dora": True}, "lora_magnitude_vector of model.layers"),
    ],
)
def test_a_config_of_peft_that_does_not_fit_is_refused(tiny_checkpoint, tmp_path, changes, part):
    adapter = save_peft(tmp_path / "adapter", modules_of(2))
    config(adapter, **changes)
    refused(tiny_checkpoint, adapter, CheckpointError, part)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 4096)),
        ("base_model.model.lm_head.weight", (4096, 64)),
        (f"base_model.model.{Q}.lora_B.bias", (64,)),
        (f"{Q}.lora_A.weight", (4, 64)),
    ],
)
def test_tensors_of_peft_that_are_no_factors_are_refused_by_name(tiny_checkpoint, tmp_path, name, shape):
    adapter = save_peft(tmp_path / "adapter", modules_of(2))
    tensors(adapter, **{name: mx.zeros(shape)})
    refused(tiny_checkpoint, adapter, UnsupportedModelError, name, "no embeddings, biases or whole modules")


def test_a_magnitude_that_stands_there_twice_is_refused(tiny_checkpoint, tmp_path):
    adapter = save_peft(tmp_path / "adapter", modules_of(2), kind="dora")
    name = f"base_model.model.{Q}.lora_magnitude_vector"
    tensors(adapter, **{f"{name}.weight": mx.ones((64,))})
    refused(tiny_checkpoint, adapter, CheckpointError, f"{name}'", f"{name}.weight'", "expected one of them")


TENSOR_CASES = {
    "a deep layer": ({"model.layers.7.mlp.up_proj": ((64, 4), (4, 128))}, "model.layers.7.mlp.up_proj"),
    "no such module": ({"model.layers.0.mlp.router": ((64, 4), (4, 128))}, "model.layers.0.mlp.router"),
    "the embedding": ({"model.embed_tokens": ((4096, 4), (4, 64))}, "model.embed_tokens"),
    "a tied head": ({"lm_head": ((64, 4), (4, 4096))}, "lm_head"),
    "a norm": ({"model.norm": ((64, 4), (4, 64))}, "model.norm"),
    "too wide": ({Q: ((64, 4), (4, 65))}, f"{Q}.lora_b: got the shape [4, 65], expected [4, 64]"),
    "turned": ({"model.layers.0.mlp.up_proj": ((4, 64), (128, 4))}, "got the shape [4, 64], expected [64, 4]"),
    "of an expert": ({Q: ((2, 4, 64), (2, 64, 4))}, f"{Q}.lora_a: got the shape [2, 4, 64], expected [64, 4]"),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_that_are_not_the_models_are_refused(tiny_checkpoint, tmp_path, case):
    factors, part = TENSOR_CASES[case]
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    for module, (a, b) in factors.items():
        tensors(adapter, **{f"{module}.lora_a": mx.zeros(a), f"{module}.lora_b": mx.zeros(b)})
    refused(tiny_checkpoint, adapter, LoadError, str(adapter), part, "expected")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({f"{Q}.lora_b": None}, f"{Q}.lora_b is missing, lora_a of the same module is there"),
        ({f"{Q}.m": mx.zeros((64,))}, "expected lora_a, lora_b of modules"),
        ({"weight": mx.zeros((64,))}, "got the tensor 'weight', expected lora_a, lora_b"),
        ({f"{Q}.lora_a": mx.zeros((64, 4), dtype=mx.int32)}, "got the type I32, expected one of F32, F16, BF16"),
        ({f"{Q}.lora_a": mx.zeros((0, 4))}, "expected those of [0, 4]"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(tiny_checkpoint, tmp_path, changes, part):
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    tensors(adapter, **changes)
    refused(tiny_checkpoint, adapter, CheckpointError, "adapters.safetensors", part)


def test_a_full_fine_tune_of_another_model_is_refused(tiny_checkpoint, tmp_path):
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2), fine_tune_type="full")
    refused(tiny_checkpoint, adapter, CheckpointError, "lora_a", "expected one that the model has")
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {f"{Q}.weight": mx.zeros((64, 65))})
    refused(tiny_checkpoint, adapter, CheckpointError, f"{Q}.weight: got the shape [64, 65], expected [64, 64]")


def test_what_is_missing_or_torn_is_named(tiny_checkpoint, tmp_path):
    def fresh(name):
        return save_mlx_lm(tmp_path / name, modules_of(2))

    refused(tiny_checkpoint, tmp_path / "nowhere", CheckpointError, "nowhere: got nothing there, expected an adapter's")
    file = fresh("file") / "adapters.safetensors"
    refused(tiny_checkpoint, file, CheckpointError, "got a file, expected an adapter's directory")
    (bare := tmp_path / "bare").mkdir()
    refused(tiny_checkpoint, bare, CheckpointError, "adapter_config.json is missing")
    refused(tiny_checkpoint, tiny_checkpoint, CheckpointError, "adapter_config.json is missing")
    (fresh("no tensors") / "adapters.safetensors").unlink()
    refused(tiny_checkpoint, tmp_path / "no tensors", CheckpointError, "adapters.safetensors is missing")
    torn = fresh("torn") / "adapters.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    refused(tiny_checkpoint, torn.parent, CheckpointError, "adapters.safetensors: torn: got")
    short = fresh("short") / "adapters.safetensors"
    short.write_bytes(short.read_bytes()[:100])
    refused(tiny_checkpoint, short.parent, CheckpointError, "adapters.safetensors: truncated: got 100 bytes")
    (fresh("no json") / "adapter_config.json").write_text('{"fine_tune_type": ')
    refused(tiny_checkpoint, tmp_path / "no json", CheckpointError, "adapter_config.json: cannot be read")
    (fresh("other json") / "adapter_config.json").write_text("{}")
    refused(tiny_checkpoint, tmp_path / "other json", CheckpointError, "got neither peft_type nor fine_tune_type")
    mx.save_safetensors(str(fresh("empty") / "adapters.safetensors"), {})
    refused(tiny_checkpoint, tmp_path / "empty", CheckpointError, "got no tensor, expected an adapter's")
    pickled = save_peft(tmp_path / "pickled", modules_of(2))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused(
        tiny_checkpoint, pickled, UnsupportedModelError, "got adapter_model.bin, expected adapter_model.safetensors"
    )


def test_adapters_that_were_changed_at_random_load_or_end_in_our_errors(tiny_checkpoint, tmp_path):
    """Case: a traceback from a hostile download. The seed is fixed, so no run is unlucky."""
    generator, ended, lines = np.random.default_rng(3), {"loaded": 0, "refused": 0}, []
    for number in range(60):
        save = (save_mlx_lm, save_peft)[number % 2]
        adapter = save(tmp_path / "adapter", modules_of(1), kind=("lora", "dora")[number // 2 % 2])
        file = next(adapter.glob("*.safetensors"))
        if number % 3:
            value = with_evil_values(json.loads((adapter / "adapter_config.json").read_text()), generator)
            (adapter / "adapter_config.json").write_text(json.dumps(value))
        else:
            data = bytearray(file.read_bytes())
            for place in generator.integers(0, len(data) if number % 2 else 1500, 8):
                data[place] = generator.integers(256)
            file.write_bytes(data[: generator.integers(len(data))] if number % 4 == 0 else data)
        try:
            load(tiny_checkpoint, adapter)
            ended["loaded"] += 1
        except (LoadError, MemoryLimitError) as error:
            ended["refused"] += 1
            lines.append(str(error))
        shutil.rmtree(adapter)
    assert ended["loaded"] > 5, ended
    assert ended["refused"] > 20, ended
    assert not any("\n" in line for line in lines)


def test_files_without_modules_take_no_adapter(tmp_path):
    file = save_tinygpt(tmp_path / "model.tinygpt")
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(1))
    with pytest.raises(UnsupportedModelError, match=r"got the adapter .* for a \.tinygpt file, expected none"):
        load(file, adapter)


# where an adapter is named


def test_the_python_api_takes_both_adapters(tiny_checkpoint, tiny_draft_checkpoint, tmp_path):
    lora, draft = save_mlx_lm(tmp_path / "a", modules_of(2)), save_peft(tmp_path / "b", modules_of(1))
    pair = posttrainllm.load(
        model=tiny_checkpoint, draft_model=tiny_draft_checkpoint, adapter_path=lora, draft_adapter_path=draft
    )
    assert (pair.target.adapter, pair.draft.adapter) == (str(lora), str(draft))
    for options, part in (
        ({"adapter_path": ""}, "--adapter-path: got '', expected an adapter's directory"),
        ({"adapter_path": 3}, "--adapter-path: got 3, expected an adapter's directory"),
        ({"draft_adapter_path": draft}, "without a draft, expected one"),
        ({"kv_bits": 5}, "--kv-bits: got 5, expected one of 8, 4"),
        ({"kv_bits": True}, "--kv-bits: got True, expected one of 8, 4"),
        ({"kv_bits": 8, "kv_group_size": 7}, "--kv-group-size: got 7, expected one of 32, 64, 128"),
    ):
        with pytest.raises(UsageError) as caught:
            posttrainllm.load(model=tiny_checkpoint, **options)
        assert part in str(caught.value)


@pytest.mark.parametrize("command", ["sample", "chat", "serve", "gate", "bench"])
def test_every_command_that_takes_a_draft_takes_adapters(tiny_checkpoint, tiny_draft_checkpoint, tmp_path, command):
    text = {"sample": ["--prompt", "x"], "serve": ["--port", "0"]}.get(command, [])
    models = [tiny_checkpoint, "--draft-model", tiny_draft_checkpoint]
    for option in ("--adapter-path", "--draft-adapter-path"):
        result = invoke(command, *models, *text, option, tmp_path / "nowhere")
        assert_one_line(result, 1, "nowhere: got nothing there, expected an adapter's directory")
    assert "--kv-bits [8|4]" in invoke(command, "--help").stdout


@pytest.mark.parametrize("module", [accept_rate, specdec_numerics, step_costs])
def test_measurements_take_adapters(module, tiny_checkpoint, tiny_draft_checkpoint, tmp_path):
    from click.testing import CliRunner

    model = ["--model", str(tiny_checkpoint)] if module is accept_rate else [str(tiny_checkpoint)]
    arguments = [*model, "--draft-model", str(tiny_draft_checkpoint), "--adapter-path", str(tmp_path / "nowhere")]
    result = CliRunner().invoke(module.command, arguments)
    assert isinstance(result.exception, CheckpointError)
    assert "nowhere: got nothing there" in str(result.exception)


def test_bench_refuses_other_engines_processes_beside_an_adapter(tiny_checkpoint, tmp_path):
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    result = invoke("bench", tiny_checkpoint, "--adapter-path", adapter, "--start-up", "1")
    assert_one_line(result, 2, "--start-up: got --adapter-path beside it, expected the models as they are")


def test_sample_says_what_it_made_of_an_adapter_and_a_trace_of_it_replays(tmp_path):
    model = save_tiny_llama(tmp_path / "model", seed=1)
    lora, draft = save_mlx_lm(tmp_path / "lora", modules_of(2)), save_mlx_lm(tmp_path / "draft", modules_of(2), seed=4)
    trace, options = tmp_path / "trace.jsonl", ("--adapter-path", lora, "--draft-adapter-path", draft)
    run = ("sample", model, "--draft-model", model, "--prompt", "def f", "--max-tokens", "16", "--ignore-eos")
    result = invoke(*run, *options, "--record", trace, "--verbose")
    assert result.exit_code == 0, result.stderr
    assert f"target adapter {lora}: LoRA of rank 4 on 14 matrices, fused into the weights" in result.stderr
    assert f"draft adapter {draft}: LoRA of rank 4 on 14 matrices, fused into the weights" in result.stderr
    assert result.stdout != invoke(*run).stdout
    described = json.loads(invoke(*run, *options, "--json").stdout)
    assert described["adapters"] == {"target": str(lora), "draft": str(draft)}
    assert read_trace(trace).header.adapters == {"target": str(lora), "draft": str(draft)}
    replayed = invoke("replay", trace)
    assert (replayed.exit_code, replayed.stderr) == (0, "")
    shutil.move(lora, tmp_path / "moved")
    assert_one_line(invoke("replay", trace), 1, "expected the target's adapter; name it as --adapter-path")
    assert invoke("replay", trace, "--adapter-path", tmp_path / "moved").exit_code == 0
    assert_one_line(invoke("replay", trace, "--adapter-path", draft), 1, "target adapter: got sha256:")
    plain = tmp_path / "plain.jsonl"
    assert invoke(*run, "--record", plain).exit_code == 0
    assert_one_line(invoke("replay", plain, "--adapter-path", draft), 2, "for a trace of a run without one")


def test_a_trace_with_an_adapter_of_no_model_is_refused(tmp_path):
    trace = tmp_path / "trace.jsonl"
    assert invoke("sample", "--prompt", "x", "--max-tokens", "2", "--record", trace).exit_code == 0
    first, *others = trace.read_text().splitlines()
    for field, value, part in (
        ("adapters", {"other": "x"}, "adapters: got 'other', expected those of target and draft"),
        ("adapters", {"target": 3}, "adapters.target: got 3, expected text"),
        ("adapters", {"target": "x"}, "fingerprints.target adapter is missing"),
        ("kv", {"bits": 3, "group_size": 64}, "kv.bits: got 3, expected one of 8, 4"),
        ("kv", {"bits": 8}, "kv.group_size is missing, expected one of 32, 64, 128"),
    ):
        trace.write_text("\n".join([json.dumps(json.loads(first) | {field: value}), *others]))
        assert_one_line(invoke("replay", trace), 1, part)


@pytest.mark.slow  # starts two servers
def test_serve_answers_with_an_adapter_over_quantised_entries_and_another_fingerprint(tmp_path):
    """The embedded pair, whose heads hold a group of 64; a prompt that is kept is used again."""
    attention = dict.fromkeys(("q_proj", "v_proj"), (384, 384))
    modules = {f"model.layers.{layer}.self_attn.{name}": attention[name] for layer in range(8) for name in attention}
    changes = ("--adapter-path", save_mlx_lm(tmp_path / "lora", modules), "--kv-bits", 8)
    prompt, prints = "def add(a, b):\n    return a\n" * 20, []
    expected = json.loads(invoke("sample", "--prompt", prompt, "--max-tokens", 12, "--json", *changes).stdout)
    for options in (changes, ()):
        with ServerProcess(tmp_path, "--gate", "off", "--max-context", "256", *map(str, options)) as server:
            asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
            answers = [server.post("/v1/completions", asked).json() for _ in range(2)]
        prints.append(answers[0]["system_fingerprint"])
        texts = {answer["choices"][0]["text"] for answer in answers}
        assert (texts == {expected["text"]}) == bool(options)
        assert len(texts) == 1
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert prints[0] != prints[1]
