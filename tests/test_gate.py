"""The gate's parts: prompts, verdicts, the law's statistic, the cache, the command, and what `sample` makes of it."""

import inspect
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from posttrainllm.adapters import compiled as compiled_module
from posttrainllm.adapters import engine as engine_module
from posttrainllm.adapters import loading as loading_module
from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.gate import cache, kl
from posttrainllm.adapters.gate import command as command_module
from posttrainllm.adapters.gate import key as key_module
from posttrainllm.adapters.gate import plan as plan_module
from posttrainllm.adapters.gate.findings import Divergence, Findings, GateResult, Law, PathResult, Probe
from posttrainllm.adapters.gate.key import gate_key
from posttrainllm.adapters.gate.paths import PATHS
from posttrainllm.adapters.gate.plan import plan
from posttrainllm.adapters.gate.prompts import Prompt, prompts_hash, read_prompts
from posttrainllm.adapters.gate.report import bug_report, summary, table_row
from posttrainllm.adapters.gate.verdict import first_difference, judge, worst
from posttrainllm.evals import specdec_numerics
from posttrainllm.kernel import accept, pure_step
from posttrainllm.kernel.errors import CapacityError, UsageError

FEW = ("--prompts", "4", "--max-tokens", "8", "--draft-k", "2")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrainllm" / "gate"


@pytest.fixture
def pair_options(tiny_checkpoint, tiny_draft_checkpoint, monkeypatch):
    """A tiny pair on disk, and few draws: these tests are about the command."""
    monkeypatch.setattr(plan_module, "_DRAWN", dict.fromkeys(("cpu", "gpu"), 2))
    return (str(tiny_checkpoint), "--draft-model", str(tiny_draft_checkpoint))


def invoke(*arguments: str):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def gate(*arguments: str):
    return invoke("gate", *arguments)


# the prompts


def test_the_packages_prompts_are_100_distinct_ones_of_many_kinds_and_scripts(embedded_pair):
    prompts = read_prompts(None, None)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 100
    assert {"code", "prose", "chat", "list", "numbers", "script", "token", "long"} == {p.kind for p in prompts}
    names = {unicodedata.name(letter, "NONE").split()[0] for prompt in prompts for letter in prompt.text}
    assert {"GREEK", "CYRILLIC", "ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA", "KATAKANA", "HANGUL"} <= names
    assert any(letter in "éèüß" for prompt in prompts for letter in prompt.text)
    assert any(ord(letter) > 0x1F000 for prompt in prompts for letter in prompt.text)
    lengths = [len(embedded_pair.tokenizer.encode(prompt.text)) for prompt in prompts]
    assert min(lengths) == 1
    assert sum(length > 64 for length in lengths) >= 5  # more than one chunk of the prefill
    planned = plan(embedded_pair, prompts, draft_k=4, max_tokens=128, cut=True)
    assert planned.shape.capacity == 256
    assert len({request.prompt for request in planned.requests}) == 100


def test_the_first_prompts_are_of_several_kinds():
    assert len({prompt.kind for prompt in read_prompts(None, 10)}) >= 6


