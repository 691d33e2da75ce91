"""What steps cost, what is made of it, and case 21: a draft that makes decoding slower is no secret."""

import json
import logging
import re
import time

import attrs
import pytest
from click.testing import CliRunner
from serving import ServerProcess
from support import save_tiny_llama, tiny_pair

from posttrainllm.adapters import costs
from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.costs import CostShape, curve_on_file, curves_for
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.facade import generate
from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.adapters.payoff import in_doubt, payoff
from posttrainllm.adapters.rows import RowStep
from posttrainllm.adapters.serve import watch as watch_module
from posttrainllm.adapters.serve.watch import Watch
from posttrainllm.kernel.errors import MemoryLimitError, UsageError

SHAPE = CostShape(rows=1, capacity=256, width=5, draft_ks=(0, 1, 2, 4))
CURVE = Curve(draft_ks=(0, 1, 2, 4), seconds=(0.010, 0.011, 0.012, 0.014), plain_seconds=0.009)
PROMPT = "def fibonacci(n):"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Costs of these tests are nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrainllm" / "costs"


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory):
    """A draft for the embedded target that knows nothing."""
    return save_tiny_llama(tmp_path_factory.mktemp("random") / "draft", seed=2, layers=1, context=1024)


def fresh_pair(draft):
    return load_pair(embedded_path("target-16m"), draft)


# --- the option


@pytest.mark.parametrize(
    ("value", "most", "auto"),
    [(4, 4, False), ("7", 7, False), ("auto", None, True), ("auto:1", 1, True), ("auto:32", 32, True)],
)
def test_the_option_is_a_number_or_auto(value, most, auto):
    assert DraftLength.parse(value) == DraftLength(most=most, auto=auto)
    assert DraftLength.parse(DraftLength.parse(value)) == DraftLength(most=most, auto=auto)


@pytest.mark.parametrize(
    "value", [0, 33, -1, "0", "33", "four", "", "auto:0", "auto:33", "auto:", "auto4", None, 2.5, True]
)
def test_anything_else_is_refused_with_got_and_expected(value):
    with pytest.raises(UsageError, match=r"^--draft-k: got .*, expected 1 to 32, auto or auto:N$"):
        DraftLength.parse(value)


def test_auto_takes_a_width_that_suits_the_device():
    assert DraftLength.parse("auto").on("cpu") == 4
    assert DraftLength.parse("auto").on("gpu") == 8
    assert DraftLength.parse("auto:6").on("gpu") == 6


# --- costs


def test_costs_are_measured_once_in_a_process_and_once_on_a_machine(random_draft, monkeypatch, cache):
    measured = []
    original = costs._measure
    monkeypatch.setattr(costs, "_measure", lambda *a: measured.append(a[2]) or original(*a))
    pair = fresh_pair(random_draft)
    first = curves_for(pair, SHAPE, ["greedy"])
    assert curves_for(pair, SHAPE, ["greedy"]) == first
    assert measured == ["greedy"]
    assert len(list(cache.glob("*.json"))) == 1
    # a new process: the numbers are those on file
    assert curves_for(fresh_pair(random_draft), SHAPE, ["greedy"]) == first
    assert measured == ["greedy"]
    curves_for(fresh_pair(random_draft), SHAPE, ["greedy"], fresh=True)
    assert measured == ["greedy", "greedy"]
    measured.pop()
    # filters cost every K the same, drawing does not
    assert set(curves_for(pair, SHAPE, ["sampled", "filtered"])) == {"sampled"}
    assert measured == ["greedy", "sampled"]
    curves_for(pair, attrs.evolve(SHAPE, capacity=512), ["greedy"])
    assert measured == ["greedy", "sampled", "greedy"]
    curve = first["greedy"]
    assert curve.draft_ks == (0, 1, 2, 4)
    assert all(seconds > 0 for seconds in (*curve.seconds, curve.plain_seconds))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1, "key": {}}', "null"])
