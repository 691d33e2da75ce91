"""`--draft-k auto`: the lengths follow from costs and the row's own history, and change nothing that is promised."""

import json

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import decode, make_sampling, make_state, mostly_slow, table_forward, tiny_pair, without_draft
from test_law import LENGTH, LIMIT, ROUNDS, ROWS, VOCAB, deviate, draft_table, path_law, target_table
from test_replay import PRINTS, assert_same_bits, edited

from posttrainllm.adapters import adaptive, batch
from posttrainllm.adapters import engine as engine_module
from posttrainllm.adapters.adaptive import Curve, Pace, choices_up_to, expected_ids, speed_ratio
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.key import gate_key
from posttrainllm.adapters.gate.paths import PATHS
from posttrainllm.adapters.gate.plan import plan
from posttrainllm.adapters.gate.prompts import Prompt, read_prompts
from posttrainllm.adapters.gate.run import run_gate
from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.adapters.replay.reading import read_trace
from posttrainllm.adapters.replay.replayer import Replayer
from posttrainllm.adapters.replay.verify import verify, view_step
from posttrainllm.adapters.replay.writer import TraceWriter
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.compiled import compile_catch_up, compile_step
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.draft import CATCH_UP_WIDTH, Draft
from posttrainllm.kernel.errors import TraceError