def test_a_prompt_is_in_no_held_out_set():
    from posttrainllm.evals.accept_rate import HELD_OUT
    from posttrainllm.evals.accept_rate import read_prompts as read_held_out

    held_out = " ".join(text + rest for text, rest in read_held_out(HELD_OUT))
    assert not any(prompt.text in held_out for prompt in read_prompts(None, None) if len(prompt.text) > 12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "got no prompt"),
        ("\n\n", "got no prompt"),
        ("{", "line 1: got no JSON"),
        ('{"text": "a"}\nnot json', "line 2: got no JSON"),
        ("[1]", "line 1: expected an object with a `text`"),
        ('{"text": ""}', "line 1: expected an object with a `text`"),
        ('{"text": 5}', "line 1: expected an object with a `text`"),
        ('{"text": "\\ud800"}', "line 1: expected an object with a `text`"),
        ('{"text": "a", "id": 7}', "`id`: got 7, expected printable text"),
        ('{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}', "got the id 'x' twice"),
        ("[" * 100_000, "line 1: got no JSON"),
        (b"\xff\xfe", "byte 0 is no UTF-8"),
    ],
)
def test_a_bad_prompts_file_is_one_line(tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = gate("--prompts-file", file)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ["--prompts", "0"], "--prompts: got 0, expected 1 to 100"),
        (2, ["--prompts", "-3"], "--prompts: got -3"),
        (2, ["--prompts", "101"], "--prompts: got 101, expected 1 to 100"),
        (2, ["--prompts", "many"], "'many' is not a valid integer"),
        (2, ["--prompts-file", "/no/such/file"], "/no/such/file: No such file"),
        (2, ["--prompts-file", "/tmp"], "Is a directory"),
        (2, ["--max-tokens", "0"], "--max-tokens: got 0, expected 1 or more"),
        (1, ["--max-tokens", "1024"], "--max-tokens: got 1024, expected fewer than the context of 1024"),
        (2, ["--draft-k", "0"], "--draft-k: got 0, expected 1 to 32"),
        (2, ["--report", "--json"], "got both --report and --json"),
        (2, ["--dtype", "int3"], "int3"),
        (1, ["/no/such/model", "--draft-model", "x"], "expected a model directory"),
    ],
)
def test_bad_input_is_one_line(code, arguments, message):
    result = gate(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")


def test_a_model_without_a_draft_cannot_be_gated(tiny_checkpoint):
    result = gate(tiny_checkpoint)
    assert result.exit_code == 2
    assert "got MODEL without --draft-model, expected both" in result.stderr


def test_a_prompt_of_a_file_that_is_too_long_is_refused_and_one_of_the_package_is_cut(tmp_path, embedded_pair):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"id": "endless", "text": "word " * 2000}) + "\n")
    result = gate("--prompts-file", file)
    assert result.exit_code == 1
    assert "prompt endless: got " in result.stderr
    assert "expected at most 896: 128 more are to fit the context of 1024" in result.stderr
    planned = plan(embedded_pair, read_prompts(None, 9), draft_k=4, max_tokens=1000, cut=True)
    assert max(len(request.prompt) for request in planned.requests) == 24
    assert all(request.limit <= 1024 for request in (*planned.requests, *planned.coupled, *planned.drawn))
    with pytest.raises(CapacityError, match="expected at most 24"):
        plan(embedded_pair, read_prompts(None, 9), draft_k=4, max_tokens=1000, cut=False)
    with pytest.raises(UsageError, match="expected --draft-model"):
        plan(embedded_pair.plain("test"), read_prompts(None, 9), draft_k=4, max_tokens=8, cut=True)


# verdicts


def difference(margin: float | None = 0.01, prompt: str = "p") -> Divergence:
    return Divergence(
        prompt=prompt,
        position=12,
        index=3,
        expected=5,
        got=6,
        expected_text="a",
        got_text="b",
        margin=margin,
    )


def findings(*, gap: float = 0.01, **changes) -> Findings:
    probe = Probe(name="width", change="the width", difference=gap, must_be_zero=False)
    right = Findings(
        prompts=10,
        reference_differences=(),
        usual_differences=(),
        coupled_prompts=5,
        coupled_differences=(),
        laws=(Law(order="q", place=None, draws=100, kl=0.1, epsilon=0.2),),
        drawn=16,
        drawn_short=0,
        probes=(probe,),
        accepted=3,
        proposed=4,
    )
    return attrs.evolve(right, **changes)


def test_equal_everywhere_is_identical():
    assert judge("a path", findings())[0] == "identical"
    assert judge("a path", findings(gap=0.0))[0] == "identical"


