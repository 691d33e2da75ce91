"""`posttrainllm match` and `--draft-model auto`: which draft is taken, why, and that it is found out once.

Acceptance is real here but where a test plants it. Costs are planted but where a test says so, since no test may
depend on a clock.
"""

import io
import json
import shlex
import shutil
import sys

import attrs
import mlx.core as mx
import pytest
from adapter_files import modules_of, save_mlx_lm
from click.testing import CliRunner
from mlx.utils import tree_flatten
from serving import ServerProcess
from support import plant, save_tiny_llama, tiny_config, tiny_module
from tinygpt_files import save_tinygpt

import posttrainllm
from posttrainllm.adapters import pair_options
from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.gate import heed
from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_checkpoint
from posttrainllm.adapters.loading.found import FoundModel, hub_models, models_in, parameter_count
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.match import command as match_command
from posttrainllm.adapters.match import decide as decide_module
from posttrainllm.adapters.match import measure as measure_module
from posttrainllm.adapters.match.decide import Search
from posttrainllm.adapters.match.findings import Measured, StepTime
from posttrainllm.adapters.match.kept import keep, measured_from, read
from posttrainllm.adapters.match.measure import Setting
from posttrainllm.adapters.status_line import status_line, writer
from posttrainllm.kernel.errors import MemoryLimitError, NonFiniteError

MEASURING = "measuring {} for a draft, once on this machine"
PLAIN = 0.010


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, hub_cache):
    """What is kept, and the hub's cache, are of these tests alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrainllm" / "match"


@pytest.fixture
def costs(monkeypatch):
    """A step costs a tenth of a plain one more for each K; what was asked for."""
    asked = []

    def planted(pair, shape, modes, *, fresh=False):
        asked.append(shape)
        seconds = tuple(PLAIN * (1 + 0.1 * draft_k) for draft_k in shape.draft_ks)
        return {mode: Curve(draft_ks=shape.draft_ks, seconds=seconds, plain_seconds=PLAIN) for mode in modes}

    monkeypatch.setattr(measure_module, "curves_for", planted)
    return asked


@pytest.fixture
def measured(monkeypatch):
    """Names of the candidates that are decoded with."""
    names = []

    def counted(pair, setting, **options):
        names.append(pair.draft.name)
        return measure_module.measure(pair, setting, **options)

    monkeypatch.setattr(decide_module, "measure", counted)
    return names


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target whose second layer adds nothing, its first layer alone, and a draft that knows nothing."""
    folder = tmp_path_factory.mktemp("models")
    target = save_tiny_llama(folder / "target", seed=1)
    module = tiny_module(tiny_config(), seed=1)
    weights = dict(tree_flatten(module.parameters()))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"] *= 0
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    first = save_tiny_llama(folder / "first", seed=1, layers=1)
    kept = {name: array for name, array in weights.items() if not name.startswith("model.layers.1.")}
    mx.save_safetensors(str(first / "model.safetensors"), kept)
    save_tiny_llama(folder / "random", seed=9, layers=1)
    return folder


@pytest.fixture
def folder(tmp_path, models):
    """Candidates of every kind, beside what is none."""
    folder = tmp_path / "candidates"
    for name in ("first", "random"):
        shutil.copytree(models / name, folder / name)
    other = shutil.copytree(models / "first", folder / "other")
    swap_two_ids(other)
    torn = shutil.copytree(models / "first", folder / "torn") / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    change_config(shutil.copytree(models / "first", folder / "unknown"), model_type="nonsense")
    shutil.copytree(models / "target", folder / "copy of the target")
    save_tinygpt(folder / "bytes.tinygpt")
    (folder / "none.gguf").write_bytes(b"GGUF")
    (folder / "notes").mkdir()
    (folder / "notes" / "README.md").write_text("no model")
    return folder


def swap_two_ids(model):
    file = model / "tokenizer.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = value["model"]["vocab"]
    one, two = (next(piece for piece, index in vocabulary.items() if index == wanted) for wanted in (300, 301))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(value), encoding="utf-8")


def change_config(model, **changes):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def run(*arguments, code=0):
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.stdout + done.stderr
    return done


def match(*arguments):
    """The object that --json prints, and its candidates by name."""
    value = json.loads(run("match", *arguments, "--json").stdout)
    return value, {candidate["name"]: candidate for candidate in value["candidates"]}