WIDTH, COUNT = 5, 120
PROMPTS = ((4, 5, 6, 7), (9,) * 30, (3,), tuple(range(100, 200)))
CHEAP = Curve(draft_ks=(0, 1, 2, 4), seconds=(1.0, 1.1, 1.2, 1.4), plain_seconds=0.9)
DEAR = Curve(draft_ks=(0, 1, 2, 4), seconds=(1.0, 1.4, 1.8, 2.6), plain_seconds=0.9)
DEARER = Curve(draft_ks=(0, 1, 2, 4), seconds=(1.0, 1.7, 2.2, 3.2), plain_seconds=0.9)
CURVES = {"greedy": DEAR, "sampled": DEARER}
MODES = {
    "greedy": {},
    "leviathan": {"temperature": 0.8},
    "coupled": {"temperature": 1.0, "coupled": True},
    "filtered": {"temperature": 1.2, "top_k": 40},
    "penalties": {"frequency_penalty": 0.8, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(draft="noisy")


IN_FLIGHT = {"one step in flight": 0.0, "two steps in flight": 1e9}


@pytest.fixture(params=IN_FLIGHT.values(), ids=IN_FLIGHT)
def pipelined(request, monkeypatch):
    monkeypatch.setattr(engine_module, "_PIPELINED_BELOW_S", request.param)


def auto_engine(pair, *, rows=1, curves=CURVES):
    return Engine(pair, rows=rows, capacity=256, width=WIDTH, curves=curves)


def request_of(prompt, *, count=COUNT, seed=3, draft_k=4, **options):
    return RowRequest(prompt=prompt, limit=min(len(prompt) + count, 255), seed=seed, draft_k=draft_k, **options)


def run(engine, requests):
    """The steps of each request, all rows of one engine; a row at its limit is released."""
    for row, request in enumerate(requests):
        engine.insert(row, request)
    done, left = [[] for _ in requests], [request.limit - len(request.prompt) for request in requests]
    while any(left):
        for row, step in engine.step().items():
            assert step.finite
            done[row].append(step)
            left[row] -= len(step.tokens)
            if left[row] == 0:
                engine.release(row)
    return done


def ids_of(steps):
    return [index for step in steps for index in step.tokens]


def lengths_of(steps):
    return [step.draft_k for step in steps]


def feed(pace, curve, outcomes, most=4):
    """Decide, read, decide, read: a decision a step; outcomes are functions from K to accepted."""
    lengths = []
    for outcome in outcomes:
        draft_k, pace = pace.decide(curve, most)
        lengths.append(draft_k)
        pace = pace.after(draft_k, proposed=draft_k, accepted=min(outcome(draft_k), draft_k))
    return lengths, pace


# --- the choice


def test_the_expected_ids_are_those_of_the_paper():
    assert expected_ids(0.0, 4) == 1
    assert expected_ids(1.0, 4) == 5
    assert expected_ids(0.8, 4) == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4)
    assert expected_ids(0.8, 0) == 1


def test_few_lengths_are_compiled_and_the_largest_is_one_of_them():
    assert choices_up_to(1) == (0, 1)
    assert choices_up_to(4) == (0, 1, 2, 4)
    assert choices_up_to(6) == (0, 1, 2, 4, 6)
    assert choices_up_to(8) == (0, 1, 2, 4, 8)


def test_a_draft_that_is_always_right_is_drawn_from_as_far_as_allowed():
    lengths, _ = feed(Pace(), CHEAP, [lambda k: k] * 20)
    assert lengths == [4] * 20
    assert feed(Pace(), CHEAP, [lambda k: k] * 20, most=3)[0] == [2] * 20
    assert feed(Pace(), CHEAP, [lambda k: k] * 200, most=0)[0] == [0] * 200


def test_a_draft_that_is_never_right_is_left_out_and_tried_again_ever_less_often():
    lengths, _ = feed(Pace(), CHEAP, [lambda k: 0] * 700)
    drafted = [index for index, draft_k in enumerate(lengths) if draft_k]
    start = next(index for index, draft_k in enumerate(lengths) if draft_k == 0)
    assert start < 20
    gaps = np.diff([index for index in drafted if index >= start]).tolist()
    assert gaps[:4] == [33, 65, 129, 129]  # waits of 16 (from its start), 32, 64, then 128 plain steps
    assert sum(lengths[100:]) / len(lengths[100:]) < 0.05


def test_a_draft_that_becomes_right_is_used_again():
    lengths, _ = feed(Pace(), CHEAP, [lambda k: 0] * 60 + [lambda k: k] * 140)
    assert lengths[50:58].count(0) > 5
    assert lengths[-1] == 4


def test_the_last_step_that_was_launched_never_counts_whether_it_was_read_or_not():
    """One step in flight or two: the same lengths."""
    outcomes = np.random.default_rng(0).integers(0, 5, size=300).tolist()

    def lengths_with(late: bool) -> list[int]:
        pace, lengths, unread = Pace(), [], []
        for outcome in outcomes:
            draft_k, pace = pace.decide(DEAR, 4)
            lengths.append(draft_k)
            unread.append((draft_k, min(outcome, draft_k)))
            while len(unread) > late:
                k, accepted = unread.pop(0)
                pace = pace.after(k, proposed=k, accepted=accepted)
        return lengths

    assert lengths_with(False) == lengths_with(True)
    assert len(set(lengths_with(False))) > 2


def test_a_draft_that_can_propose_nothing_is_left_out():
    pace, lengths = Pace(), []
    for _ in range(40):
        draft_k, pace = pace.decide(CHEAP, 4)
        lengths.append(draft_k)
        pace = pace.after(draft_k, proposed=0, accepted=0)
    assert lengths[-15:].count(0) > 12


def test_the_ratio_of_rates_is_that_of_the_clock():
    assert speed_ratio(CHEAP, {4: 10}, 50) == pytest.approx(50 * 0.9 / 14)
    assert speed_ratio(CHEAP, {0: 5, 4: 5}, 10) == pytest.approx(9 / 12)
    assert speed_ratio(CHEAP, {3: 1}, 4) is None
    assert speed_ratio(CHEAP, {}, 0) is None


# --- the step


def test_a_narrower_draft_gives_the_row_what_its_own_limit_gives_it():
    """A step that draws 2 for a row, and one that draws 4 of which the row may use 2: the same ids, both rules."""
    tables = [mx.array(np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32) * 2) for seed in (1, 2)]
    draft = Draft(forward=table_forward(tables[1]), vocab_size=16, context=10**6)
    for own in (0, 1, 2, 3):
        results = []
        for drawn in (own, 4):
            config = StepConfig(width=WIDTH, vocab_size=16, mode="sampled", draft_k=drawn, diagnostics=True)
            step = compile_step(config, table_forward(tables[0]), draft)
            state = make_state([[index % 16] for index in range(60)], limit=40, capacity=64)
            sampling = make_sampling(
                60, temperature=[0.0, 1.0, 1.0] * 20, coupled=[False, False, True] * 20, draft_k=own
            )
            outputs = []
            for _ in range(8):
                state, output = step(state, sampling)
                fields = (output.tokens, output.emitted, output.proposed, output.accepted)
                outputs.append([array.tolist() for array in fields])
            results.append(outputs)
        assert results[0] == results[1]