def test_a_near_tie_has_a_margin_of_at_most_four_times_the_widths_difference():
    at_the_limit, beyond = difference(margin=0.04), difference(margin=0.0401)
    assert judge("a path", findings(usual_differences=(at_the_limit,)))[0] == "width-identical"
    verdict, reason = judge("a path", findings(usual_differences=(at_the_limit, beyond)))
    assert verdict == "broken"
    for words in ("a path", "prompt p", "position 12", "got 6 'b'", "expected 5 'a'", "margin 0.0401", "at most 0.04"):
        assert words in reason


@pytest.mark.parametrize("margin", [None, float("nan"), 1e-9])
def test_without_a_margin_or_a_difference_between_widths_nothing_is_a_near_tie(margin):
    gap = 0.0 if margin == 1e-9 else 1.0
    assert judge("a path", findings(gap=gap, usual_differences=(difference(margin=margin),)))[0] == "broken"


def test_what_differs_from_the_reference_is_broken_however_near_the_tie():
    for name, words in (("reference_differences", "T=0"), ("coupled_differences", "coupled")):
        verdict, reason = judge("a path", findings(**{name: (difference(margin=0.0),)}))
        assert verdict == "broken"
        assert words in reason
        assert "position 12" in reason


def test_a_refuted_law_is_broken_and_its_place_is_named():
    good = Law(order="q", place=None, draws=900, kl=0.01, epsilon=0.02)
    bad = Law(order="p / q", place=3, draws=500, kl=0.5, epsilon=0.1)
    verdict, reason = judge("a path", findings(laws=(good, bad)))
    assert verdict == "broken"
    for words in ("leviathan", "id 3 of a step", "0.5000", "500 draws", "0.1000"):
        assert words in reason


def test_draws_that_end_early_are_broken():
    verdict, reason = judge("a path", findings(drawn_short=2))
    assert verdict == "broken"
    assert "2 of 16 requests ended before their limit" in reason


def test_the_worst_verdict_is_the_runs():
    assert worst(["identical", "broken", "width-identical"]) == "broken"
    assert worst(["identical", "width-identical"]) == "width-identical"


def test_the_first_difference_counts_missing_ids():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == first_difference([1, 2], [1, 2, 3]) == 2


def test_gated_paths_have_names_of_their_own():
    assert len({path.name for path in PATHS}) == len(PATHS) >= 1


# the law's statistic


def test_the_quantile_is_that_of_chi_square_with_8_degrees_of_freedom():
    """Values of a printed table."""
    for level, value in ((0.5, 7.344), (0.05, 15.507), (0.01, 20.090), (0.001, 26.124)):
        assert kl.chi_square_quantile(level) == pytest.approx(value, abs=1e-3)
    assert kl.chi_square_quantile(1e-9) > kl.chi_square_quantile(1e-6) > 40


def laws_of(positions, places=None):
    places = np.ones(len(positions), dtype=np.int32) if places is None else places
    return kl.compare(places, {"q": positions}, 5)


def test_right_draws_exceed_epsilon_as_rarely_as_is_said(monkeypatch):
    """At a level of 0.06 in all, 0.01 a test: of 4000 runs 40 are expected; 12 to 78 fails with probability 2e-6."""
    monkeypatch.setattr(kl, "FALSE_ALARM", 0.06)
    generator = np.random.default_rng(3)
    refuted = sum(not laws_of(generator.random(300))[0].holds for _ in range(4000))
    assert 12 <= refuted <= 78


def test_a_tilted_law_exceeds_epsilon_and_a_place_that_is_rare_is_left_out():
    generator = np.random.default_rng(4)
    right = generator.random(2000)
    tilted = right**1.3
    assert laws_of(right)[0].holds
    assert not laws_of(tilted)[0].holds
    places = np.where(np.arange(2000) % 100 == 0, 2, 1)
    laws = laws_of(np.where(places == 2, 0.99, right), places)
    assert [law.place for law in laws] == [None, 1]  # 20 draws at place 2 are too few to judge
    places = np.where(np.arange(2000) % 4 == 0, 4, 1)
    wrong_at_4 = {law.place: law.holds for law in laws_of(np.where(places == 4, tilted**2, right), places)}
    assert wrong_at_4[1]
    assert not wrong_at_4[4]