def test_a_file_that_is_no_cost_counts_as_absent(random_draft, monkeypatch, cache, text):
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)
    curves_for(fresh_pair(random_draft), SHAPE, ["greedy"])
    (file,) = cache.glob("*.json")
    good = file.read_text()
    pair = fresh_pair(random_draft)
    assert curve_on_file(pair, SHAPE, "greedy") == CURVE
    file.write_text(text)
    assert curve_on_file(pair, SHAPE, "greedy") is None
    huge, text = "1" + "0" * 400, good.replace("[0.01, 0.011, 0.012, 0.014]", '"1234"')
    changes = (("0.01,", "0.0,"), ("0.01,", '"x",'), ("0.01, ", ""), ("0.01,", f"{huge},"))
    for broken in (text, *(good.replace(*change) for change in changes)):
        assert broken != good
        file.write_text(broken)
        assert curve_on_file(pair, SHAPE, "greedy") is None


def test_a_pair_that_no_directory_holds_is_measured_and_nothing_is_kept(monkeypatch, cache):
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)
    pair = tiny_pair()
    assert curves_for(pair, SHAPE, ["greedy"]) == {"greedy": CURVE}
    assert curve_on_file(pair, SHAPE, "greedy") == CURVE
    assert not cache.exists()


def test_costs_that_cannot_be_kept_cost_a_warning(random_draft, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert curves_for(fresh_pair(random_draft), SHAPE, ["greedy"]) == {"greedy": CURVE}
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the costs of steps are not kept, the next start measures again"
    ]


# --- what is made of them


def test_a_draft_is_in_doubt_where_less_than_half_of_a_window_is_emitted():
    assert in_doubt({4: 16}, 40)
    assert not in_doubt({4: 16}, 48)
    assert not in_doubt({4: 15}, 15)
    assert not in_doubt({}, 0)


def test_the_hint_names_the_numbers_and_the_way_out():
    found = payoff(CURVE, {4: 100}, 110, auto=False)
    assert not found.pays
    assert found.hint == (
        "the draft does not pay here: 1.10 tokens a step of 14.0 ms, where a plain step takes 9.0 ms: 0.71 times the "
        "speed of plain decoding, by costs taken with half of the context in use; --draft-k auto drafts only where it "
        "pays, --no-draft decodes plainly"
    )
    backed_off = payoff(CURVE, {0: 90, 4: 10}, 100, auto=True)
    assert "tokens a step of 10.4 ms" in backed_off.hint
    assert "--draft-k auto drew from it in 10.0% of the steps" in backed_off.hint
    assert payoff(CURVE, {4: 100}, 300, auto=False).hint is None
    assert payoff(CURVE, {4: 15}, 15, auto=False) is None


# --- sample and the Python API


def sample(*arguments):
    return CliRunner().invoke(cli, ["sample", "--prompt", PROMPT, *map(str, arguments)])


def test_a_random_draft_is_backed_off_from_with_the_references_text(random_draft, monkeypatch):
    """Case 21."""
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)
    pair = fresh_pair(random_draft)
    options = {"prompt": PROMPT, "max_tokens": 220, "ignore_eos": True}
    result = generate(pair=pair, draft_k="auto", **options)
    reference = generate(pair=pair.plain("a reference"), plain_width=5, **options)
    assert result.token_ids == reference.token_ids
    assert result.speculative["policy"] == "auto"
    steps = result.speculative["steps"]
    assert sum(steps.values()) == result.timings.steps
    assert steps["0"] / result.timings.steps > 0.8
    assert result.speculative["pays"] is False  # the wide window still costs


def test_a_hint_behind_the_statistics_says_that_a_random_draft_does_not_pay(random_draft):
    """Case 21, by the costs of this machine: a draft that is always refused pays on none."""
    fixed = sample("--draft-model", random_draft, "--max-tokens", "40", "--ignore-eos")
    assert fixed.exit_code == 0
    hints = [line for line in fixed.stderr.splitlines() if line.startswith("hint: ")]
    assert len(hints) == 1
    assert re.match(
        r"hint: the draft does not pay here: 1\.\d\d tokens a step of [\d.]+ ms, where a plain step", hints[0]
    )
    assert "--draft-k auto" in hints[0]
    assert "hint" not in sample("--draft-model", random_draft, "--max-tokens", 40, "--quiet").stderr