def sample(*arguments):
    options = ("--prompt", "def add(a, b):", "--max-tokens", "12", "--ignore-eos", "--json")
    done = run("sample", *arguments, *options)
    return json.loads(done.stdout), done.stderr


# --- the command


def test_the_draft_wins_whose_tokenizer_is_equal_and_which_pays(models, folder, costs):
    value, found = match(models / "target", "--candidates", folder)
    assert value["winner"] == "first"
    assert value["reason"] is None
    assert found["first"]["tokenizer"] == "equal"
    assert found["first"]["accept_rate"] == 1.0  # the layer that it lacks adds nothing
    assert found["first"]["best_k"] == 8
    assert found["first"]["speed_up"] == pytest.approx(9 / 1.8, abs=1e-3)
    assert [step["draft_k"] for step in found["first"]["steps"]] == [1, 2, 4, 8]
    assert found["random"]["accept_rate"] < 0.1
    assert found["random"]["speed_up"] < 1
    assert set(found) == {
        "first",
        "random",
        "other",
        "torn",
        "unknown",
        "copy of the target",
        "bytes.tinygpt",
        "none.gguf",
    }
    words = shlex.split(value["command"])
    path = str(folder / "first")
    assert words == ["posttrainllm", "sample", str(models / "target"), "--draft-model", path, "--draft-k", "8"]
    result, _ = sample(*words[2:])
    assert result["usage"]["accept_rate"] == 1.0


def test_a_candidate_that_cannot_be_used_is_a_row_with_the_reason(models, folder, costs, measured):
    _, found = match(models / "target", "--candidates", folder)
    assert found["other"]["tokenizer"].startswith("its tokenizer differs from the target's: id 300 is ")
    assert found["bytes.tinygpt"]["tokenizer"].startswith("its tokenizer differs from the target's: id ")
    for name, reason in (
        ("torn", "torn: got"),
        ("unknown", "model_type 'nonsense' is not one that mlx-lm knows"),
        ("copy of the target", "not smaller than the target: "),
    ):
        assert reason in found[name]["problem"], name
        assert "\n" not in found[name]["problem"]
    assert found["none.gguf"]["problem"]
    assert all(found[name]["accept_rate"] is None for name in found if name not in ("first", "random"))
    assert sorted(measured) == [str(folder / "first"), str(folder / "random")]


def test_behind_a_refused_proposal_nothing_counts_as_judged(models, costs):
    _, found = match(models / "target", "--candidates", models / "random")
    accepted, proposed, judged = found["random"]["accepted_proposed_judged"]
    steps = 8 * 48 - accepted  # each emits what stood and one id more, and the last ones no more than is left
    assert steps - 8 <= judged - accepted <= steps
    assert proposed > 3 * judged
    assert found["random"]["proposal_stands"] == pytest.approx(accepted / judged, abs=1e-3)


def test_the_table_says_what_was_decided_from(models, folder, costs):
    done = run("match", models / "target", "--candidates", folder)
    lines = done.stdout.splitlines()
    head = "candidate parameters tokenizer accept rate stands K step cost predicted"
    assert " ".join(lines[0].split()) == head
    assert lines[1].split()[0] == "first"  # the best is the first one
    assert lines[1].split()[2:] == ["equal", "1.000", "1.000", "8", "1.80", "5.00x"]
    assert lines[2].split()[0] == "random"
    for name in ("other", "torn", "unknown", "bytes.tinygpt"):
        assert sum(line.startswith(name) for line in lines) == 1, name
    assert lines[-2] == "first: predicted 5.00 times the speed of plain decoding"
    assert lines[-1].startswith("  posttrainllm sample ")
    assert done.stderr.splitlines() == [MEASURING.format("3 candidates")]  # one of them is of an unknown architecture


def test_what_was_found_is_kept_and_fresh_measures_anew(models, folder, costs, measured):
    first, _ = match(models / "target", "--candidates", folder)
    again = run("match", models / "target", "--candidates", folder, "--json")
    assert again.stderr == ""
    assert first["measured"] == 3
    assert json.loads(again.stdout) == first | {"measured": 0}
    assert len(measured) == 2
    match(models / "target", "--candidates", folder, "--fresh")
    assert len(measured) == 4


