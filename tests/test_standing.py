"""The gate as a server uses it: what is run before the first request, what it says, and that it may be interrupted."""

import json
import subprocess
import sys

import attrs
import pytest

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate import cache, heed, run, scoring, standing
from posttrainllm.adapters.gate.key import gate_key
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.plan import plan
from posttrainllm.adapters.gate.prompts import read_prompts
from posttrainllm.adapters.gate.run import run_gate
from posttrainllm.adapters.gate.standing import Extent, Standing, boot_standing, full_standing
from posttrainllm.adapters.loading import memory
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel import accept
from posttrainllm.kernel.errors import CapacityError, LoadError, MemoryLimitError, UsageError

SHAPE = Shape(rows=2, capacity=256, draft_k=2)
FIRST = Extent(prompts=2, max_tokens=6, drawn=1)
FULL = Extent(prompts=4, max_tokens=8, drawn=1)
SMALL = {"first": FIRST, "full": FULL}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "posttrainllm" / "gate"


@pytest.fixture(scope="module")
def pair(tiny_checkpoint, tiny_draft_checkpoint):
    return load_pair(tiny_checkpoint, tiny_draft_checkpoint)


@pytest.fixture
def accepts_everything(pair, monkeypatch):
    """A pair whose steps are compiled anew, from a kernel that accepts every proposal."""
    monkeypatch.setattr(accept, "coupled_accepts", lambda proposals, choice: proposals >= 0)
    return attrs.evolve(pair)


@pytest.fixture
def runs_nothing(monkeypatch):
    def ran(*_, **__):
        raise AssertionError("a gate was run")

    monkeypatch.setattr(run, "run_gate", ran)


def boot(pair, mode="auto", shape=SHAPE, **options):
    return boot_standing(pair, shape, mode, **SMALL, **options)


def planned(pair, extent, shape=SHAPE, **changes):
    texts = read_prompts(None, extent.prompts)
    options = {"max_tokens": extent.max_tokens, "drawn": extent.drawn, "rows": shape.rows, "capacity": shape.capacity}
    return plan(pair, texts, draft_k=shape.draft_k, cut=True, **{**options, **changes})


def keep(pair, result, extent=FULL, verdict="identical", shape=SHAPE, **changes):
    """Put a verdict on file, for a run that differs in some ways."""
    paths = tuple(attrs.evolve(path, verdict=verdict, reason="at a place") for path in result.paths)
    key = gate_key(pair, planned(pair, extent, shape, **changes))
    assert cache.write_result(key, attrs.evolve(result, verdict=verdict, paths=paths)) is None


@pytest.fixture(scope="module")
def passed(pair):
    """The result of a whole run in the shapes of a server."""
    result = run_gate(pair, planned(pair, FULL))
    assert result.verdict != "broken", result.paths[0].reason
    return result


# what is run, and what is said


def test_without_a_draft_it_says_why_and_runs_nothing(pair, runs_nothing):
    for mode in ("auto", "full", "strict", "off"):
        found = boot(pair.plain("no draft model was given"), mode)
        assert found == (Standing(enabled=False, verdict=None, reason="no draft model was given"), False)


def test_off_runs_nothing_and_heeds_a_broken_verdict(pair, passed, runs_nothing):
    found, later = boot(pair, "off")
    assert (found.enabled, found.verdict, later) == (True, "not gated", False)
    keep(pair, passed, verdict="broken", shape=Shape(rows=5, capacity=512, draft_k=2))
    found, later = boot(pair, "off")
    assert (found.enabled, found.verdict, found.reason, later) == (
        *(False, "broken", "broken, says the gate: at a place"),
        False,
    )


def test_auto_compares_the_first_prompts_in_the_servers_shapes_and_leaves_the_rest_for_later(
    pair, own_cache, capfd, monkeypatch
):
    found, later = boot(pair)
    assert (found.enabled, found.verdict) == (True, "provisional")
    assert found.reason == "2 of 4 prompts were compared, the full gate is still to come"
    assert later
    (file,) = own_cache.glob("*.json")
    key = json.loads(file.read_text())["key"]
    assert (key["rows"], key["capacity"], key["draft_k"], key["max_tokens"], key["drawn"]) == (2, 256, 2, 6, 1)
    monkeypatch.setattr(run, "run_gate", None)  # a second start runs nothing, and says the same
    assert boot(pair) == (found, later)
    assert capfd.readouterr() == ("", "")


def test_auto_takes_the_verdict_of_the_same_shapes_and_all_prompts(pair, passed, runs_nothing):
    for verdict in ("identical", "width-identical"):
        keep(pair, passed, verdict=verdict)
        assert boot(pair) == (Standing(enabled=True, verdict=verdict, reason=None), False)