def test_a_good_draft_is_kept_and_gets_no_hint(monkeypatch):
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)  # of a machine whose clock nothing disturbs
    pair = load_pair(embedded_path("target-16m"), embedded_path("target-16m"))
    result = generate(pair=pair, draft_k="auto", prompt=PROMPT, max_tokens=100, ignore_eos=True)
    assert set(result.speculative["steps"]) == {"4"}
    assert result.speculative["pays"] is True
    assert result.usage.accept_rate == 1


def test_a_run_says_how_often_each_length_was_drawn_and_its_trace_replays(random_draft, tmp_path):
    file = tmp_path / "run.jsonl"
    options = (
        "--draft-model",
        random_draft,
        "--max-tokens",
        "60",
        "--ignore-eos",
        "--temperature",
        "0.9",
        "--seed",
        "5",
    )
    done = sample(*options, "--draft-k", "auto:2", "--record", file)
    assert done.exit_code == 0
    assert re.search(r"K=auto: 0 in [\d.]+%, .*of the steps", done.stderr)
    header = json.loads(file.read_text().splitlines()[0])
    assert header["K"] == 2
    assert header["auto"]["draft_ks"] == [0, 1, 2]
    for extra in ((), ("--from-step", "30"), ("--uncompiled", "--from-step", "12"), ("--show", "25")):
        replayed = CliRunner().invoke(cli, ["replay", str(file), *extra])
        assert replayed.exit_code == 0, replayed.output
        assert "K=auto up to 2" in replayed.output
    again = sample(*options, "--draft-k", "auto:2")
    assert again.stdout == done.stdout


def test_a_conversation_hears_once_that_the_draft_does_not_pay(random_draft, monkeypatch):
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)
    arguments = [
        "chat",
        "--draft-model",
        str(random_draft),
        "--max-tokens",
        "40",
        "--temperature",
        "0.8",
        "--seed",
        "1",
    ]
    talked = CliRunner().invoke(cli, arguments, input="def f(x):\ndef g(x):\ndef h(x):\n")
    assert talked.exit_code == 0
    assert talked.stderr.count("draft accepted") == 3
    assert talked.stderr.count("hint: the draft does not pay here") == 1


def test_without_a_draft_auto_is_plain():
    value = json.loads(sample("--no-draft", "--draft-k", "auto", "--max-tokens", "4", "--json").stdout)
    assert value["speculative"] == {"enabled": False, "reason": "the draft was switched off"}


# --- the server


def step_of(tokens, drawn=4):
    ids = (1,) * tokens
    return RowStep(tokens=ids, proposed=drawn, accepted=tokens - 1, finite=True, margins=(), draft_k=drawn, drawn=drawn)


def watched(engine, steps, progress=None):
    watch = Watch()
    for step in steps:
        watch.count("filtered", step)
    assert watch.due
    watch.look(engine, progress=progress)
    return watch


def test_the_watch_says_once_that_a_fixed_length_does_not_pay(monkeypatch, caplog):
    monkeypatch.setattr(costs, "_measure", lambda *a: CURVE)
    engine = Engine(tiny_pair(), capacity=256, width=5)
    watch = watched(engine, [step_of(1)] * 256)
    assert watch.pays is None  # not measured while there is work
    assert watch.due
    for _ in range(2):
        for _ in range(256):
            watch.count("filtered", step_of(1))
        watch.look(engine, progress=lambda: None)
        assert watch.pays is False
        assert not watch.due
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "--draft-k auto" in caplog.text
    assert watched(engine, [step_of(5)] * 256, progress=lambda: None).pays is None  # nothing speaks against it