def test_other_weights_or_another_tokenizer_are_measured_anew(models, folder, costs, measured):
    match(models / "target", "--candidates", folder / "first", "--candidates", folder / "random")
    shutil.rmtree(folder / "first")
    save_tiny_llama(folder / "first", seed=12, layers=1)
    value, found = match(models / "target", "--candidates", folder / "first", "--candidates", folder / "random")
    assert value["measured"] == 1
    assert found["first"]["accept_rate"] < 0.1
    swap_two_ids(folder / "first")
    _, found = match(models / "target", "--candidates", folder / "first")
    assert found["first"]["tokenizer"].startswith("its tokenizer differs")


KEY, FOUND = {"draft": "sha256:0"}, {"accepted": 1, "proposed": 4, "judged": 2}
STEP = {"draft_k": 4, "seconds": 0.02, "plain_seconds": 0.01}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', "null", "9" * 5000, None])
def test_a_kept_file_that_is_broken_or_of_another_key_counts_as_absent(cache, content):
    keep(KEY, FOUND | {"steps": [STEP]})
    assert measured_from(read(KEY)) == Measured(**FOUND, steps=(StepTime(**STEP),))
    (file,) = cache.glob("*.json")
    if content is None:
        content = file.read_text().replace("sha256:0", "sha256:1")
    file.write_text(content)
    assert read(KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        {"judged": 0.5},
        {"steps": []},
        {"accepted": 10**9},
        {"steps": [{"draft_k": 4}]},
        {"steps": [STEP | {"seconds": 0.0}]},
        {"steps": [STEP | {"draft_k": 0}]},
        {"proposed": None},
    ],
)
def test_kept_values_that_cannot_be_count_as_absent(change):
    assert measured_from(FOUND | {"steps": [STEP]} | change) is None


def test_a_kept_measurement_that_cannot_be_is_made_again(models, costs, measured, cache):
    options = (models / "target", "--candidates", models / "first")
    first, _ = match(*options)
    for file in cache.glob("*.json"):
        value = json.loads(file.read_text())
        value["found"] |= {"accepted": 10**9, "tokenizer": 0}
        file.write_text(json.dumps(value))
    assert match(*options)[0] == first
    assert len(measured) == 2


def test_where_no_draft_pays_plain_decoding_is_said_to_be_best(models, costs):
    done = run("match", models / "target", "--candidates", models / "random")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("no draft pays here: the best, random, is predicted at 0.")
    assert last.endswith(" times plain decoding: plain decoding is best")
    value, _ = match(models / "target", "--candidates", models / "random")
    assert (value["winner"], value["command"]) == (None, None)


def test_without_a_candidate_plain_decoding_is_said_to_be_best(models, tmp_path, costs):
    (tmp_path / "empty").mkdir()
    done = run("match", models / "target", "--candidates", tmp_path / "empty")
    assert done.stdout.splitlines()[-1] == "there is no candidate: plain decoding is best"
    assert done.stderr == ""


def test_the_target_itself_is_no_candidate_and_none_stands_there_twice(models, costs):
    options = ("--candidates", models, "--candidates", models / "first", "--candidates", models / "target")
    _, found = match(models / "target", *options)
    assert list(found) == ["first", "random"]
    value = json.loads(run("match", models / "target", "--candidates", models / "target", "--json").stdout)
    assert value["candidates"] == []


@pytest.mark.parametrize("name", ["nowhere", "", "file"])
def test_a_place_without_candidates_is_a_bad_option(tmp_path, name):
    (tmp_path / "file").write_text("no model")
    done = run("match", "--candidates", name and tmp_path / name, code=2)
    assert done.stderr.startswith("error: --candidates: ")
    assert len(done.stderr.splitlines()) == 1


def test_too_little_memory_is_a_row_that_is_tried_again(models, costs, monkeypatch):
    def full(*_, **__):
        raise MemoryLimitError("not enough memory for the weights: got 0.00 GB free, expected 1.00 GB")

    options = (models / "target", "--candidates", models / "first")
    with monkeypatch.context() as patch:
        patch.setattr(decide_module, "with_draft", full)
        value, found = match(*options)
    assert found["first"]["problem"].startswith("not enough memory")
    assert value["reason"].startswith("no candidate with an equal tokenizer can be used: first: not enough memory")
    assert match(*options)[0]["winner"] == "first"