def test_what_runs_in_idle_time_is_what_the_next_start_finds(pair, monkeypatch):
    found = full_standing(pair, SHAPE, full=FULL)
    assert found.enabled
    assert found.verdict in ("identical", "width-identical")
    monkeypatch.setattr(run, "run_gate", None)
    for mode in ("auto", "full", "strict"):
        assert boot(pair, mode) == (found, False)


@pytest.mark.parametrize("shape", [Shape(rows=1, capacity=256, draft_k=2), Shape(rows=2, capacity=512, draft_k=2)])
def test_auto_trusts_a_full_verdict_of_other_shapes_for_a_while_and_runs_nothing(pair, passed, runs_nothing, shape):
    keep(pair, passed, shape=shape)
    found, later = boot(pair)
    assert (found.enabled, found.verdict, later) == (True, "provisional", True)
    assert "in other shapes" in found.reason
    assert "still to come" in found.reason


@pytest.mark.parametrize(
    "less",
    [
        {"extent": attrs.evolve(FULL, prompts=3)},
        {"extent": attrs.evolve(FULL, max_tokens=7)},
        {"shape": Shape(rows=1, capacity=512, draft_k=3)},
    ],
    ids=["fewer prompts", "fewer tokens", "another K"],
)
def test_auto_runs_where_the_verdict_on_file_is_about_less_or_about_something_else(pair, passed, less):
    keep(pair, passed, **{"shape": Shape(rows=1, capacity=512, draft_k=2), **less})
    assert boot(pair)[0].reason.startswith("2 of 4 prompts")


def test_a_broken_verdict_of_other_shapes_is_no_good_one(pair, passed):
    """Lifted by a good one over other prompts, it would else be taken for one over these."""
    keep(pair, passed, verdict="broken", shape=Shape(rows=1, capacity=256, draft_k=2))
    assert not cache.good_in_other_shapes(gate_key(pair, planned(pair, FULL)))


def test_full_and_strict_run_everything_now_unless_it_is_on_file(pair, own_cache, monkeypatch):
    found, later = boot(pair, "full")
    assert (found.enabled, found.reason, later) == (True, None, False)
    assert found.verdict in ("identical", "width-identical")
    (file,) = own_cache.glob("*.json")
    assert json.loads(file.read_text())["result"]["paths"][0]["findings"]["prompts"] == 4
    monkeypatch.setattr(run, "run_gate", None)
    assert boot(pair, "strict") == (found, False)


def test_strict_is_told_the_verdict_that_it_is_to_refuse(pair, passed, runs_nothing):
    keep(pair, passed, verdict="width-identical")
    assert boot(pair, "strict")[0].verdict == "width-identical"


# broken


def test_a_fault_at_boot_switches_speculation_off_with_one_line_and_prints_nothing(accepts_everything, capfd, caplog):
    found, later = boot(accepts_everything)
    assert (found.enabled, found.verdict, later) == (False, "broken", False)
    assert found.reason.startswith("broken, says the gate: vanilla speculative decoding, T=0")
    assert "position " in found.reason
    assert len(found.reason.splitlines()) == 1
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_a_fault_found_in_idle_time_is_heeded_by_the_next_start_and_by_other_commands(accepts_everything, monkeypatch):
    found = full_standing(accepts_everything, SHAPE, full=FULL)
    assert (found.enabled, found.verdict) == (False, "broken")
    monkeypatch.setattr(run, "run_gate", None)
    for mode in ("auto", "full", "strict", "off"):
        assert boot(accepts_everything, mode) == (found, False)
    assert heed.unless_broken(accepts_everything, 2).reason == found.reason


@pytest.mark.parametrize("shape", [SHAPE, Shape(rows=7, capacity=512, draft_k=2)])
def test_auto_runs_nothing_where_a_broken_verdict_of_any_shape_is_on_file(pair, passed, runs_nothing, shape):
    keep(pair, passed, Extent(prompts=1, max_tokens=4, drawn=1), verdict="broken", shape=shape)
    found, later = boot(pair)
    assert (found.enabled, found.verdict, later) == (False, "broken", False)


def test_a_broken_verdict_is_looked_at_again_once_a_later_good_one_lifts_it(pair, passed, own_cache):
    """What the warning advises, `posttrainllm gate --fresh`, has shapes of its own."""
    keep(pair, passed, verdict="broken")
    assert boot(pair, "full")[0].verdict == "broken"
    keep(pair, passed, shape=Shape(rows=4, capacity=512, draft_k=2))
    found, later = boot(pair)
    assert (found.enabled, found.verdict, later) == (True, "provisional", True)
    assert boot(pair, "full")[0].verdict == "identical"


# what cannot run