def test_a_busy_server_looks_for_costs_on_file_once(monkeypatch):
    """Every look hashes a key and opens a file, and a server in doubt takes one at every step."""
    looked = []
    monkeypatch.setattr(watch_module, "curve_on_file", lambda *a: looked.append(a))
    monkeypatch.setattr(watch_module, "curves_for", lambda *a, **options: {"sampled": CURVE})
    engine = Engine(tiny_pair(), capacity=256, width=5)
    watch = watched(engine, [step_of(1)] * 256)
    for _ in range(3):
        watch.count("filtered", step_of(1))
        watch.look(engine)
    assert len(looked) == 1
    assert watch.due
    watch.look(engine, progress=lambda: None)  # measured
    for _ in range(256):
        watch.count("filtered", step_of(1))
    watch.look(engine)
    assert len(looked) == 2


def test_the_watch_knows_what_auto_costs(caplog):
    engine = Engine(tiny_pair(), capacity=256, width=5, curves={"greedy": CURVE, "sampled": CURVE})
    assert watched(engine, [step_of(5)] * 256).pays is True
    assert not caplog.records
    assert watched(engine, [step_of(1, drawn=0)] * 256).pays is False
    assert len(caplog.records) == 1


def test_a_server_with_no_room_to_measure_goes_on(monkeypatch, caplog):
    def no_room(*_):
        raise MemoryLimitError("no room")

    monkeypatch.setattr(costs, "_measure", no_room)
    watch = watched(Engine(tiny_pair(), capacity=256, width=5), [step_of(1)] * 300, progress=lambda: None)
    assert watch.pays is None
    assert not watch.due
    assert "whether the draft pays is not measured: no room" in caplog.text


BODY = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}


def test_a_server_says_that_the_draft_does_not_pay(random_draft, tmp_path):
    """Case 21: once in the log, and in /health and /v1/models."""
    options = ("--gate", "off", "--max-context", "200", "--draft-model", str(random_draft))
    with ServerProcess(tmp_path, *options) as server:
        assert server.get("/health").json()["speculative"]["pays"] is None
        for _ in range(4):
            assert server.post("/v1/completions", {**BODY, "temperature": 0}).status_code == 200
        deadline = time.monotonic() + 120  # it measures once nobody asks; other work may make that long
        while server.get("/health").json()["speculative"]["pays"] is None and time.monotonic() < deadline:
            time.sleep(0.1)
        state = server.get("/v1/models").json()["data"][0]["speculative"]
        assert (state["pays"], state["policy"], state["draft_k"]) == (False, "fixed", 4)
        assert server.log.count("the draft does not pay here: 1.") == 1


def test_a_server_under_auto_gives_a_seed_the_same_text_alone_among_others_and_after_a_restart(random_draft, tmp_path):
    options = ("--gate", "off", "--max-context", "200", "--draft-k", "auto:2", "--slots", "2")
    bodies = [{**BODY, "temperature": 0.9, "seed": seed} for seed in (1, 2)]

    def text(answer):
        return answer.json()["choices"][0]["text"]

    with ServerProcess(tmp_path, *options) as server:
        state = server.get("/health").json()["speculative"]
        assert (state["policy"], state["draft_k"]) == ("auto", 2)
        alone = [text(server.post("/v1/completions", body)) for body in bodies]
        both = server.post("/v1/completions", {**bodies[0], "n": 2}).json()  # choice 1 has seed 2
        assert [choice["text"] for choice in both["choices"]] == alone
        answer = server.post("/v1/completions", bodies[0]).json()
        assert answer["speculative"]["policy"] == "auto"
        fingerprint = answer["system_fingerprint"]
        assert server.stop() == 0
    with ServerProcess(tmp_path, *options) as server:
        assert server.post("/v1/completions", bodies[0]).json()["system_fingerprint"] == fingerprint
        assert [text(server.post("/v1/completions", body)) for body in bodies] == alone