def test_the_drafts_forwards_are_left_out_of_a_step_that_draws_fewer():
    calls = []

    def forward(tokens, kv, position):
        calls.append(tokens.shape[1])
        return mx.zeros((*tokens.shape, 16)), kv

    table = mx.zeros((16, 16))
    for draft_k, expected in ((None, [2, 2, 2, 2]), (2, [2, 2]), (1, [2]), (0, [])):
        calls.clear()
        config = StepConfig(width=WIDTH, vocab_size=16, draft_k=draft_k)
        step = compile_step(config, table_forward(table), Draft(forward=forward, vocab_size=16, context=99))
        step(make_state([[1, 2]], limit=20, capacity=32), make_sampling(1))
        assert calls == expected


def test_leviathan_emits_the_targets_law_where_k_follows_what_was_accepted():
    """As in test_law: 5.5 deviates, a false alarm once in 5e7 runs."""
    target, proposer = target_table(), draft_table("random")
    draft = Draft(forward=table_forward(mx.array(proposer)), vocab_size=VOCAB, context=10**6)
    steps = [
        compile_step(
            StepConfig(width=WIDTH, vocab_size=VOCAB, mode="sampled", draft_k=drawn),
            table_forward(mx.array(target)),
            draft,
        )
        for drawn in (2, 0, 4)
    ]
    counts = np.zeros((VOCAB,) * 3, dtype=np.int64)
    for index in range(ROUNDS):
        seeds = range(index * ROWS, (index + 1) * ROWS)
        state = make_state([[0]] * ROWS, limit=1 + LENGTH, capacity=LENGTH + WIDTH, seeds=seeds)
        draft_k = mx.full((ROWS,), 2, dtype=mx.int32)
        for step in (steps[0], steps[1] if index % 2 else steps[2], steps[2]):
            sampling = attrs.evolve(make_sampling(ROWS, temperature=0.8), draft_k=draft_k)
            state, output = step(state, sampling)
            draft_k = mx.where(output.accepted > 0, 4, 1).astype(mx.int32)
        np.add.at(counts, tuple(np.array(state.tokens)[:, 1 : 1 + LENGTH].T), 1)
    assert abs(deviate(counts, path_law(target, 0.8))) < LIMIT


def test_catching_up_writes_what_was_left_out_and_touches_no_other_row(pair):
    """Held against one forward over everything: float32, whose sums another width may order differently."""
    model, capacity, length = pair.draft, 128, 70
    draft = Draft(forward=model.forward, vocab_size=model.vocab_size, context=capacity)
    ids = np.random.default_rng(3).integers(0, 512, size=(3, length)).tolist()
    start = mx.zeros((3,), dtype=mx.int32)
    _, whole = model.forward(mx.array(ids), model.make_kv(3, capacity), start)
    behind = [1, 0, 37]
    fed = [row[: length - 2 - count] + [0] * (2 + count) for row, count in zip(ids, behind, strict=True)]
    _, kv = model.forward(mx.array(fed), model.make_kv(3, capacity), start)
    state = make_state(ids, limit=100, capacity=capacity, draft_kv=kv)
    before = [np.array(array[1]) for layer in kv for array in layer]
    catch_up = compile_catch_up(draft)
    for done in range(0, max(behind), CATCH_UP_WIDTH):
        state = catch_up(state, mx.array([max(count - done, 0) for count in behind], dtype=mx.int32))
    for layer, expected in zip(state.draft_kv, whole, strict=True):
        for array, right in zip(layer, expected, strict=True):
            for row in (0, 2):
                np.testing.assert_allclose(array[row, :, : length - 2], right[row, :, : length - 2], atol=1e-4)
    after = [np.array(array[1]) for layer in state.draft_kv for array in layer]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[:, : capacity - 1], new[:, : capacity - 1])


# --- the engine


@pytest.fixture(scope="module")
def plainly():
    """What the tiny target emits plainly, by options: its weights are the same beside every draft."""
    plain, known = without_draft(tiny_pair()), {}

    def ids(**options):
        key = tuple(sorted(options.items()))
        if key not in known:
            known[key] = decode(plain, PROMPTS, width=WIDTH, count=COUNT, **options)
        return known[key]

    return ids


# how many steps are in flight is told apart below, too
RUNS = {
    f"{draft}, {mode}, {flight}": (draft, options, bound)
    for draft in ("random", "noisy", "same")
    for mode, options in MODES.items()
    for flight, bound in IN_FLIGHT.items()
}
_FAST_RUNS = [name for name in RUNS if name.startswith("noisy") or "two steps" in name]
ROW_RUNS = {f"{mode}, {flight}": (MODES[mode], bound) for mode in MODES for flight, bound in IN_FLIGHT.items()}
_FAST_ROWS = [name for name in ROW_RUNS if name.startswith(("leviathan", "penalties")) or "two steps" in name]


