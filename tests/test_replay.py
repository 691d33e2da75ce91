"""Recording and replaying: the same bits from any step, and whatever is not the recorded run is found and named."""

import json
from pathlib import Path

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import decode, table_pair, tiny_pair, without_draft
from test_families import FAMILIES, family_pair

from posttrainllm.adapters import engine as engine_module
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.replay.facts import step_facts
from posttrainllm.adapters.replay.reading import read_trace
from posttrainllm.adapters.replay.replayer import Replayer
from posttrainllm.adapters.replay.report import step_lines
from posttrainllm.adapters.replay.verify import verify, view_step
from posttrainllm.adapters.replay.writer import TraceWriter, record
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.errors import NonFiniteError, TraceError

PROMPT = (4, 5, 6, 7, 8, 9, 10)
PRINTS = {"target": "sha256:1", "draft": "sha256:2", "tokenizer": "sha256:3"}
RUNS = {
    "greedy": {},
    "leviathan": {"temperature": 0.8},
    "coupled": {"temperature": 1.0, "coupled": True},
    "filtered": {"temperature": 1.2, "top_k": 40, "top_p": 0.9},
    "fewer proposals than the window holds": {"temperature": 0.8, "draft_k": 2},
}


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(draft="noisy")


def request_of(prompt=PROMPT, count=40, seed=3, draft_k=4, **options):
    return RowRequest(prompt=prompt, limit=len(prompt) + count, seed=seed, draft_k=draft_k, **options)


def recorded(path, pair, *, width=5, capacity=256, prompt=PROMPT, count=40, **options):
    """A trace of one request, and its path."""
    file = path / "trace.jsonl"
    shapes = {name: options.pop(name) for name in ("rows", "row", "diagnostics") if name in options}
    request = request_of(prompt, count, **({"draft_k": 0} if pair.draft is None else {}) | options)
    record(file, pair, request, width=width, capacity=capacity, fingerprints=PRINTS, **shapes)
    return read_trace(file)


def edited(trace, step, **changes):
    """The trace with one step changed."""
    steps = list(trace.steps)
    steps[step] = attrs.evolve(steps[step], **changes)
    return attrs.evolve(trace, steps=tuple(steps))


def arrays_of(state):
    return [array for kv in (state.target_kv, state.draft_kv) for layer in kv for array in layer]