def full_memory(self):
    raise MemoryLimitError("not enough memory for the caches")


def test_where_the_caches_do_not_fit_auto_goes_on_ungated_and_full_fails(pair, monkeypatch):
    monkeypatch.setattr(Forecast, "check", full_memory)
    found, later = boot(pair)
    assert (found.enabled, found.verdict, later) == (True, "not gated", False)
    assert found.reason == "the gate could not run: not enough memory for the caches"
    for mode in ("full", "strict"):
        with pytest.raises(MemoryLimitError):
            boot(pair, mode)
    with pytest.raises(MemoryLimitError):
        full_standing(pair, SHAPE, full=FULL)


def test_where_the_probes_caches_do_not_fit_it_is_said_before_anything_is_decoded(pair, monkeypatch):
    """Engines have room: the process would be killed in the middle of the probes."""
    room = 5 * SHAPE.rows * pair.target.kv_bytes(SHAPE.capacity)
    monkeypatch.setattr(memory, "available_bytes", lambda: room)
    told = []
    found, _ = boot(pair, progress=lambda *values: told.append(values))
    assert found.verdict == "not gated"
    assert "not enough memory for the gate's probes (6 caches of the target at B=2, C=256)" in found.reason
    assert told == []


def test_where_the_context_is_tiny_auto_goes_on_ungated_and_full_fails(pair):
    tiny = attrs.evolve(SHAPE, capacity=24)
    found, later = boot(pair, shape=tiny)
    assert (found.enabled, found.verdict, later) == (True, "not gated", False)
    assert (
        found.reason == "the gate could not run: capacity: got 24, expected 28 or more: the gate's probes need as many"
    )
    with pytest.raises(CapacityError, match="got 24, expected 28"):
        boot(pair, "full", tiny)


def test_where_the_models_files_are_gone_auto_goes_on_ungated_and_full_fails(pair):
    moved = attrs.evolve(pair, target=attrs.evolve(pair.target, name="/no/such/model"))
    found, _ = boot(moved)
    assert (found.enabled, found.verdict) == (True, "not gated")
    assert "/no/such/model" in found.reason
    with pytest.raises(LoadError):
        boot(moved, "full")


def test_an_error_of_the_system_is_no_crash_of_the_server(pair, monkeypatch):
    def no_more_threads(*_, **__):
        raise OSError("cannot allocate")

    monkeypatch.setattr(run, "run_gate", no_more_threads)
    assert boot(pair)[0].reason == "the gate could not run: cannot allocate"


def test_a_verdict_that_cannot_be_kept_holds_all_the_same_and_says_so(pair, tmp_path, monkeypatch, capfd):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    found, _ = boot(pair)
    assert found.verdict == "provisional"
    assert str(blocked) in found.unkept
    assert capfd.readouterr() == ("", "")


# the plan


@pytest.mark.parametrize("capacity", [28, 30, 64])
def test_prompts_are_cut_to_a_small_context_and_half_of_it_is_left(pair, capacity):
    """The package's prompts have up to 133 tokens of this tokenizer."""
    made = standing._plan(pair, attrs.evolve(SHAPE, capacity=capacity), standing.FULL)
    assert made.shape == attrs.evolve(SHAPE, capacity=capacity)
    assert made.max_tokens == (capacity - 1) // 2
    longest = max(made.requests, key=lambda request: len(request.prompt))
    assert len(longest.prompt) == capacity - 1 - made.max_tokens
    assert longest.limit == capacity - 1


def test_the_context_of_the_model_bounds_a_large_cache(pair):
    made = standing._plan(pair, attrs.evolve(SHAPE, capacity=4096), attrs.evolve(standing.FULL, max_tokens=9999))
    assert made.max_tokens == pair.target.context // 2


def test_the_smallest_cache_that_is_gated_passes(pair):
    found, _ = boot(pair, shape=attrs.evolve(SHAPE, capacity=28))
    assert found.verdict == "provisional", found.reason


def test_a_server_of_one_slot_passes(pair):
    found = full_standing(pair, attrs.evolve(SHAPE, rows=1), full=FULL)
    assert found.verdict in ("identical", "width-identical"), found.reason


def test_100_prompts_of_128_tokens_are_the_whole_of_it():
    assert (standing.FULL.prompts, standing.FULL.max_tokens, standing.FULL.drawn) == (100, 128, None)
    assert standing.FIRST.prompts == 8
    assert len(read_prompts(None, None)) == standing.FULL.prompts


# what happens inside the callback