@pytest.mark.parametrize(("draft", "options", "pipelined"), mostly_slow(RUNS, *_FAST_RUNS), indirect=["pipelined"])
def test_output_is_that_of_plain_decoding_at_the_same_width(draft, options, pipelined, plainly):
    pair = tiny_pair(draft=draft)
    if options.get("temperature", 0) > 0:
        options = {**options, "coupled": True}
    engine = auto_engine(pair, rows=len(PROMPTS))
    steps = run(engine, [request_of(prompt, seed=row, **options) for row, prompt in enumerate(PROMPTS)])
    assert [ids_of(row) for row in steps] == plainly(**options)
    lengths = [length for row in steps for length in lengths_of(row)]
    if draft == "random":
        assert 0 in lengths
        assert max(lengths) > 0
    if draft == "same":
        assert 0 not in lengths
        assert 4 in lengths


@pytest.mark.parametrize(("options", "pipelined"), mostly_slow(ROW_RUNS, *_FAST_ROWS), indirect=["pipelined"])
def test_a_row_gets_the_same_ids_and_lengths_alone_and_among_others(pair, options, pipelined):
    requests = [request_of(prompt, seed=row, **options) for row, prompt in enumerate(PROMPTS)]
    requests[1] = request_of(PROMPTS[1], temperature=0.9, seed=8)
    together = run(auto_engine(pair, rows=len(PROMPTS)), requests)
    for row, request in enumerate(requests):
        engine = auto_engine(pair, rows=len(PROMPTS))
        engine.insert(row, request)
        alone = []
        while len(ids_of(alone)) < request.limit - len(request.prompt):
            alone.append(engine.step()[row])
        assert ids_of(alone) == ids_of(together[row])
        assert lengths_of(alone) == lengths_of(together[row])
        assert [(step.proposed, step.accepted) for step in alone] == [
            (step.proposed, step.accepted) for step in together[row]
        ]


def test_lengths_change_in_these_tests(pair):
    """Else the others would hold of a fixed K as well."""
    steps = run(auto_engine(pair), [request_of(PROMPTS[0], temperature=0.8)])[0]
    lengths = lengths_of(steps)
    assert len(set(lengths)) >= 3
    behind = "".join("0" if length == 0 else "x" for length in lengths)
    assert "x0" in behind
    assert "0x" in behind


def in_flight(pair, monkeypatch):
    """The steps of one request with one step in flight, with two, and with both in turns."""
    runs = []
    for bounds in ([0.0], [1e9], [0.0, 1e9, 1e9]):
        engine = auto_engine(pair)
        engine.insert(0, request_of(PROMPTS[0], temperature=0.8))
        steps = []
        while len(ids_of(steps)) < COUNT:
            monkeypatch.setattr(engine_module, "_PIPELINED_BELOW_S", bounds[len(steps) % len(bounds)])
            steps.append(engine.step()[0])
        runs.append(steps)
    return runs


def test_the_number_of_steps_in_flight_changes_neither_ids_nor_lengths(pair, monkeypatch):
    one, two, mixed = in_flight(pair, monkeypatch)
    assert lengths_of(one) == lengths_of(two) == lengths_of(mixed)
    assert [step.tokens for step in one] == [step.tokens for step in two] == [step.tokens for step in mixed]


def test_the_drafts_cache_has_the_ids_that_steps_without_it_left_out(pair):
    """A draft that is the target accepts all again after more plain steps than a window holds, also a long-idle row."""
    pair = tiny_pair(draft="same")
    for gap in (1, 2, CATCH_UP_WIDTH - 1, CATCH_UP_WIDTH, CATCH_UP_WIDTH + 1, 40):
        engine = auto_engine(pair, rows=2)
        lengths = [0] * gap + [4] * 4

        def decide(left=lengths, count=gap):
            draft_k = left.pop(0)
            return (draft_k, draft_k), ((count if len(left) == 3 else 0),) * 2

        engine.occupancy.pacer.decide = decide
        for row, prompt in enumerate(((7,), PROMPTS[1])):
            engine.insert(row, request_of(prompt))
        for index in range(gap + 3):
            for step in engine.step().values():
                assert step.accepted == step.proposed == (0 if index < gap else 4)