@pytest.mark.parametrize("place", ["with_draft", "measure"])
def test_whatever_a_candidate_raises_is_its_row_and_tried_again(models, costs, monkeypatch, place):
    def fails(*_, **__):
        raise RuntimeError("[matmul] something that\nnobody expected")

    options = (models / "target", "--candidates", models / "first", "--candidates", models / "random")
    with monkeypatch.context() as patch:
        patch.setattr(decide_module, place, fails)
        value, found = match(*options)
    assert "RuntimeError: [matmul] something that nobody expected" in found["first"]["problem"]
    assert found["random"]["problem"] is not None
    assert value["winner"] is None
    assert match(*options)[0]["winner"] == "first"


def test_a_target_whose_logits_are_not_finite_is_one_line(models, tmp_path, costs):
    target = shutil.copytree(models / "target", tmp_path / "broken")
    weights = mx.load(str(target / "model.safetensors"))
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    done = run("match", target, "--candidates", models / "first", code=1)
    assert "the target's logits are not finite" in done.stderr.splitlines()[-1]
    assert issubclass(NonFiniteError, posttrainllm.PosttrainllmError)


def test_only_the_smallest_are_measured_where_their_number_is_bounded(models, costs, measured):
    pair = posttrainllm.load(model=models / "target", speculate=False)
    found = [FoundModel(name=name, path=models / name) for name in ("random", "first")]
    decision = Search(pair=pair, setting=Setting(), most=1).decide(found)
    assert len(measured) == 1
    assert [candidate.problem for candidate in decision.candidates] == [
        None,
        "not measured: only the 1 smallest are",
    ]


@pytest.fixture
def shown(monkeypatch):
    """Lines that a terminal would have shown while it waited."""
    lines = []
    for module in (match_command, pair_options):
        monkeypatch.setattr(module, "writer", lambda _: lines.append)
    return lines


def test_a_long_run_says_which_candidate_of_how_many_it_is_at_and_how_far(models, folder, costs, shown):
    run("match", models / "target", "--candidates", folder)
    assert "comparing the tokenizer of other" in shown
    for number, name in enumerate(("first", "random", "unknown"), 1):
        line = f"measuring {name}, {number} of 3"
        told = [other for other in shown if other.startswith(line)]
        assert told[0] == line
        if name != "unknown":  # which cannot be loaded
            assert f"{line}: 384 of 384 tokens" in told
            assert told[-4:] == [f"{line}: clocking steps of width {width}" for width in (2, 3, 5, 9)]
    shown.clear()
    run("match", models / "target", "--candidates", folder)  # all of it is on file
    assert not [line for line in shown if line.startswith("measuring")]