def test_the_callback_is_called_after_every_step_prefill_and_forward(accepts_everything, monkeypatch):
    """A faulty kernel, so that the trace of what broke is written, too: requests wait during that as well."""
    work, most = [0], [0]

    def counted(function):
        def call(*values, **options):
            work[0] += 1
            return function(*values, **options)

        return call

    for owner, name in ((Engine, "step"), (Engine, "insert"), (scoring.Scorer, "window")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))

    def progress(what, done, total):
        most[0], work[0] = max(most[0], work[0]), 0

    assert full_standing(accepts_everything, SHAPE, full=FULL, progress=progress).verdict == "broken"
    assert most == [1]
    assert work == [0]


class LeftError(Exception):
    pass


@pytest.mark.parametrize("phase", ["T=0, with the draft", "laws and probes", "a trace of what broke"])
def test_what_the_callback_raises_leaves_nothing_half_written(accepts_everything, own_cache, phase):
    def progress(what, done, total):
        if what == phase and done > 0:
            raise LeftError

    for call in (
        lambda: boot(accepts_everything, progress=progress),
        lambda: boot(accepts_everything, "full", progress=progress),
        lambda: full_standing(accepts_everything, SHAPE, full=FULL, progress=progress),
    ):
        with pytest.raises(LeftError):
            call()
    assert [path for path in own_cache.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("error", [UsageError("a request's own"), OSError("a socket's own")])
def test_an_error_of_the_callback_is_no_failure_of_the_gate(pair, error):
    def progress(what, done, total):
        raise error

    with pytest.raises(type(error), match="own"):
        boot(pair, progress=progress)


class Server:
    """Decodes requests over and over on an engine of the same pair, one step a call."""

    def __init__(self, pair, shape):
        self.engine = Engine(pair, rows=shape.rows, capacity=shape.capacity, width=shape.width)
        prompt = tuple(pair.tokenizer.encode("def add(a, b):\n    return"))
        common = {"prompt": prompt, "limit": len(prompt) + 40, "draft_k": shape.draft_k}
        self.requests = [
            RowRequest(**common),
            RowRequest(**common, temperature=0.9, seed=3),
            RowRequest(**common, temperature=0.8, top_p=0.9, seed=4, coupled=True),
        ]
        self.done, self.ids, self.served = 0, [], []
        self.engine.insert(0, self.requests[0])

    def __call__(self, what="", done=0, total=0):
        request = self.requests[self.done % len(self.requests)]
        step = self.engine.step().get(0)  # a step that was in flight for the request before has no row
        self.ids += () if step is None else step.tokens
        if len(self.ids) == request.limit - len(request.prompt):
            self.served.append(self.ids)
            self.ids, self.done = [], self.done + 1
            self.engine.release(0)
            self.engine.insert(0, self.requests[self.done % len(self.requests)])


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_request_decoded_inside_the_callback_and_the_verdict_are_what_they_are_alone(pair, rows):
    shape = attrs.evolve(SHAPE, rows=rows)
    by_itself = Server(attrs.evolve(pair), shape)  # with compiled functions of its own
    while by_itself.done < len(by_itself.requests):
        by_itself()
    alone = run_gate(attrs.evolve(pair), planned(pair, FULL, shape))
    server = Server(pair, shape)
    interrupted = run_gate(pair, planned(pair, FULL, shape), progress=server)
    assert server.done >= 6
    expected = [by_itself.served[index % 3] for index in range(server.done)]
    assert server.served == expected
    assert attrs.evolve(interrupted, seconds=0.0) == attrs.evolve(alone, seconds=0.0)


# loading


def test_importing_it_leaves_mlx_for_the_blas_to_come_first():
    code = (
        "import sys, posttrainllm.adapters.gate.standing\n"
        "assert not {'mlx', 'mlx.core', 'mlx_lm', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_that_outlives_its_sources_keeps_verdicts_of_the_code_that_it_runs(pair, passed, monkeypatch):
    """An upgrade under a running server: what it finds in idle time is not about the new files."""
    keep(pair, passed)
    monkeypatch.setattr(cache.Path, "read_bytes", lambda path: b"another version")
    assert boot(pair)[0].verdict == "identical"


@pytest.mark.slow
def test_the_embedded_pair_is_provisional_at_boot_and_passes_in_idle_time(embedded_pair):
    """All 100 prompts in one row take minutes; their verdict in other shapes is a test of the gate."""
    shape, full = Shape(rows=1, capacity=1280, draft_k=4), Extent(prompts=12, max_tokens=32, drawn=2)
    found, later = boot_standing(embedded_pair, shape, "auto", full=full)
    assert (found.enabled, found.verdict, later) == (True, "provisional", True), found.reason
    passed = full_standing(embedded_pair, shape, full=full)
    assert passed.verdict in ("identical", "width-identical")
    assert boot_standing(embedded_pair, shape, "auto", full=full) == (passed, False)