def test_every_length_is_traced_once_and_no_step_later(pair):
    traces = []

    def counted(model):
        plain = model.forward

        def forward(tokens, kv, position):
            traces.append(tokens.shape)
            return plain(tokens, kv, position)

        return attrs.evolve(model, forward=forward)

    pair = attrs.evolve(pair, target=counted(pair.target), draft=counted(pair.draft))
    first = run(auto_engine(pair), [request_of(PROMPTS[0])])
    assert {step.drawn for row in first for step in row} == {0, 1, 2, 4}
    after_first = len(traces)
    # two prefills; the target's forward for each length, and the draft's; catching up
    assert after_first == 2 + 4 + (0 + 1 + 2 + 4) + 1
    assert run(auto_engine(pair), [request_of(PROMPTS[0])]) == first
    assert len(traces) == after_first


def test_a_row_that_asks_for_no_draft_has_none_and_the_step_leaves_it_out(pair):
    steps = run(auto_engine(pair), [request_of(PROMPTS[0], draft_k=0)])[0]
    assert {(step.draft_k, step.drawn, step.proposed) for step in steps} == {(0, 0, 0)}


def test_a_random_draft_is_backed_off_from_and_a_good_one_is_kept():
    """Case 21."""
    curves = {"greedy": CHEAP}
    poor = run(auto_engine(tiny_pair(draft="random"), curves=curves), [request_of(PROMPTS[0], count=250)])[0]
    tail = lengths_of(poor)[-100:]
    assert tail.count(0) >= 95
    good = run(auto_engine(tiny_pair(draft="same"), curves=curves), [request_of(PROMPTS[0], count=250)])[0]
    assert set(lengths_of(good)) == {4}


# --- replay


def recorded(tmp_path, pair, *, row=0, others=(), **options):
    """A trace of a row among others that leave early."""
    engine = auto_engine(pair, rows=1 + len(others))
    request = request_of(PROMPTS[0], **options)
    rows = [index for index in range(1 + len(others)) if index != row]
    for index, other in zip(rows, others, strict=True):
        engine.insert(index, other)
    engine.insert(row, request)
    file, ids = tmp_path / "trace.jsonl", []
    with TraceWriter(file) as writer:
        writer.begin(engine, row, request, fingerprints=PRINTS)
        while len(ids) < COUNT:
            step = engine.step()[row]
            writer.step(step)
            ids += step.tokens
            if len(ids) > COUNT - 20 and rows:
                engine.release(rows.pop())
        writer.end("length")
    return read_trace(file)


@pytest.mark.parametrize("options", mostly_slow(MODES, "leviathan", "penalties"))
def test_a_run_replays_from_every_step(tmp_path, pair, options):
    trace = recorded(tmp_path, pair, **options)
    assert trace.header.auto == (DEARER if options.get("temperature") else DEAR)
    assert {0, 2} < {step.draft_k for step in trace.steps}
    replayer = Replayer(pair, trace)
    for first in range(len(trace.steps)):
        count = None if first % 10 == 0 else 2
        assert verify(replayer, trace, first=first, count=count).divergence is None


def test_a_row_among_others_replays_alone(tmp_path, pair, pipelined):
    others = (request_of(PROMPTS[1], temperature=0.9, seed=8), request_of(PROMPTS[2], seed=9, temperature=1.0))
    trace = recorded(tmp_path, pair, row=1, others=others, temperature=0.8, seed=10)
    assert any(step.draft_k < step.drawn for step in trace.steps)
    assert any(step.draft_k == 0 < step.drawn for step in trace.steps)
    replayer = Replayer(pair, trace)
    for first in range(0, len(trace.steps), 3):
        assert verify(replayer, trace, first=first, count=4).divergence is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_refilled_caches_have_the_bits_of_the_run(tmp_path, dtype):
    pair = tiny_pair(draft="noisy", dtype=dtype)
    trace = recorded(tmp_path, pair, temperature=0.8)
    ran, refilled = Replayer(pair, trace), Replayer(pair, trace)
    ran.seek(0)
    for index, step in enumerate(trace.steps):
        if index % 4 == 0:
            refilled.seek(index)
            assert_same_bits(ran.state, refilled.state)
        ran.run(step)


def test_an_explanation_comes_to_what_the_step_decided(tmp_path, pair):
    trace = recorded(tmp_path, pair, temperature=0.8)
    replayer = Replayer(pair, trace)
    seen = set()
    for step in range(len(trace.steps)):
        view, divergence = view_step(replayer, trace, step)
        assert divergence is None
        explanation = view.explanation
        assert explanation["proposed"] == view.ran.proposed
        assert len(explanation["choice"]) == view.ran.drawn + 1
        accepts = explanation["accepts"][: explanation["proposed"]]
        stood = accepts.index(False) if False in accepts else len(accepts)
        assert min(stood, len(view.ran.tokens)) == view.ran.accepted
        seen.add(view.ran.drawn)
    assert len(seen) >= 3