def test_cells_share_the_ends():
    assert laws_of(np.array([0.0, 1.0, 0.999999999] * 50))[0].kl == pytest.approx(
        np.log(9) + (1 / 3) * np.log(1 / 3) + (2 / 3) * np.log(2 / 3)
    )


# the command, on a tiny pair


def test_the_command_prints_counts_laws_probes_and_the_verdict_last(pair_options, runtime):
    result = gate(*pair_options, *FEW)
    assert result.exit_code == 0, result.output
    for words in (
        "vanilla speculative decoding, K=2, 4 prompts x 8 tokens, B=4, C=256",
        "equal to plain at width 3: 4 of 4 prompts",
        "with the same seeds: 4 of 4",
        "false alarm 1e-06",
        "the prefill chunk",
    ):
        assert words in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith(("identical: ", "width-identical: "))
    assert "of 4 prompts equal to width 1" in last
    assert result.stderr == ""


def test_a_second_run_reads_the_verdict_and_fresh_runs_again(pair_options, own_cache, monkeypatch):
    first = json.loads(gate(*pair_options, *FEW, "--json").stdout)
    assert first["cached"] is False
    assert first["verdict"] == first["paths"][0]["verdict"]
    assert first["paths"][0]["findings"]["prompts"] == 4
    (file,) = own_cache.glob("*.json")
    again = json.loads(gate(*pair_options, *FEW, "--json").stdout)
    assert again == {**first, "cached": True}
    assert "from the cache" in gate(*pair_options, *FEW).stdout
    fresh = json.loads(gate(*pair_options, *FEW, "--json", "--fresh").stdout)
    assert fresh["cached"] is False
    assert [path.name for path in own_cache.iterdir()] == [file.name]  # nothing half-written stays behind