def test_a_candidate_is_shown_by_its_name_whatever_is_in_it(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with status_line() as status:
        writer(status)("measuring model[red], 1 of 2")
    assert "measuring model[red], 1 of 2" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with status_line() as status:
        writer(status)("measuring model[red], 1 of 2")
    assert sys.stderr.getvalue() == ""


def test_match_holds_candidates_against_the_target_with_its_adapter(models, tmp_path, costs, measured):
    options = (models / "target", "--candidates", models / "first")
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    plain, found = match(*options)
    assert found["first"]["accept_rate"] == 1.0
    adapted, found = match(*options, "--adapter-path", adapter)
    assert found["first"]["accept_rate"] < 0.5  # it was taught what this draft does not know
    assert adapted["adapters"] == {"target": str(adapter)}
    assert not {"adapters", "kv_bits"} & plain.keys()
    assert len(measured) == 2
    lines = run("match", *options, "--adapter-path", adapter).stdout.splitlines()
    assert lines[2].startswith(f"target --adapter-path {adapter}, ")


def test_match_keeps_keys_and_values_as_it_is_told_and_says_so_in_its_command(costs):
    packing = ["--kv-bits", "8", "--kv-group-size", "32"]
    value, _ = match("--candidates", embedded_path("draft-3m"), *packing)
    assert (value["kv_bits"], value["winner"]) == (8, "draft-3m")
    words = shlex.split(value["command"])
    assert words[-4:] == packing
    result, _ = sample(*words[2:])
    assert (result["kv_bits"], result["draft_k"]) == (8, value["candidates"][0]["best_k"])


def test_match_takes_no_adapter_of_a_draft():
    done = run("match", "--draft-adapter-path", "adapter", code=2)
    assert done.stderr.startswith("error: No such option")


# --- the formula


def test_the_best_k_is_the_one_that_leviathans_formula_says():
    steps = tuple(
        StepTime(draft_k=draft_k, seconds=seconds, plain_seconds=1.0)
        for draft_k, seconds in ((1, 1.2), (2, 1.4), (4, 1.8), (8, 2.9))
    )
    half = Measured(accepted=50, proposed=400, judged=100, steps=steps)
    assert half.speed_up(steps[1]) == pytest.approx((1 + 0.5 + 0.25) / 1.4)
    assert half.best.draft_k == 1  # 1.25 against 1.25, 1.08, 0.69: a smaller one where they are equal
    certain = Measured(accepted=100, proposed=100, judged=100, steps=steps)
    assert certain.best.draft_k == 8
    assert certain.speed_up(steps[3]) == pytest.approx(9 / 2.9)
    near = Measured(accepted=7, proposed=10, judged=10, steps=(attrs.evolve(steps[0], seconds=1.3), *steps[1:]))
    assert [round(near.speed_up(step), 2) for step in steps[1:3]] == [1.56, 1.54]
    assert near.best.draft_k == 2
    barely = tuple(attrs.evolve(step, seconds=seconds) for step, seconds in zip(steps[:2], (1.72, 2.15), strict=True))
    both = Measured(accepted=7, proposed=10, judged=10, steps=barely)
    assert [round(both.speed_up(step), 2) for step in barely] == [0.99, 1.02]
    assert both.best.draft_k == 2  # the smaller one is as near, and does not pay
    nothing = Measured(accepted=0, proposed=0, judged=0, steps=steps)
    assert nothing.speed_up(nothing.best) == 0


# --- --draft-model auto


def test_auto_takes_the_best_of_the_hubs_cache_and_measures_it_once(models, hub_cache, costs, measured):
    best = plant(hub_cache, "someone/first", models / "first")
    plant(hub_cache, "someone/random", models / "random")
    swap_two_ids(plant(hub_cache, "someone/other", models / "first"))
    options = (models / "target", "--draft-model", "auto")
    result, said = sample(*options)
    assert result["draft_model"] == str(best)
    assert result["draft_k"] == 8  # nobody asked for another
    assert result["usage"]["accept_rate"] == 1.0
    taken = "draft: someone/first, K=8, predicted 5.00 times the speed of plain decoding"
    assert said.splitlines() == [MEASURING.format("2 candidates"), taken]
    again, said = sample(*options)
    assert said.splitlines() == [taken]
    assert again["token_ids"] == result["token_ids"]
    assert len(measured) == 2
    plain, _ = sample(models / "target", "--plain-width", "9")
    assert plain["token_ids"] == result["token_ids"]


def test_auto_looks_for_the_k_that_is_asked_for(models, hub_cache, costs):
    plant(hub_cache, "someone/first", models / "first")
    result, _ = sample(models / "target", "--draft-model", "auto", "--draft-k", "3")
    assert result["draft_k"] == 3
    assert [(shape.width, shape.draft_ks) for shape in costs] == [(4, (3,))]
    costs.clear()
    posttrainllm.load(model=models / "target", draft_model="auto", draft_k="auto:2")
    assert [(shape.width, shape.draft_ks) for shape in costs] == [(3, (0, 1, 2))]


def test_auto_decodes_plainly_and_says_why_in_one_line(models, hub_cache, costs):
    def said_of(target, reason):
        result, said = sample(target, "--draft-model", "auto")
        assert said.splitlines()[-1].startswith(f"decoding without a draft: {reason}")
        assert len([line for line in said.splitlines() if "measuring" not in line]) == 1
        assert result["draft_model"] is None
        assert result["speculative"]["enabled"] is False
        assert result["speculative"]["reason"].startswith(reason)
        return result

    plain, _ = sample(models / "target")
    assert said_of(models / "target", "no model here is smaller than the target")["token_ids"] == plain["token_ids"]
    swap_two_ids(plant(hub_cache, "someone/other", models / "first"))
    said_of(models / "target", "no candidate has an equal tokenizer (1 looked at)")
    plant(hub_cache, "someone/random", models / "random")
    said_of(models / "target", "no draft pays here: the best, someone/random, is predicted at 0.")


def test_auto_without_a_model_finds_the_embedded_draft(costs):
    pair = posttrainllm.load(draft_model="auto")
    assert pair.target.name == str(embedded_path("target-16m"))
    assert pair.draft.name == str(embedded_path("draft-3m"))


def test_the_python_api_decodes_the_same_ids_with_auto(models, hub_cache, costs):
    plant(hub_cache, "someone/first", models / "first")
    pair = posttrainllm.load(model=models / "target", draft_model="auto")
    assert pair.draft is not None
    prompt = "for name in names:"
    result = posttrainllm.generate(pair=pair, prompt=prompt, max_tokens=24, ignore_eos=True)
    plain = posttrainllm.load(model=models / "target")
    reference = posttrainllm.generate(pair=plain, prompt=prompt, max_tokens=24, ignore_eos=True, plain_width=5)
    assert result.token_ids == reference.token_ids


def test_a_chosen_draft_keeps_its_keys_and_values_as_the_target_does(costs, measured, monkeypatch):
    pairs = []  # how often it is right is not asked here
    monkeypatch.setattr(measure_module, "_count", lambda pair, _: pairs.append(pair) or (70, 100, 90))
    changes = {"kv_bits": 8, "kv_group_size": 32}
    pair = posttrainllm.load(draft_model="auto", **changes)
    assert pair.draft.packing == pair.target.packing
    assert pair.target.packing is not None
    plain = posttrainllm.load(model=embedded_path("target-16m"), **changes)
    options = {"prompt": "for name in names:", "max_tokens": 16, "ignore_eos": True}
    reference = posttrainllm.generate(pair=plain, plain_width=5, **options)
    assert posttrainllm.generate(pair=pair, **options).token_ids == reference.token_ids
    assert len(measured) == 1
    assert pairs[0].draft.packing == pairs[0].target.packing == pair.target.packing
    posttrainllm.load(draft_model="auto")  # what was found with them is not of the pair without them
    assert len(measured) == 2


def test_candidates_are_held_against_the_target_with_its_adapter(models, tmp_path, hub_cache, costs, measured):
    plant(hub_cache, "someone/first", models / "first")
    plain, _ = sample(models / "target", "--draft-model", "auto", "--draft-k", "4")
    adapter = save_mlx_lm(tmp_path / "adapter", modules_of(2))
    adapted, said = sample(models / "target", "--draft-model", "auto", "--draft-k", "4", "--adapter-path", adapter)
    assert plain["usage"]["accept_rate"] == 1.0
    assert adapted["draft_model"] is None  # it has learned something that this draft does not know
    assert "no draft pays here: the best, someone/first" in said
    assert len(measured) == 2


def test_auto_takes_no_adapter_of_a_draft(models):
    options = ("--draft-model", "auto", "--draft-adapter-path", "adapter", "--prompt", "a")
    done = run("sample", models / "target", *options, code=2)
    expected = "error: --draft-model auto: got it with --draft-adapter-path, expected the path of a draft\n"
    assert done.stderr == expected


def test_a_draft_that_was_chosen_is_gated_like_any_other(models, hub_cache, costs, monkeypatch):
    plant(hub_cache, "someone/first", models / "first")
    asked = []
    monkeypatch.setattr(heed, "known_broken", lambda pair, k: asked.append((pair.draft.name, k)) or "planted")
    result, said = sample(models / "target", "--draft-model", "auto")
    assert [k for _, k in asked] == [8]
    assert result["draft_model"] is None
    assert "the gate calls this pair broken here" in said


def test_a_conversation_takes_auto_too(models, hub_cache, costs):
    plant(hub_cache, "someone/first", models / "first")
    options = ["chat", str(models / "target"), "--draft-model", "auto", "--max-tokens", "8"]
    done = CliRunner().invoke(cli, options, input="a\n")
    assert done.exit_code == 0, done.stderr
    assert "draft: someone/first, K=8" in done.stderr
    assert "draft accepted" in done.stderr


@pytest.mark.parametrize("command", ["sample", "chat"])
def test_who_waits_for_auto_is_shown_what_for(models, hub_cache, costs, shown, command):
    plant(hub_cache, "someone/first", models / "first")
    options = [command, str(models / "target"), "--draft-model", "auto", "--max-tokens", "4"]
    done = CliRunner().invoke(cli, options, input="a\n")
    assert done.exit_code == 0, done.stderr
    assert "measuring someone/first, 1 of 1: 384 of 384 tokens" in shown


def test_a_cache_of_the_hub_that_cannot_be_read_is_left_out(models, hub_cache, costs):
    hub_cache.write_text("no directory")
    result, said = sample(models / "target", "--draft-model", "auto")
    assert said.splitlines()[0].startswith("the hub's cache is left out: ")
    assert result["draft_model"] is None


@pytest.mark.parametrize("command", ["gate", "bench"])
def test_where_a_pair_is_looked_at_auto_is_refused(models, command):
    done = run(command, models / "target", "--draft-model", "auto", code=2)
    assert (
        done.stderr == "error: --draft-model: got 'auto', expected a model: `posttrainllm match` says which one pays\n"
    )


def test_auto_and_no_draft_contradict_each_other(models):
    done = run("sample", models / "target", "--draft-model", "auto", "--no-draft", "--prompt", "a", code=2)
    assert len(done.stderr.splitlines()) == 1


# --- what is here


def test_the_hubs_main_revision_is_taken_or_the_newest(models, hub_cache):
    snapshot = plant(hub_cache, "someone/first", models / "first")
    newer = shutil.copytree(models / "random", snapshot.parent / ("f" * 40))
    assert [(model.name, model.path.name) for model in hub_models()] == [("someone/first", snapshot.name)]
    (snapshot.parents[1] / "refs" / "main").write_text(newer.name)
    assert [model.path.name for model in hub_models()] == [newer.name]
    assert [model.name for model in models_in(hub_cache)] == ["someone/first"]


def test_parameters_are_counted_from_the_tensors():
    assert parameter_count(read_checkpoint(embedded_path("draft-3m"))) == 2753792  # of its model card
    packed = Checkpoint(
        path=embedded_path("draft-3m"),
        config={"quantization": {"bits": 4, "group_size": 64}},
        weight_bytes=1024 * 64 // 2 + 2 * 1024 * 2 + 64 * 2,
        dtype="float16",
        context=64,
        quantized=True,
        float_bytes={"float16": 2 * 1024 * 2 + 64 * 2},  # scales, biases, and a norm
    )
    assert parameter_count(packed) == 1024 * 64 + 64


# --- with the clock


@pytest.mark.slow
def test_the_embedded_pair_is_measured_by_the_clock_once(measured):
    first, found = match()
    candidate = found["draft-3m"]
    assert candidate["tokenizer"] == "equal"
    assert 0.5 < candidate["accept_rate"] < 0.9
    assert all(step["seconds"] > 0 and step["plain_seconds"] > 0 for step in candidate["steps"])
    assert candidate["speed_up"] >= 0.949 * max(step["speed_up"] for step in candidate["steps"])
    assert (first["winner"] == "draft-3m") == (candidate["speed_up"] > 1)
    assert match()[0] == first | {"measured": 0}
    assert len(measured) == 1
    match("--fresh")
    assert len(measured) == 2


@pytest.mark.slow
def test_a_server_takes_auto_and_measures_in_its_own_shapes_once(models, tmp_path):
    hub = tmp_path / "home" / "hub"
    plant(hub, "someone/first", models / "first")
    options = (str(models / "target"), "--draft-model", "auto", "--slots", "2", "--max-context", "200", "--gate", "off")
    for start in range(2):
        with ServerProcess(tmp_path, *options, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1") as server:
            answer = server.post(
                "/v1/completions", {"model": "target", "prompt": "a", "max_tokens": 8, "temperature": 0}
            )
            assert answer.status_code == 200, answer.text
            assert (MEASURING.format("1 candidate") in server.log) == (start == 0)
            drafted = "draft: someone/first, K=" in server.log
            refused = "decoding without a draft: no draft pays here: the best, someone/first" in server.log
            assert drafted != refused  # the clock says which
            assert (answer.json()["usage"]["draft_proposed"] > 0) == drafted