def test_a_length_that_does_not_follow_from_costs_and_history_is_found(tmp_path, pair):
    trace = recorded(tmp_path, pair, temperature=0.8)
    step = next(step.step for step in trace.steps if step.draft_k == 0 and step.step > 0)
    changed = edited(trace, step, draft_k=1, drawn=1)
    found = verify(Replayer(pair, changed), changed).divergence
    assert (found.step, found.field, found.expected, found.got) == (step, "draft_k", 1, 0)
    other = attrs.evolve(trace, header=attrs.evolve(trace.header, auto=CHEAP))
    assert verify(Replayer(pair, other), other).divergence.field == "draft_k"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"draft_ks":[0,1,2,4]', '"draft_ks":[1,2,4]', "line 1: auto.seconds|line 1: auto.draft_ks"),
        ('"draft_ks":[0,1,2,4]', '"draft_ks":[0,2,1,4]', "line 1: auto.draft_ks: got .*, expected rising"),
        ('"draft_ks":[0,1,2,4]', '"draft_ks":[0,1,2,5]', r"line 1: auto.draft_ks\[3\]: got 5, expected 0 to 4"),
        ('"seconds":[1.0,', '"seconds":[0.0,', "line 1: auto.seconds: .*more than 0"),
        ('"plain_seconds":0.9', '"plain_seconds":null', "line 1: auto.plain_seconds"),
        ('"draft_k":4,"drawn":4', '"draft_k":4,"drawn":3', "drawn: got 3, expected one of"),
        ('"draft_k":4,"drawn":4', '"draft_k":2,"drawn":2.0', "drawn: got 2.0, expected one of"),
        ('"draft_k":4,"drawn":4', '"draft_k":1,"drawn":true', "drawn: got True, expected one of"),
        ('"draft_k":4,"drawn":4', '"draft_k":4', "drawn is missing"),
        ('"draft_k":4,"drawn":4', '"draft_k":9,"drawn":4', "draft_k: got 9, expected 0 to 4"),
    ],
)
def test_a_malformed_trace_is_one_line_with_its_number(tmp_path, pair, old, new, message):
    recorded(tmp_path, pair)
    file = tmp_path / "trace.jsonl"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(TraceError, match=message):
        read_trace(file)


def test_the_tests_above_find_a_length_that_depends_on_what_was_read_in_time(pair, monkeypatch):
    """The test of the tests: counting every step that was read, late or not, is no function of the history alone."""

    def decide_at_once(self, curve, most):
        pace = self
        while pace.read:
            pace = pace._count(*pace.read[0])
        return original(attrs.evolve(pace, counted=pace.decided), curve, most)

    original = Pace.decide
    monkeypatch.setattr(adaptive.Pace, "decide", decide_at_once)
    one, two, _ = in_flight(pair, monkeypatch)
    assert lengths_of(one) != lengths_of(two)
    assert ids_of(one) != ids_of(two)


# --- the gate


def test_the_gate_runs_the_lengths_that_serve_and_files_them_apart(pair):
    texts = ("\u0103", "\u0104\u0105\u0106", "\u0110\u0111" * 20)
    prompts = [Prompt(id=f"tiny-{number}", kind="letters", text=text) for number, text in enumerate(texts)]
    planned = plan(pair, prompts, draft_k=4, max_tokens=60, cut=True, curves=CURVES)
    decoded = batch.decode(PATHS[0].candidate(pair, planned.shape), planned.requests)
    assert {step.draft_k for steps in decoded for step in steps} == {0, 1, 2, 4}
    (path,) = run_gate(pair, planned).paths
    assert path.findings.reference_differences == path.findings.coupled_differences == ()
    assert all(law.holds for law in path.findings.laws)
    assert path.verdict in ("identical", "width-identical")


def test_a_verdict_on_one_policy_is_none_on_another():
    pair = load_pair()
    prompts = read_prompts(None, 2)
    plans = [plan(pair, prompts, draft_k=4, max_tokens=8, cut=True, curves=curves) for curves in (None, CURVES)]
    keys = [gate_key(pair, planned) for planned in plans]
    assert "auto" not in keys[0]
    assert {name: value for name, value in keys[1].items() if name != "auto"} == keys[0]
    assert json.loads(json.dumps(keys[1])) == keys[1]
