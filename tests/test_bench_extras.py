"""What `posttrainllm bench` measures on request: other processes, rows, T=1, starts, the ratios, a step's parts."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import tiny_pair

from posttrainllm.adapters.cli import cli
from posttrainllm.evals.bench import machine
from posttrainllm.evals.bench.batch import RULES
from posttrainllm.evals.bench.check import problems
from posttrainllm.evals.bench.child import ChildContender, running_child
from posttrainllm.evals.bench.child_mlx_lm import mapped_blas
from posttrainllm.evals.bench.contenders import MlxLm
from posttrainllm.evals.bench.costs import Costs
from posttrainllm.evals.bench.extras import extras_from
from posttrainllm.evals.bench.floors import find_ratios, format_ratios, main_k
from posttrainllm.evals.bench.measure import Round, outputs
from posttrainllm.evals.bench.simulated import Script
from posttrainllm.evals.bench.start_up import first_output
from posttrainllm.evals.bench.summary import summarize
from posttrainllm.evals.step_costs import format_costs, step_costs
from posttrainllm.kernel.errors import PosttrainllmError, UsageError

PROMPTS = [[3, 4, 5], [6, 7, 8]]


def bench(*arguments):
    return CliRunner().invoke(cli, ["bench", *arguments])


@pytest.fixture(scope="module")
def done():
    small = ("--shapes", "toy+toy", "--repeats", "2", "--draft-k", "4", "--max-tokens", "24")
    return bench(*small, "--rows", "1,2", "--sampled", "--as-installed", "float32", "--accept-rate", "0.5")


def test_one_run_measures_all_of_it(done):
    assert done.exit_code == 0, done.stderr
    *table, line = done.stdout.splitlines()
    value = json.loads(line)
    assert [row["name"] for row in value["rows"]] == [
        *("plain, width 1", "speculative, K=4", "mlx-lm plain", "mlx-lm speculative, K=4"),
        *("mlx-lm installed, float32, plain", "mlx-lm installed, float32, K=4"),
    ]
    assert not any(row["failed"] for row in value["rows"])
    rates = [row["accept_rate"] for row in value["rows"] if row["draft_k"]]
    assert rates[0] == rates[1] == rates[2] < 0.9  # the same coins, for everybody
    assert [(row["rows"], row["equal"], row["texts"]) for row in value["batch"]["rows"]] == [(1, 2, 2), (2, 4, 4)]
    assert [row["rule"] for row in value["sampled"]] == list(RULES)
    assert all(row["step_s"] > 0 for row in value["sampled"])
    assert value["simulated"]["accept_rate"] == 0.5
    (name, facts), *more = value["others"].items()
    assert (name, more) == ("mlx-lm installed, float32, plain", [])
    assert blas_of_ours(facts["libraries"]) == []
    assert value["draft_model"].endswith("draft-toy")
    for one in value["ratios"]:
        assert one["value"] > 0
        assert any(text.startswith(one["name"]) for text in table)
    assert "simulated accept rate 0.5 a position" in table[-1]
    assert problems(line, 0.0) == []


def test_shapes_leave_nothing_behind(done):
    assert not Path(json.loads(done.stdout.splitlines()[-1])["model"]).exists()


def blas_of_ours(libraries):
    """The shim; numpy brings an OpenBLAS of its own, which MLX never calls."""
    return [name for name in libraries if "cblas_shim" in name]


def test_a_mapped_blas_is_seen(runtime):
    """Of the check in the next test: this process has ours."""
    if runtime.blas is None or not runtime.blas.startswith("OpenBLAS"):
        pytest.skip("no BLAS of ours is loaded here")
    assert blas_of_ours(mapped_blas())


def test_mlx_lm_as_installed_has_none_of_our_blas_and_decodes_the_same(tiny_checkpoint, tiny_draft_checkpoint):
    from mlx_lm.utils import load_model

    target, draft = load_model(tiny_checkpoint)[0], load_model(tiny_draft_checkpoint)[0]
    script = Script(0.5, 4096)
    texts = outputs(MlxLm(target), PROMPTS, 20)
    script.learn(PROMPTS, texts)
    arguments = [str(tiny_checkpoint), "--draft-model", str(tiny_draft_checkpoint)]
    with running_child("mlx-lm as installed", "child_mlx_lm", arguments) as child:
        assert blas_of_ours(child.facts["libraries"]) == []
        for k in (0, 3):
            here = MlxLm(target, draft if k else None, draft_k=k, script=script if k else None)
            there = ChildContender(
                child, name="x", engine="mlx-lm as installed", draft_k=k, script=script if k else None
            )
            for prompt in PROMPTS:
                for one in (here, there):
                    one.begin(prompt, 20)
                assert there.ids == here.ids  # the clock starts behind the same ids
                for one in (here, there):
                    one.finish()
                assert there.ids == here.ids
                assert there.steps == here.steps


def test_the_environment_of_a_child_is_not_what_our_blas_made_of_it(monkeypatch, tiny_checkpoint):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    seen = {}
    original = subprocess.Popen

    def watching(*arguments, **options):
        seen.update(options["env"])
        return original(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", watching)
    with running_child("mlx-lm as installed", "child_mlx_lm", [str(tiny_checkpoint)]):
        pass
    assert "GOMP_SPINCOUNT" not in seen
    assert "PATH" in seen


def test_a_child_that_dies_is_one_line_with_its_last_words(tiny_checkpoint, tmp_path):
    with (
        pytest.raises(PosttrainllmError, match=r"^mlx-lm as installed ended with status 1: .*nowhere"),
        running_child("mlx-lm as installed", "child_mlx_lm", [str(tmp_path / "nowhere")]),
    ):
        pass
    with running_child("mlx-lm as installed", "child_mlx_lm", [str(tiny_checkpoint)]) as child:
        lost = ChildContender(child, name="x", engine="mlx-lm as installed", draft_k=2)
        with pytest.raises(PosttrainllmError, match="no draft was loaded"):
            lost.begin([3, 4], 8)


def test_transformers_that_cannot_take_part_is_one_line(monkeypatch, tiny_checkpoint):
    if importlib.util.find_spec("torch") is None:
        with (
            pytest.raises(PosttrainllmError, match=r"^transformers: got no torch, expected torch and transformers"),
            running_child("transformers", "child_transformers", [str(tiny_checkpoint)]),
        ):
            pass
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^--transformers: got no torch, expected it to be installed"):
        extras_from(transformers="static", repeats=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--accept-rate", "1.5"), "--accept-rate: got 1.5, expected 0 to 1"),
        (("--as-installed", "int8"), "--as-installed: got 'int8', expected some of auto, float32"),
        (("--transformers", "fast"), "--transformers: got 'fast', expected some of static, eager"),
        (("--transformers-python", "/nowhere"), "--transformers-python: got '/nowhere', expected a program"),
        (("--rows", "1,x"), "--rows: got '1,x', expected whole numbers"),
        (("--rows", "1,9"), "--rows: got 1,9, expected 1 to 8 each"),
        (("--start-up", "-1"), "--start-up: got -1, expected 0 or more"),
        (("--shapes", "mega+toy"), "--shapes: got vocabularies of 16384 and 4096"),
        (("somewhere", "--shapes", "toy+toy"), "--shapes: got it beside a model"),
        (("--shapes", "toy", "--rows", "1"), "--rows: got no draft model, expected one"),
        (("--shapes", "toy", "--accept-rate", "0.8"), "--accept-rate: got no draft model, expected one"),
    ],
)
def test_bad_options_are_one_line(arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_children_used_of_the_cpus_is_not_others(monkeypatch):
    def others(children_s):
        monkeypatch.setattr(os, "times", lambda: os.times_result((1.0, 1.0, children_s, 0.0, 0.0)))
        return machine._cpu_times()[1]

    if machine._cpu_times() is None:
        pytest.skip("nothing says what the CPUs did")
    assert others(1000.0) < others(0.0) - 900


def test_the_first_token_is_what_comes_behind_the_frame():
    """The sleep is a lower bound on the time, whatever the machine does."""
    code = "import sys, time; print('=====', flush=True); time.sleep(0.3); print('x', flush=True)"
    assert first_output([sys.executable, "-c", code], ignore=b"=\n") >= 0.3
    with pytest.raises(PosttrainllmError, match="printed no token and ended with 1: oops"):
        first_output([sys.executable, "-c", "import sys; sys.exit('oops')"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pass", "printed no token and ended with 0: nothing"),
        ("print('==')", "printed no token and ended with 0"),
        ("print('x', flush=True); raise SystemExit('oops')", "printed a token and ended with 1: oops"),
    ],
)
def test_a_process_that_prints_nothing_or_fails_is_not_clocked(code, message):
    with pytest.raises(PosttrainllmError, match=message):
        first_output([sys.executable, "-c", code], ignore=b"=\n")


def one(engine, k, speed):
    return Round(
        contender=f"{engine} {k}", engine=engine, draft_k=k, tokens_per_s=speed, steps=((k, k),), tokens=9, equal=True
    )


def test_the_ratios_are_medians_within_a_prompt_and_the_better_of_two_dtypes_counts():
    engines = [("posttrainllm", 0), ("posttrainllm", 4), ("mlx-lm", 0), ("mlx-lm", 4)]
    engines += [("mlx-lm as installed", 0), ("mlx-lm as installed", 0), ("transformers", 0)]
    speeds = [[100, 300, 150, 100, 30, 60, 200], [100, 500, 50, 100, 50, 10, 250], [100, 400, 100, 100, 40, 20, 100]]
    repeats = [[one(*engine, speed) for engine, speed in zip(engines, row, strict=True)] for row in speeds]
    result = {"device": "gpu", "draft_ks": [2, 4], "rows": [], "batch": None, "sampled": None, "start_up": None}
    found = {entry["name"]: entry for entry in find_ratios(result, repeats)}
    assert found["speculative, K=4 / faster plain"]["value"] == 4  # of 2, 5, 4
    assert found["speculative, K=4 / mlx-lm plain as installed"]["value"] == 10  # of 5, 10, 10
    assert found["speculative, K=4 / transformers plain"]["value"] == 2  # of 1.5, 2, 4
    assert found["our plain, width 1 / mlx-lm plain"]["value"] == 1
    assert (found["speculative, K=4 / faster plain"]["floor"], found["speculative, K=4 / faster plain"]["aim"]) == (
        1.4,
        2.5,
    )
    assert "speculative, K=4 / mlx-lm speculative as installed" not in found  # nobody measured it
    assert summarize(repeats, None)[1]["ratio"] == 4  # transformers, which is faster still, is no plain row of ours
    assert any(
        line.startswith("speculative, K=4 / faster plain") and "4.00x" in line
        for line in format_ratios([*found.values()])
    )
    assert main_k([1, 2]) == 2


def test_the_share_of_the_prediction_is_that_of_the_table():
    """Against our own plain decoding, which the costs are of, and not the faster of two."""
    engines = [("posttrainllm", 0), ("posttrainllm", 4), ("mlx-lm", 0)]
    repeats = [[one(*engine, speed) for engine, speed in zip(engines, (100, 300, 150), strict=True)]]
    rows = summarize(repeats, Costs(plain=1.0, verify={4: 1.0}, draft_first=0.0, draft_later=0.0))
    result = {"device": "gpu", "draft_ks": [4], "rows": rows, "batch": None, "sampled": None, "start_up": None}
    found = {entry["name"]: entry["value"] for entry in find_ratios(result, repeats)}
    assert found["share of the predicted speed-up, K=4"] == rows[1]["reached"] == pytest.approx(3 / 5)
    assert found["speculative, K=4 / faster plain"] == 2


def test_a_steps_parts_add_up_and_the_limit_is_bytes_over_bandwidth():
    pair = tiny_pair(draft="random")
    result = step_costs(pair, draft_k=2, capacities=(768,), samples=1)
    parts, limit = result["parts"], result["limit"]
    assert sum(parts[name] for name in ("draft", "verify", "choosing", "commit")) == pytest.approx(parts["step"])
    assert [row["capacity"] for row in result["by_capacity"]] == [256, 512, 768]
    assert all(value > 0 for row in result["by_capacity"] for value in row.values())
    assert limit["verify"] == pytest.approx(pair.target.weight_bytes / result["bandwidth_bytes_per_s"])
    assert limit["step"] == pytest.approx(limit["verify"] + limit["draft"])
    assert json.loads(json.dumps(result)) == result
    assert sum(line.lstrip().startswith(("256 ", "512 ", "768 ")) for line in format_costs(result)) == 3
    with pytest.raises(UsageError, match="got no draft model"):
        step_costs(pair.plain("test"), draft_k=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--capacities", "1k"), "--capacities: got '1k', expected whole numbers"),
        (("--capacities", "1024,300"), "--capacities: got 300, expected multiples of 256"),
        (("--draft-k", "0"), "draft-k: got 0, expected 1 to 32"),
        (("--shapes", "toy"), "got no draft model, expected one"),
    ],
)
def test_bad_options_of_step_costs_are_one_line(arguments, message):
    command = [sys.executable, "-m", "posttrainllm.evals.step_costs", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_the_command_is_known_before_mlx_is_imported():
    imports = "import sys, posttrainllm.evals.throughput, posttrainllm.evals.step_costs"
    code = f"{imports}\nprint('mlx.core' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "False", ran.stderr