def assert_same_bits(one, other):
    length = int(one.length[0])
    assert one.length.tolist() == other.length.tolist()
    assert one.tokens[:, :length].tolist() == other.tokens[:, :length].tolist()
    assert one.key.tolist() == other.key.tolist()
    for left, right in zip(arrays_of(one), arrays_of(other), strict=True):
        unsigned = mx.uint32 if left.dtype == mx.float32 else mx.uint16
        assert mx.array_equal(mx.view(left, unsigned), mx.view(right, unsigned))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "uncompiled"])
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_speculative_run_replays_from_every_step(tmp_path, pair, options, compiled):
    trace = recorded(tmp_path, pair, **options)
    replayer = Replayer(pair, trace, compiled=compiled)
    for first in (0, len(trace.steps) // 2, len(trace.steps) - 1):
        outcome = verify(replayer, trace, first=first)
        assert outcome.divergence is None
        assert outcome.matched == len(trace.steps) - first
        assert outcome.tokens == sum(len(step.emitted) for step in trace.steps[first:])


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_plain_run_replays_at_any_width(tmp_path, pair, width, temperature):
    plain = without_draft(pair)
    trace = recorded(tmp_path, plain, width=width, temperature=temperature)
    assert not trace.header.drafted
    for compiled in (True, False):
        for first in (0, 17):
            outcome = verify(Replayer(plain, trace, compiled=compiled), trace, first=first)
            assert (outcome.divergence, outcome.matched) == (None, 40 - first)


def test_one_token_prompts_and_prompts_of_several_chunks_replay_from_the_middle(tmp_path, pair):
    for prompt in ((9,), tuple(range(10, 150))):
        trace = recorded(tmp_path, pair, prompt=prompt, temperature=0.8)
        outcome = verify(Replayer(pair, trace), trace, first=len(trace.steps) // 2)
        assert outcome.divergence is None


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "uncompiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_refilled_caches_have_the_bits_of_the_run(tmp_path, dtype, temperature, compiled):
    """Every slot, stale ones too; greedy steps draft at width 1 here, sampled ones at width 2."""
    pair = tiny_pair(draft="noisy", dtype=dtype)
    trace = recorded(tmp_path, pair, temperature=temperature)
    ran, refilled = (Replayer(pair, trace, compiled=compiled) for _ in range(2))
    ran.seek(0)
    for index, step in enumerate(trace.steps):
        ran.run(step)
        if index in (0, 4, len(trace.steps) - 1):
            refilled.seek(index + 1)
            assert refilled.place == ran.place
            assert_same_bits(refilled.state, ran.state)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_refilling_feeds_the_models_what_the_run_fed_them(tmp_path, pair, temperature):
    """Widths, positions and ids of every forward: on this device the bits alone might not show a wrong width."""
    trace = recorded(tmp_path, pair, temperature=temperature)
    fed = []

    def watched(model, name):
        def forward(tokens, kv, position):
            fed.append((name, tokens.tolist(), position.tolist()))
            return model.forward(tokens, kv, position)

        return attrs.evolve(model, forward=forward)

    watching = attrs.evolve(
        pair, target=watched(pair.target, "target"), draft=watched(pair.draft, "draft"), runtime=pair.runtime
    )
    calls = []
    for replayed in (True, False):
        replayer = Replayer(watching, trace, compiled=False)
        if replayed:
            replayer.seek(0)
            for step in trace.steps:
                replayer.run(step)
        else:
            replayer.seek(len(trace.steps))
        # a refill needs no logits and so may call target and draft in either order
        calls.append(sorted(fed))
        fed.clear()
    assert calls[0] == calls[1]
    assert len(calls[0]) >= 5 * len(trace.steps)
    widths = {len(tokens[0]) for name, tokens, _ in calls[0] if name == "draft"} - {64, 512}
    assert widths == ({1, 2} if pair.runtime.device == "cpu" else {2})


def test_the_prompt_goes_through_the_recorded_chunks_and_not_this_devices(tmp_path, pair):
    prompt, chunks = tuple(range(10, 60)), []

    def forward(tokens, kv, position):
        chunks.append((tokens.shape[1], position.item()))
        return pair.target.forward(tokens, kv, position)

    watching = attrs.evolve(pair, draft=None, target=attrs.evolve(pair.target, forward=forward))
    engine, request = Engine(watching, capacity=256, width=1, chunk=16), request_of(prompt, count=2, draft_k=0)
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        writer.begin(engine, 0, request, fingerprints=PRINTS)
    trace = read_trace(tmp_path / "trace.jsonl")
    Replayer(watching, trace, compiled=False).seek(0)
    assert chunks == [(16, 0), (16, 16), (16, 32), (16, 48)]


@pytest.mark.parametrize("bound", [0.0, 1e9], ids=["one step in flight", "two steps in flight"])
def test_a_row_among_others_is_recorded_and_replays_alone(tmp_path, pair, monkeypatch, bound):
    monkeypatch.setattr(engine_module, "_PIPELINED_BELOW_S", bound)
    engine = Engine(pair, rows=3, capacity=256, width=5)
    requests = [request_of((20, 21), temperature=0.9), request_of(), request_of((30,) * 9, count=6, top_k=9)]
    for row in (0, 1):
        engine.insert(row, requests[row])
    file = tmp_path / "trace.jsonl"
    ids = []
    with TraceWriter(file) as writer:
        writer.begin(engine, 1, requests[1], fingerprints=PRINTS)
        while len(ids) < 40:
            steps = engine.step()
            writer.step(steps[1])
            ids += steps[1].tokens
            if len(ids) > 10:
                engine.release(0)  # a greedy row alone is stepped by the greedy step
    trace = read_trace(file)
    assert trace.end is None
    assert (trace.header.rows, trace.header.row) == (3, 1)
    assert {step.mode for step in trace.steps} == {"greedy", "sampled"}
    assert [index for step in trace.steps for index in step.emitted] == ids
    for first in (0, 2, len(trace.steps) - 1):
        assert verify(Replayer(pair, trace), trace, first=first).divergence is None


def test_recording_changes_no_id_and_each_step_is_in_the_file_before_the_next(tmp_path, pair):
    engine, request, file = Engine(pair, capacity=256, width=5), request_of(temperature=0.8), tmp_path / "trace.jsonl"
    engine.insert(0, request)
    ids = []
    with TraceWriter(file) as writer:
        writer.begin(engine, 0, request, fingerprints=PRINTS)
        for count in range(1, 9):
            step = engine.step()[0]
            writer.step(step)
            ids += step.tokens
            assert len(read_trace(file).steps) == count
    unrecorded = decode(pair, [PROMPT], width=5, count=40, seeds=[3], temperature=0.8)[0]
    assert ids == unrecorded[: len(ids)]


def test_a_trace_says_what_was_fed_proposed_and_emitted(tmp_path, pair):
    trace = recorded(tmp_path, pair, temperature=0.8)
    committed = list(PROMPT)
    for step in trace.steps:
        assert step.length == len(committed)
        assert step.window == (committed[-1], *step.proposals)
        assert len(step.proposals) == 4
        assert step.emitted[: step.accepted] == step.proposals[: step.accepted]
        assert step.key == trace.header.key
        assert step.margins is None
        committed += step.emitted
    assert len(committed) == trace.header.limit
    assert trace.end == "length"
    assert 0 < sum(step.accepted for step in trace.steps) < sum(step.proposed for step in trace.steps)


def test_margins_are_recorded_and_compared_where_the_engine_has_them(tmp_path, pair):
    trace = recorded(tmp_path, pair, diagnostics=True)
    assert all(len(step.margins) == len(step.emitted) and min(step.margins) > 0 for step in trace.steps)
    assert verify(Replayer(pair, trace), trace, first=3).divergence is None
    margins = trace.steps[5].margins
    wrong = edited(trace, 5, margins=(float(np.nextafter(np.float32(margins[0]), np.float32(9))), *margins[1:]))
    found = verify(Replayer(pair, wrong), wrong).divergence
    assert (found.step, found.field, found.index, found.position) == (5, "margins", 0, trace.steps[5].length)


def change(values, index):
    return (*values[:index], values[index] ^ 1, *values[index + 1 :])


EDITS = {
    "proposals": (lambda step: change(step.proposals, 1), 1, 1),
    "emitted": (lambda step: change(step.emitted, 0), 0, 0),
    "window": (lambda step: change(step.window, 0), 0, -1),
    "key": (lambda step: change(step.key, 1), 1, 0),
    "proposed": (lambda step: step.proposed - 1, None, 0),
    "accepted": (lambda step: step.accepted + 1, None, None),
    "length": (lambda step: step.length + 1, None, 0),
    "finite": (lambda step: False, None, 0),
    "more emitted": (lambda step: (*step.emitted, 5), None, None),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", EDITS)
def test_one_changed_value_is_found_at_its_step(tmp_path, pair, name, temperature):
    trace = recorded(tmp_path, pair, temperature=temperature)
    step = next(step for step in trace.steps if step.step > 1 and step.accepted < 3)
    value, index, offset = EDITS[name]
    field = name.split()[-1]
    wrong = edited(trace, step.step, **{field: value(step)})
    for first in (0, step.step):
        outcome = verify(Replayer(pair, wrong), wrong, first=first)
        found = outcome.divergence
        assert (found.step, found.line, found.field, found.index) == (step.step, step.step + 2, field, index)
        assert outcome.matched == step.step - first
        assert found.position == step.length + (
            offset if offset is not None else step.accepted if field == "accepted" else len(step.emitted)
        )
        assert found.expected != found.got
    if field != "finite":
        assert verify(Replayer(pair, wrong), wrong, count=step.step).divergence is None


@pytest.mark.parametrize("field", ["key", "length", "window", "proposals", "emitted"])
def test_an_edited_step_is_not_built_upon(tmp_path, pair, field):
    trace = recorded(tmp_path, pair, temperature=0.8)
    step = next(step for step in trace.steps if step.step > 1 and step.accepted > 0)
    wrong = edited(trace, step.step, **{field: EDITS[field][0](step)})
    with pytest.raises(TraceError, match=rf"line {step.step + 2}: \w+: got .*, expected .*, which follows"):
        verify(Replayer(pair, wrong), wrong, first=step.step + 1)


def test_an_edited_last_id_of_a_skipped_step_shows_in_the_first_one_run(tmp_path, pair):
    trace = recorded(tmp_path, pair, temperature=0.8)
    step = trace.steps[4]
    wrong = edited(trace, 4, emitted=change(step.emitted, len(step.emitted) - 1))
    for first, expected in ((0, (4, "emitted")), (5, (5, "window"))):
        found = verify(Replayer(pair, wrong), wrong, first=first).divergence
        assert (found.step, found.field) == expected
        assert found.position == step.length + len(step.emitted) - 1


def test_another_model_diverges_and_the_step_is_explained(tmp_path, pair):
    trace = recorded(tmp_path, pair, temperature=0.8)
    other = attrs.evolve(pair, draft=tiny_pair(draft="random").draft)
    outcome = verify(Replayer(other, trace), trace)
    found = outcome.divergence
    assert (found.step, found.field) == (0, "proposals")
    assert outcome.view.ran.window[1:][found.index] == found.got
    facts = step_facts(outcome.view, trace.header, pair.tokenizer)
    assert facts["positions"][0].keys() >= {"position", "proposal", "p", "q", "ratio", "uniform", "margin", "decision"}


def test_an_id_that_the_models_lack_is_refused_before_a_model_sees_it(tmp_path, pair):
    trace = recorded(tmp_path, pair)
    small = tiny_pair(draft="noisy", vocab=300)
    assert max(max(step.window) for step in trace.steps) >= 300
    with pytest.raises(TraceError, match=r"line \d+: got id \d+, expected 0 to 299"):
        Replayer(small, trace).seek(len(trace.steps))


def test_a_key_that_is_not_the_seeds_is_refused(tmp_path, pair):
    trace = recorded(tmp_path, pair)
    wrong = attrs.evolve(trace, header=attrs.evolve(trace.header, seed=4))
    with pytest.raises(TraceError, match=r"line 1: key: got .* that of seed 4"):
        Replayer(pair, wrong)


def test_a_step_whose_logits_are_not_finite_is_recorded_and_replays(tmp_path):
    pair = table_pair()

    def forward(tokens, kv, position):
        logits, kv = pair.target.forward(tokens, kv, position)
        return mx.where((position >= 12)[:, None, None], mx.nan, logits), kv

    broken = attrs.evolve(pair, target=attrs.evolve(pair.target, forward=forward))
    file = tmp_path / "trace.jsonl"
    with pytest.raises(NonFiniteError):
        record(file, broken, request_of(), width=5, capacity=256, fingerprints=PRINTS)
    trace = read_trace(file)
    assert (trace.steps[-1].finite, trace.steps[-1].emitted, trace.end) == (False, (), None)
    outcome = verify(Replayer(broken, trace), trace)
    assert (outcome.divergence, outcome.matched) == (None, len(trace.steps))
    sound = verify(Replayer(pair, trace), trace).divergence
    assert (sound.step, sound.field) == (trace.steps[-1].step, "finite")


@pytest.mark.parametrize("draft", ["same", "noisy", "random"])
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_an_explanation_comes_to_the_steps_own_result(tmp_path, draft, options):
    """Accepted, emitted and the id behind a refusal follow from p, q, u and the draws it shows."""
    pair = tiny_pair(draft=draft)
    trace = recorded(tmp_path, pair, count=24, diagnostics=True, **options)
    replayer = Replayer(pair, trace)
    refusals = 0
    for step in trace.steps:
        replayer.seek(step.step)
        seen = replayer.explain(step, step.window)
        by_ratio = options.get("temperature", 0) > 0 and not options.get("coupled", False)
        assert seen["by_ratio"] == by_ratio
        assert seen["proposed"] == step.proposed
        stood = []
        for index, proposal in enumerate(step.proposals[: step.proposed]):
            p, q, u = (np.float32(seen[name][index]) for name in ("target_probs", "draft_probs", "uniforms"))
            stood.append(bool(u * q < p) if by_ratio else proposal == seen["choice"][index])
        assert stood == seen["accepts"][: step.proposed]
        accepted = (*stood, False).index(False)
        last = seen["residual"] if by_ratio and accepted < step.proposed else seen["choice"]
        refusals += accepted < step.proposed
        room = trace.header.limit - step.length
        assert step.emitted == (*step.proposals[:accepted], last[accepted])[:room]
        assert step.accepted == min(accepted, room)
        assert seen["margin"][: len(step.margins)] == list(step.margins)
    assert (refusals > 0) == (draft != "same")


def test_the_decisions_in_words_agree_with_what_was_emitted(tmp_path, pair):
    words = set()
    for draft_k in (2, 4):
        trace = recorded(tmp_path, pair, temperature=0.8, draft_k=draft_k)
        replayer = Replayer(pair, trace)
        for step in trace.steps:
            view, divergence = view_step(replayer, trace, step.step)
            assert divergence is None
            facts = step_facts(view, trace.header, pair.tokenizer)
            assert facts["accepted_by_rule"] == step.accepted
            entries = facts["positions"]
            decisions = [entry["decision"].split(":")[0] for entry in entries]
            assert decisions.count("accepted") == step.accepted
            assert [entry["emitted"] for entry in entries if entry["emitted"] is not None] == list(step.emitted)
            ends = [entry["decision"] == "behind the limit" for entry in entries]
            assert ends == [entry["position"] >= trace.header.limit for entry in entries]
            words |= set(decisions)
    assert words == {"accepted", "refused", "not reached", "not proposed", "the target's own", "behind the limit"}


def test_a_step_that_parts_from_the_arithmetic_shown_says_so(tmp_path, pair):
    trace = recorded(tmp_path, pair, temperature=0.8)
    view, _ = view_step(Replayer(pair, trace), trace, 2)
    for accepted, said in ((view.ran.accepted, False), (view.ran.accepted + 1, True)):
        wrong = attrs.evolve(view, ran=attrs.evolve(view.ran, accepted=accepted))
        lines = step_lines(step_facts(wrong, trace.header, pair.tokenizer), trace, pair.tokenizer)
        assert any(line.startswith(f"the step accepted {accepted}; by the values above") for line in lines) == said


def test_every_cut_of_a_trace_replays_what_is_whole(tmp_path, pair):
    trace = recorded(tmp_path, pair, count=8)
    file = tmp_path / "trace.jsonl"
    data = file.read_bytes()
    header = data.index(b"\n")
    for cut in range(header, len(data)):
        file.write_bytes(data[:cut])
        read = read_trace(file)
        lines = data[:cut].count(b"\n")
        whole = data[cut - 1 : cut] == b"\n"
        complete = data[cut : cut + 1] == b"\n"  # all of a line but its newline
        assert len(read.steps) == min(len(trace.steps), max(lines - 1 + complete, 0))
        assert (read.torn is None) == (whole or complete)
        assert read.steps == trace.steps[: len(read.steps)]
    for cut in range(header):
        file.write_bytes(data[:cut])
        with pytest.raises(TraceError, match=r"line 1: got a header that breaks off|got an empty file"):
            read_trace(file)


def with_line(number, **changes):
    """Change values of a line; a name with a dot goes one object down."""

    def change_it(lines):
        value = json.loads(lines[number - 1])
        for name, new in changes.items():
            *outer, last = name.split("__")
            inside = value
            for key in outer:
                inside = inside[key]
            if new is None and last not in ("blas",):
                del inside[last]
            else:
                inside[last] = new
        return [*lines[: number - 1], json.dumps(value), *lines[number:]]

    return change_it


MALFORMED = [
    (lambda lines: ["garbage", *lines[1:]], "line 1: got 'garbage', expected a JSON object"),
    (lambda lines: ["[1, 2]", *lines[1:]], r"line 1: got '\[1, 2\]', expected a JSON object"),
    (lambda lines: lines[1:], "line 1: trace is missing, expected one of posttrainllm"),
    (lambda lines: [*lines[:3], '{"step":', *lines[4:]], "line 4: got '{\"step\":', expected a JSON object"),
    (lambda lines: [*lines[:3], "", *lines[3:]], "line 4: got '', expected a JSON object"),
    (lambda lines: [*lines[:3], *lines[4:]], "line 4: step: got 3, expected 2"),
    (lambda lines: [*lines[:3], lines[2], *lines[3:]], "line 4: step: got 1, expected 2"),
    (lambda lines: [*lines[:-2], lines[-1]], r"line \d+: steps: got \d+, expected \d+"),
    (lambda lines: [*lines, lines[1]], r"line \d+: got a line behind the end, expected none"),
    (lambda lines: [lines[0], "[" * 100_000], r"line 2: got '\[\[\[.*expected a JSON object"),
    (with_line(1, format=2), "line 1: format: got 2, expected 1"),
    (with_line(1, K=3), "line 1: K: got 3, expected 4"),
    (with_line(1, shapes__W=99), "line 1: shapes.W: got 99, expected 2 to 33"),
    (with_line(1, shapes__C=6), "line 1: shapes.C: got 6, expected 7 to"),
    (with_line(1, shapes__prefill_chunk=10**9), "line 1: shapes.prefill_chunk: got 1000000000, expected 1 to 65536"),
    (with_line(1, row=1), "line 1: row: got 1, expected 0"),
    (with_line(1, seed=-1), "line 1: seed: got -1"),
    (with_line(1, sampling__temperature="hot"), "line 1: sampling: --temperature: got 'hot'"),
    (with_line(1, sampling__top_p=0), "line 1: sampling: --top-p: got 0"),
    (with_line(1, sampling__min_p=None), "line 1: sampling.min_p is missing, expected a number"),
    (with_line(1, accept_rule="typical"), "line 1: accept_rule: got 'typical', expected one of leviathan, coupled"),
    (with_line(1, step__mode="fast"), "line 1: step.mode: got 'fast', expected one of greedy"),
    (with_line(1, compiled=1), "line 1: compiled: got 1, expected true or false"),
    (with_line(1, key=[1]), r"line 1: key: got \[1\], expected 2 numbers"),
    (with_line(1, prompt=[]), r"line 1: prompt: got \[\], expected 1 to"),
    (with_line(1, prompt=[-1]), r"line 1: prompt\[0\]: got -1, expected 0 to"),
    (with_line(1, limit=10**6), "line 1: limit: got 1000000, expected 2 to 255"),
    (with_line(1, fingerprints__draft=None), "line 1: fingerprints.draft is missing, expected text"),
    (with_line(1, dtype__target=32), "line 1: dtype.target: got 32, expected one of float32"),
    (with_line(1, versions=None), "line 1: versions is missing, expected an object"),
    (with_line(3, emitted=None), "line 3: emitted is missing, expected a list"),
    (with_line(3, emitted="1"), "line 3: emitted: got '1', expected a list"),
    (with_line(3, emitted=[1] * 6), r"line 3: emitted: got .*, expected 0 to 5 numbers"),
    (with_line(3, emitted=[10**9]), r"line 3: emitted\[0\]: got 1000000000, expected 0 to 511"),
    (with_line(3, emitted=[True]), r"line 3: emitted\[0\]: got True, expected 0 to 511"),
    (with_line(3, proposals=[1, 2, 3]), r"line 3: proposals: got \[1, 2, 3\], expected 4 numbers"),
    (with_line(3, window=[1, 2, 3, 4, 1.5]), r"line 3: window\[4\]: got 1.5, expected 0 to"),
    (with_line(3, accepted=5), "line 3: accepted: got 5, expected 0 to 4"),
    (with_line(3, length=1), "line 3: length: got 1, expected 7 to"),
    (with_line(3, finite=0), "line 3: finite: got 0, expected true or false"),
    (with_line(3, margins=["x"]), "line 3: margins: got"),
]


@pytest.mark.parametrize(("change_it", "message"), MALFORMED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_malformed_trace_is_one_line_with_its_number(tmp_path, pair, change_it, message):
    recorded(tmp_path, pair, count=16)
    file = tmp_path / "trace.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(change_it(lines)) + "\n")
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_trace_that_cannot_be_opened_is_one_line(tmp_path, pair):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="cannot be written: No such file"):
        TraceWriter(tmp_path / "no" / "such")
    if not Path("/dev/full").exists():
        pytest.skip("nothing here is always full, as on macOS")
    with pytest.raises(TraceError, match="/dev/full: cannot be written: No space left"):
        record("/dev/full", pair, request_of(), width=5, capacity=256, fingerprints=PRINTS)


QUICK = [("qwen2", "bfloat16"), ("gemma3", "float32"), ("llama", "4-bit")]
ALL = [(family, form) for family in FAMILIES for form in ("float32", "bfloat16", "4-bit")]


@pytest.mark.parametrize(
    ("family", "form"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]
)
def test_runs_of_other_families_replay_with_the_same_bits(tmp_path, family, form):
    pair = family_pair(family, form, draft="same")
    trace = recorded(tmp_path, pair, prompt=(5, 6, 7) * 20, count=16, temperature=0.8)
    middle = len(trace.steps) // 2
    ran, refilled = Replayer(pair, trace), Replayer(pair, trace)
    ran.seek(0)
    for step in trace.steps[:middle]:
        ran.run(step)
    refilled.seek(middle)
    assert_same_bits(refilled.state, ran.state)
    assert verify(refilled, trace, first=middle).divergence is None
    assert verify(Replayer(pair, trace, compiled=False), trace, first=middle).divergence is None


def test_a_refusal_by_a_draft_without_a_law_is_said_to_be_one(tmp_path, pair):
    def lawless(tokens, kv, position):
        logits, kv = pair.draft.forward(tokens, kv, position)
        return logits * float("nan"), kv

    lost = attrs.evolve(pair, draft=attrs.evolve(pair.draft, forward=lawless))
    trace = recorded(tmp_path, lost, count=8, temperature=0.8)
    view, divergence = view_step(Replayer(lost, trace), trace, 0)
    assert divergence is None
    facts = step_facts(view, trace.header, lost.tokenizer)
    first = facts["positions"][0]
    assert first["decision"].startswith("refused: the draft has no law; ")
    assert first["q"] is first["ratio"] is None
    assert json.loads(json.dumps(facts, allow_nan=False))["emitted"] == facts["emitted"]
    assert any("no law" in line for line in step_lines(facts, trace, lost.tokenizer))