@pytest.mark.parametrize(
    "damage", ["", "{", "null", "[]", '{"format": 1}', '{"format": 1, "key": {}, "result": {}}', "[" * 9999]
)
def test_a_corrupt_verdict_counts_as_absent_and_is_rewritten(own_cache, damage):
    assert cache.write_result(KEY, result_of("broken")) is None
    (file,) = own_cache.glob("*.json")
    whole = file.read_text()
    file.write_text(damage or whole[: len(whole) // 2])
    assert cache.read_result(KEY) is None
    assert cache.write_result(KEY, result_of("identical")) is None
    assert cache.read_result(KEY) == result_of("identical")


def test_a_verdict_of_another_key_under_the_same_name_is_not_used(own_cache):
    cache.write_result(KEY, result_of("identical"))
    (file,) = own_cache.glob("*.json")
    file.write_text(file.read_text().replace('"rows": 16', '"rows": 17'))
    assert cache.read_result(KEY) is None


def test_the_command_runs_again_over_a_torn_verdict(pair_options, own_cache):
    gate(*pair_options, *FEW)
    (file,) = own_cache.glob("*.json")
    file.write_text(file.read_text()[:100])
    assert json.loads(gate(*pair_options, *FEW, "--json").stdout)["cached"] is False
    assert json.loads(gate(*pair_options, *FEW, "--json").stdout)["cached"] is True


def test_a_cache_that_cannot_be_written_costs_a_warning(pair_options, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    result = gate(*pair_options, *FEW)
    assert result.exit_code == 0
    assert "warning: the verdict is not kept" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_everything_that_bits_depend_on_is_in_the_key(embedded_pair, monkeypatch):
    def key(pair=embedded_pair, prompts=5, draft_k=4, max_tokens=8):
        return gate_key(pair, plan(pair, read_prompts(None, prompts), draft_k=draft_k, max_tokens=max_tokens, cut=True))

    def target(**changes):
        return attrs.evolve(embedded_pair, target=attrs.evolve(embedded_pair.target, **changes))

    def running(**changes):
        return attrs.evolve(embedded_pair, runtime=attrs.evolve(embedded_pair.runtime, **changes))

    others = [
        key(prompts=6),
        key(draft_k=3),
        key(max_tokens=9),
        key(max_tokens=300),
        key(target(name=embedded_pair.draft.name)),
        key(attrs.evolve(embedded_pair, draft=attrs.evolve(embedded_pair.draft, name=embedded_pair.target.name))),
        key(target(dtype="bfloat16")),
        key(target(variant="another")),
        key(running(blas="OpenBLAS 9 (1 thread)")),
        key(running(device_name="another")),
        key(running(compiled=not embedded_pair.runtime.compiled)),
        key(running(versions={**embedded_pair.runtime.versions, "mlx": "0.0"})),
        key(running(versions={**embedded_pair.runtime.versions, "posttrainllm": "0.0"})),
    ]
    assert key() == key()
    names = {cache.file_name(other) for other in (key(), *others)}
    assert len(names) == 1 + len(others)
    assert json.loads(json.dumps(key())) == key()
    assert {"target", "draft", "adapter", "tokenizer", "kv_dtype", "rows", "capacity", "prompts"} <= key().keys()


def test_a_change_to_any_source_that_the_engine_steps_with_changes_the_key(monkeypatch):
    read = []
    monkeypatch.setattr(key_module.Path, "read_bytes", lambda path: read.append(path) or b"")
    key_module._source_hash.__wrapped__()
    hashed = {".".join((path.parent.name, path.stem)) for path in read}
    text = inspect.getsource(engine_module) + inspect.getsource(compiled_module)
    names = re.findall(r"^from posttrainllm\.([\w.]+) import", text, flags=re.MULTILINE)
    needed = {".".join(name.split(".")[-2:]) for name in names} | {"adapters.engine"}
    assert {"adapters.compiled", "adapters.shapes", "kernel.compiled", "loading.pair"} <= needed
    assert needed <= hashed


def test_a_change_to_any_file_that_loads_a_model_changes_the_key(monkeypatch):
    read = []
    monkeypatch.setattr(key_module.Path, "read_bytes", lambda path: read.append(path) or b"")
    key_module._source_hash.__wrapped__()
    folder = Path(inspect.getfile(loading_module)).parent
    sources = set(folder.rglob("*.py"))
    assert folder / "families" / "llama4.py" in sources
    assert sources <= set(read)


def test_the_hash_of_the_prompts_is_of_their_texts_in_order():
    one, two = (Prompt(id=text, kind="", text=text) for text in ("a", "b"))
    assert prompts_hash([one, two]) != prompts_hash([two, one])
    assert prompts_hash([one]) != prompts_hash([Prompt(id="a", kind="", text="ab")])
    assert prompts_hash([one]) == prompts_hash([attrs.evolve(one, id="z")])


def test_a_result_survives_json():
    path = PathResult(
        path="speculative",
        title="t",
        verdict="broken",
        reason="r",
        trace="f",
        findings=findings(usual_differences=(difference(),)),
    )
    result = GateResult(verdict="broken", model="a", draft_model="b", seconds=1.5, paths=(path,))
    assert GateResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    with pytest.raises(ValueError, match="not in tuple"):
        GateResult.from_dict({**result.to_dict(), "verdict": "fine"})


def result_of(verdict: str, **changes) -> GateResult:
    path = PathResult(
        path="speculative", title="a path", verdict=verdict, reason="why", trace=None, findings=findings(**changes)
    )
    return GateResult(verdict=verdict, model="a target", draft_model="a draft", seconds=2.0, paths=(path,))


KEY = {
    "draft_k": 4,
    "max_tokens": 128,
    "rows": 16,
    "capacity": 256,
    "dtype": {"target": "float32", "draft": "float32"},
    "variant": {"target": "module", "draft": "module"},
    "device": ["cpu", "a processor"],
    "versions": {"posttrainllm": "0", "mlx": "1", "mlx-lm": "2"},
    "blas": "a BLAS",
}


@pytest.mark.parametrize(
    ("verdict", "strict", "status"),
    [
        ("identical", (), 0),
        ("width-identical", (), 0),
        ("broken", (), 3),
        ("identical", ("--strict",), 0),
        ("width-identical", ("--strict",), 3),
        ("broken", ("--strict",), 3),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",), ("--report",)])
def test_the_exit_status_is_the_verdict(monkeypatch, verdict, strict, status, form):
    monkeypatch.setattr(command_module, "checked", lambda **_: (result_of(verdict), KEY, False))
    assert gate(*strict, *form).exit_code == status


def test_each_difference_from_width_1_is_listed_with_prompt_position_tokens_and_margin():
    many = tuple(difference(margin=0.001 * n, prompt=f"p-{n}") for n in range(12))
    result = result_of("width-identical", usual_differences=many, prompts=12)
    lines = summary(result, KEY, cached=False)
    assert "    p-3, position 12: 6 'b', at width 1 5 'a', margin 0.003" in lines
    assert any("and 2 more" in line for line in lines)
    assert lines[-1] == "width-identical: 0 of 12 prompts equal to width 1; why"
    block = bug_report(result, KEY)
    assert block[0] == block[-1] == "```"
    assert sum("at width 1" in line and line.startswith("    p-") for line in block) == 12
    assert "blas: a BLAS" in block
    row = table_row(result.paths[0], KEY, "a command")
    assert row.count("|") == 11
    for words in ("**width-identical**", "12 of 12", "0 of 12", "float32", "`a command`"):
        assert words in row


def test_progress_is_for_terminals_alone(pair_options):
    result = gate(*pair_options, *FEW, "--json", "--fresh")
    assert result.stderr == ""
    json.loads(result.stdout)


# a broken verdict: the trace, and what `sample` makes of it


@pytest.fixture
def accepts_everything(monkeypatch):
    monkeypatch.setattr(accept, "coupled_accepts", lambda proposals, choice: proposals >= 0)


def test_a_broken_verdict_exits_with_3_and_leaves_a_trace_that_replays(pair_options, accepts_everything):
    result = gate(*pair_options, *FEW)
    assert result.exit_code == 3
    last = result.stdout.splitlines()[-1]
    assert last.startswith("broken: ")
    for words in ("T=0", "prompt ", "position ", "got ", "expected ", "posttrainllm replay "):
        assert words in last
    trace = last.rpartition("posttrainllm replay ")[2].rstrip(")")
    replayed = invoke("replay", trace)
    assert replayed.exit_code == 0, replayed.output  # the fault is still in the kernel: its bits repeat


def test_a_step_that_stops_emitting_is_broken_and_its_trace_ends(pair_options, monkeypatch):
    commit = pure_step.commit

    def stops(config, state, *values):
        return commit(config, attrs.evolve(state, limit=mx.where(state.length > 12, 0, state.limit)), *values)

    monkeypatch.setattr(pure_step, "commit", stops)
    result = gate(*pair_options, *FEW)
    assert result.exit_code == 3
    assert "posttrainllm replay " in result.stdout


@pytest.mark.parametrize(
    "module", ["adapters.gate.command", "adapters.gate.report", "adapters.gate.verdict", "evals.specdec_numerics"]
)
def test_importing_the_command_and_the_script_leaves_mlx_for_the_blas_to_come_first(module):
    code = f"import sys, posttrainllm.{module}\nassert not {{'mlx', 'mlx.core', 'mlx_lm', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_imports_no_mlx():
    code = (
        "import sys\nfrom posttrainllm.adapters.cli import cli\n"
        "try:\n    cli.main(['gate', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'numpy'} & {name.split('.')[0] for name in sys.modules}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--strict" in done.stdout


def test_the_script_prints_the_gates_summary_a_row_a_path_and_json(pair_options):
    options = [str(option) for option in (*pair_options, *FEW)]
    result = CliRunner().invoke(specdec_numerics.command, [*options, "--dtype", "float32", "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2
    for dtype, row in zip(("float32", "bfloat16"), rows, strict=True):
        assert f"--draft-k 2 --prompts 4 --max-tokens 8 --dtype {dtype}`" in row
        assert f"{dtype} | **" in row
    assert [value["key"]["dtype"]["target"] for value in json.loads(lines[-1])] == ["float32", "bfloat16"]


def test_the_script_exits_with_3_on_a_broken_verdict(monkeypatch):
    monkeypatch.setattr(specdec_numerics, "checked", lambda **_: (result_of("broken"), KEY, False))
    assert CliRunner().invoke(specdec_numerics.command, []).exit_code == 3


def sample_json(pair_options, *arguments):
    result = invoke("sample", *pair_options, "--prompt", "def", "--max-tokens", "6", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def test_sample_decodes_plainly_on_a_broken_verdict_for_the_same_k(pair_options, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(accept, "coupled_accepts", lambda proposals, choice: proposals >= 0)
        assert gate(*pair_options, *FEW).exit_code == 3
    value, warnings = sample_json(pair_options, "--draft-k", "2")
    assert value["speculative"]["enabled"] is False
    assert value["speculative"]["reason"].startswith("broken, says the gate: vanilla speculative decoding, T=0")
    assert value["draft_model"] is None
    assert len(warnings.splitlines()) == 1
    assert warnings.startswith("warning: the gate calls this pair broken here")
    for other in (("--draft-k", "3"), ("--draft-k", "2", "--dtype", "bfloat16")):
        value, warnings = sample_json(pair_options, *other)
        assert value["speculative"] == {"enabled": True, "reason": None}
        assert warnings == ""
    assert gate(*pair_options, *FEW, "--fresh").exit_code == 0
    assert sample_json(pair_options, "--draft-k", "2")[0]["speculative"]["enabled"] is True


def test_chat_heeds_a_broken_verdict_too(pair_options, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(accept, "coupled_accepts", lambda proposals, choice: proposals >= 0)
        assert gate(*pair_options, *FEW).exit_code == 3
    arguments = [str(option) for option in (*pair_options, "--draft-k", "2", "--max-tokens", "4")]
    result = CliRunner().invoke(cli, ["chat", *arguments], input="hello\n")
    assert result.exit_code == 0
    assert result.stderr.count("warning: the gate calls this pair broken here") == 1


def test_sample_heeds_a_broken_verdict_of_any_shape_and_prompts_for_the_same_models_alone(embedded_pair, own_cache):
    key = gate_key(embedded_pair, plan(embedded_pair, read_prompts(None, 2), draft_k=4, max_tokens=400, cut=True))
    assert cache.known_broken(embedded_pair, 4) is None
    assert cache.write_result(key, result_of("broken")) is None
    assert cache.known_broken(embedded_pair, 4) == "why"
    assert cache.known_broken(embedded_pair, 5) is None
    swapped = attrs.evolve(embedded_pair, draft=attrs.evolve(embedded_pair.draft, name=embedded_pair.target.name))
    assert cache.known_broken(swapped, 4) is None
    assert cache.known_broken(embedded_pair.plain("none"), 4) is None
    nowhere = attrs.evolve(embedded_pair, draft=attrs.evolve(embedded_pair.draft, name="/no/such/model"))
    assert cache.known_broken(nowhere, 4) is None
    assert cache.write_result(key, result_of("identical")) is None
    assert cache.known_broken(embedded_pair, 4) is None


def test_a_later_good_verdict_lifts_a_broken_one_where_it_covers_as_much(embedded_pair, own_cache):
    key = gate_key(embedded_pair, plan(embedded_pair, read_prompts(None, 2), draft_k=4, max_tokens=32, cut=True))
    cache.write_result(key, result_of("broken", prompts=4))
    cache.write_result({**key, "rows": 101, "max_tokens": 16}, result_of("identical", prompts=4))
    cache.write_result({**key, "rows": 102}, result_of("identical", prompts=3))
    assert cache.known_broken(embedded_pair, 4) == "why"
    cache.write_result({**key, "rows": 103}, result_of("identical", prompts=5))
    assert cache.known_broken(embedded_pair, 4) is None
    cache.write_result({**key, "rows": 104}, result_of("broken", prompts=1))
    assert cache.known_broken(embedded_pair, 4) == "why"


def test_sample_hashes_no_model_unless_a_broken_verdict_is_on_file(embedded_pair, monkeypatch):
    key = gate_key(embedded_pair, plan(embedded_pair, read_prompts(None, 2), draft_k=4, max_tokens=8, cut=True))

    def hashed(pair):
        raise AssertionError(f"{pair} was hashed")

    monkeypatch.setattr(cache, "models_of", hashed)
    assert cache.known_broken(embedded_pair, 4) is None
    cache.write_result(key, result_of("identical"))
    cache.write_result({**key, "draft_k": 9}, result_of("broken"))
    assert cache.known_broken(embedded_pair, 4) is None


def test_without_a_home_nothing_is_kept_and_nothing_fails(embedded_pair, monkeypatch):
    monkeypatch.setattr(cache, "cache_folder", lambda: None)
    assert cache.known_broken(embedded_pair, 4) is None
    assert cache.read_result({"a": 1}) is None
    assert cache.write_result({"a": 1}, result_of("identical")) == "there is no home directory"
    assert cache.trace_file({"a": 1}) is None


# the embedded pair


def test_the_embedded_pair_passes_on_a_few_prompts(embedded_pair):
    from posttrainllm.adapters.gate.run import run_gate

    told = []
    planned = plan(embedded_pair, read_prompts(None, 6), draft_k=4, max_tokens=24, cut=True, drawn=6)
    result = run_gate(embedded_pair, planned, progress=lambda *values: told.append(values))
    (path,) = result.paths
    assert result.verdict in ("identical", "width-identical"), path.reason
    assert path.findings.prompts - len(path.findings.reference_differences) == 6
    assert path.findings.laws[0].draws == 6 * 128
    ends = {what: (done, total) for what, done, total in told}
    assert len(ends) == 7
    assert all(done == total for done, total in ends.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_pair_passes_on_all_prompts(dtype):
    result = gate("--dtype", dtype, "--json", "--fresh")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    print(json.dumps(value["paths"]), file=sys.stderr)
    assert value["verdict"] in ("identical", "width-identical")
    assert value["paths"][0]["findings"]["prompts"] == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda result: result.update(seconds=10**400),
        lambda result: result.update(paths=[]),
        lambda result: result["paths"][0].update(verdict="identical"),
        lambda result: result["paths"][0].update(reason=5),
        lambda result: result["paths"][0].update(trace=7),
        lambda result: result["paths"][0]["findings"].update(probes=[]),
        lambda result: result["paths"][0]["findings"].update(accepted="x"),
    ],
)
def test_a_verdict_that_was_tampered_with_counts_as_absent(embedded_pair, own_cache, damage):
    key = gate_key(embedded_pair, plan(embedded_pair, read_prompts(None, 2), draft_k=4, max_tokens=8, cut=True))
    cache.write_result(key, result_of("broken"))
    (file,) = own_cache.glob("*.json")
    value = json.loads(file.read_text())
    damage(value["result"])
    file.write_text(json.dumps(value))
    assert cache.read_result(key) is None
    assert cache.known_broken(embedded_pair, 4) is None


@pytest.mark.parametrize("identity", ["\ud800", "a\nb", "\x1b[31m", 5])
def test_an_id_that_cannot_stand_in_a_line_is_refused(tmp_path, identity):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": identity, "text": "x"}) + "\n")
    result = gate("--prompts-file", file)
    assert result.exit_code == 2
    assert "expected printable text" in result.stderr
