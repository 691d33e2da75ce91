"""The engine's thread, driven on the test's own: `run` returns once the admission is closed."""

import logging
import time

import attrs
import pytest
from support import decode, tiny_pair

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.replay.writer import TraceWriter
from posttrainllm.adapters.serve.admission import Admission
from posttrainllm.adapters.serve.errors import ApiError
from posttrainllm.adapters.serve.jobs import Job
from posttrainllm.adapters.serve.recordings import Recordings
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.kernel.errors import MemoryLimitError, NonFiniteError, TraceError, UsageError

CAPACITY, WIDTH = 256, 4
NOT_GATED = Standing(enabled=True, verdict="not gated", reason=None)
PROMPTS = ((4, 5, 6, 7), (9,) * 30, (3,), tuple(range(100, 200)))


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(draft="noisy")


class Client:
    """Everything that was said of one choice."""

    def __init__(self, prompt=PROMPTS[0], *, tokens=20, speculate=True, then=None, **options):
        self.updates, self.then = [], then
        params = SamplingParams(ignore_eos=True, **options)
        self.job = Job(
            request_id="test",
            index=0,
            prompt=prompt,
            params=params,
            seed=params.seed,
            limit=len(prompt) + tokens,
            speculate=speculate,
            since=time.perf_counter(),
            deliver=self.take,
        )

    def take(self, update):
        self.updates.append(update)
        if self.then is not None:
            self.then(self)

    @property
    def ids(self):
        return [index for update in self.updates if update.chunk for index in update.chunk.token_ids]

    @property
    def outcome(self):
        return self.updates[-1].outcome

    @property
    def ended(self):
        return bool(self.updates) and self.updates[-1].last


def scheduler_of(pair, *, slots=2, queue=64, standing=NOT_GATED, full_gate=None, folder=None, **shared):
    def engine_for(standing):
        if standing.enabled:
            return Engine(pair, rows=slots, capacity=CAPACITY, width=WIDTH, **shared)
        return Engine(pair.plain(standing.reason), rows=slots, capacity=CAPACITY, width=1, **shared)

    admission = Admission(slots=slots, queue=queue)
    recordings = Recordings(folder, {"target": "t", "draft": "d", "tokenizer": "k"})
    return Scheduler(engine_for, standing, admission, recordings=recordings, full_gate=full_gate)


def admit(admission, *clients):
    with admission.room(len(clients)) as put:
        put([client.job for client in clients])


def run(scheduler, *clients):
    """Serve all of them, then stop."""

    def stop_at_the_end(_):
        if all(client.ended for client in clients):
            scheduler.admission.close()

    for client in clients:
        first = client.then
        client.then = (lambda it, first=first: (first(it), stop_at_the_end(it))) if first else stop_at_the_end
        admit(scheduler.admission, client)
    scheduler.run()
    return clients


def test_a_request_gets_the_same_ids_alone_and_among_others_that_join_and_leave(pair):
    def asked(index, prompt):
        options = [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_k": 5}]
        return Client(prompt, tokens=11 + 7 * index, **options[index % 3])

    together = run(scheduler_of(pair), *(asked(*entry) for entry in enumerate(PROMPTS * 2)))
    for index, prompt in enumerate(PROMPTS * 2):
        (alone,) = run(scheduler_of(pair), asked(index, prompt))
        assert together[index].ids == alone.ids
        assert len(alone.ids) == 11 + 7 * index
        assert together[index].outcome.usage.completion_tokens == len(alone.ids)


def test_greedy_ids_are_those_of_plain_decoding_at_the_same_width(pair):
    (client,) = run(scheduler_of(pair), Client(tokens=40))
    assert client.ids == decode(pair.plain("test"), [PROMPTS[0]], width=WIDTH, count=40)[0]
    assert client.outcome.usage.draft_proposed > 0


def test_a_request_that_asks_for_no_speculation_gets_the_same_ids_with_nothing_proposed(pair):
    drafted, plain = run(scheduler_of(pair), Client(), Client(speculate=False))
    assert drafted.ids == plain.ids
    assert (plain.outcome.usage.draft_proposed, plain.outcome.usage.accept_rate) == (0, None)
    assert plain.outcome.speculative["enabled"] is False
    assert plain.outcome.speculative["reason"] == "the request asked for none"


def test_requests_are_served_first_come_first_served(pair):
    order = []
    clients = [Client(tokens=5, then=lambda client, n=n: client.ended and order.append(n)) for n in range(4)]
    run(scheduler_of(pair, slots=1), *clients)
    assert order == [0, 1, 2, 3]


def test_a_row_whose_client_left_is_free_after_the_step_under_way(pair):
    def leave(client):
        client.job.cancelled = True
        client.ids_when_left = len(client.ids)

    gone = Client(tokens=200, then=leave)
    waiting = Client(tokens=5)
    scheduler = scheduler_of(pair, slots=1)
    waiting.then = lambda client: client.ended and scheduler.admission.close()
    for client in (gone, waiting):
        admit(scheduler.admission, client)
    scheduler.run()
    assert len(gone.ids) == gone.ids_when_left < 200
    assert len(waiting.ids) == 5


def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_row(pair):
    long = Client(PROMPTS[3], tokens=50)
    scheduler = scheduler_of(pair, slots=1)
    admit(scheduler.admission, long)
    assert scheduler._turn()  # the first of its chunks
    long.job.cancelled = True
    (other,) = run(scheduler, Client(tokens=5))
    assert long.updates == []
    assert len(other.ids) == 5


@pytest.mark.parametrize("slots", [1, 2])
def test_of_two_identical_prompts_that_arrive_at_once_the_second_computes_no_whole_chunk(pair, slots):
    keeping = {"prefix_bytes": 2**24, "chunk": 16}
    asked = [Client(PROMPTS[3], tokens=20, temperature=0.9, seed=seed) for seed in (1, 1, 2)]
    run(scheduler_of(pair, slots=slots, **keeping), *asked)
    assert [client.outcome.cached_tokens for client in asked] == [0, 96, 96]
    again = [Client(PROMPTS[3], tokens=20, temperature=0.9, seed=seed) for seed in (1, 1, 2)]
    run(scheduler_of(pair, slots=slots, chunk=16), *again)
    assert [client.ids for client in asked] == [client.ids for client in again]
    assert [client.outcome.cached_tokens for client in again] == [0, 0, 0]


def test_a_client_that_leaves_while_its_prompt_is_read_leaves_whole_chunks_that_the_next_one_uses(pair):
    gone = Client(PROMPTS[3], tokens=50)
    scheduler = scheduler_of(pair, slots=1, prefix_bytes=2**24, chunk=16)
    admit(scheduler.admission, gone)
    for _ in range(3):  # a chunk of the target, the same of the draft, the next of the target
        assert scheduler._turn()
    gone.job.cancelled = True
    (other,) = run(scheduler, Client(PROMPTS[3], tokens=20))
    (expected,) = run(scheduler_of(pair, slots=1, chunk=16), Client(PROMPTS[3], tokens=20))
    assert (gone.updates, other.outcome.cached_tokens) == ([], 16)
    assert other.ids == expected.ids


def test_a_broken_verdict_leaves_nothing_of_the_pair_in_the_cache_of_the_plain_engine(pair):
    """The kept chunks are of another engine's models; the same prompt is read anew and its ids are the plain ones."""
    clients = [Client(PROMPTS[3], tokens=12) for _ in range(2)]

    def gate(*, progress):
        admit(scheduler.admission, clients[0])
        progress("anything", 0, 1)
        admit(scheduler.admission, clients[1])
        clients[1].then = lambda it: it.ended and scheduler.admission.close()
        return Standing(enabled=False, verdict="broken", reason="position 7 differs")

    scheduler = scheduler_of(pair, full_gate=gate, prefix_bytes=2**24, chunk=16)
    scheduler.run()
    assert clients[1].outcome.cached_tokens == 0
    assert clients[1].ids == decode(pair.plain("test"), [PROMPTS[3]], width=1, count=12)[0]


def test_a_client_that_leaves_while_it_waits_is_never_run_and_makes_room(pair):
    scheduler = scheduler_of(pair, slots=1, queue=1)
    first, gone, last = Client(tokens=30), Client(), Client(tokens=5)
    admit(scheduler.admission, first)
    admit(scheduler.admission, gone)
    with pytest.raises(ApiError, match="the server is busy") as caught:
        admit(scheduler.admission, last)
    assert caught.value.status == 429
    assert int(caught.value.headers["retry-after"]) >= 1
    gone.job.cancelled = True
    last.then = lambda client: client.ended and scheduler.admission.close()
    admit(scheduler.admission, last)
    scheduler.run()
    assert gone.updates == []
    assert (len(first.ids), len(last.ids)) == (30, 5)


def test_more_choices_than_the_server_holds_are_refused_for_good():
    admission = Admission(slots=2, queue=3)
    with pytest.raises(UsageError, match="n: got 6 choices in all, expected at most 5"):
        admit(admission, *(Client() for _ in range(6)))
    admit(admission, *(Client() for _ in range(5)))


def test_room_that_was_kept_and_not_used_is_given_back():
    admission = Admission(slots=1, queue=0)
    with (
        admission.room(1),
        pytest.raises(ApiError, match="got 1 choice beside 0 that decode and 1 that wait, expected at most 1"),
        admission.room(1),
    ):
        pass
    with admission.room(1):
        pass
    assert admission.counts == (0, 0)


def test_an_engine_that_fails_ends_everything_under_way_and_takes_nothing_more(pair, monkeypatch):
    scheduler = scheduler_of(pair, slots=1)
    calls = []

    def step(self):
        calls.append(1)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Engine, "step", step)
    running, waiting = Client(), Client()
    for client in (running, waiting):
        admit(scheduler.admission, client)
    with pytest.raises(RuntimeError, match="the device is gone"):
        scheduler.run()
    for client in (running, waiting):
        assert client.updates[-1].error.status == 500
    with pytest.raises(ApiError) as caught:
        admit(scheduler.admission, Client())
    assert caught.value.status == 500
    assert len(calls) == 1


@pytest.mark.parametrize("where", ["prefill", "place"])
def test_an_engine_that_fails_on_a_prompt_tells_whoever_asked(pair, monkeypatch, where):
    scheduler = scheduler_of(pair)

    def fail(self, *_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Engine, where, fail)
    client = Client()
    admit(scheduler.admission, client)
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.run()
    assert client.updates[-1].error.status == 500


def test_an_engine_that_fails_when_a_row_is_freed_tells_whoever_had_it(pair, monkeypatch):
    def release(self, row):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Engine, "release", release)
    scheduler, client = scheduler_of(pair), Client(tokens=5)
    admit(scheduler.admission, client)
    with pytest.raises(RuntimeError, match="the device is gone"):
        scheduler.run()
    assert client.updates[-1].error.status == 500


def test_logits_that_are_not_finite_end_their_own_request_alone(pair, monkeypatch):
    real, failed = Engine.step, []

    def step(self):
        steps = real(self)
        bad = min(steps) if not failed else None
        failed.append(bad)
        return {row: attrs.evolve(step, finite=row != bad) for row, step in steps.items()}

    monkeypatch.setattr(Engine, "step", step)
    scheduler = scheduler_of(pair)
    first, second = run(scheduler, Client(tokens=9), Client(tokens=9))
    assert isinstance(first.updates[-1].error, NonFiniteError)
    assert len(second.ids) == 9


def test_whoever_waits_when_the_server_stops_is_told(pair):
    scheduler = scheduler_of(pair, slots=1)
    late = Client()
    first = Client(tokens=50, then=lambda _: scheduler.admission.close())
    for client in (first, late):
        admit(scheduler.admission, client)
    scheduler.run()
    assert first.updates[-1].error.status == late.updates[-1].error.status == 503


def test_requests_are_answered_between_the_steps_of_the_idle_gate(pair):
    progressed = []

    def gate(*, progress):
        late = Client(tokens=12)
        admit(scheduler.admission, late)
        progress("anything", 0, 1)
        progressed.append(late)
        scheduler.admission.close()
        return Standing(enabled=True, verdict="identical", reason=None)

    scheduler = scheduler_of(pair, full_gate=gate)
    scheduler.run()
    assert len(progressed[0].ids) == 12
    assert progressed[0].ended
    assert scheduler.standing.verdict == "identical"


def test_a_broken_verdict_leads_to_plain_decoding_at_width_1_after_one_warning(pair, caplog):
    client = Client(tokens=12)

    def gate(*, progress):
        admit(scheduler.admission, client)
        client.then = lambda it: it.ended and scheduler.admission.close()
        return Standing(enabled=False, verdict="broken", reason="position 7 differs")

    scheduler = scheduler_of(pair, full_gate=gate)
    with caplog.at_level(logging.INFO):
        scheduler.run()
    assert scheduler.engine.width == 1
    assert client.outcome.usage.draft_proposed == 0
    assert client.outcome.speculative == {
        "enabled": False,
        "reason": "position 7 differs",
        "draft_k": None,
        "policy": None,
        "accept_rule": None,
        "verdict": "broken",
    }
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["speculation is switched off: position 7 differs (`posttrainllm gate --fresh` looks again)"]


def test_a_gate_that_cannot_run_leaves_the_server_as_it_is(pair, caplog):
    def gate(*, progress):
        scheduler.admission.close()
        raise MemoryLimitError("not enough memory for the gate")

    scheduler = scheduler_of(pair, full_gate=gate)
    scheduler.run()
    assert scheduler.standing is NOT_GATED
    assert "not enough memory for the gate" in caplog.text


def test_a_gate_that_fails_in_its_own_way_leaves_the_server_as_it_is(pair, caplog):
    def gate(*, progress):
        admit(scheduler.admission, client)
        raise OSError("the disk is full")

    scheduler = scheduler_of(pair, full_gate=gate)
    client = Client(tokens=7, then=lambda it: it.ended and scheduler.admission.close())
    scheduler.run()
    assert len(client.ids) == 7
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), MemoryLimitError("no memory")])
def test_an_engine_that_fails_while_the_gate_is_under_way_is_no_failure_of_the_gate(pair, monkeypatch, error):
    def gate(*, progress):
        admit(scheduler.admission, client)
        progress("anything", 0, 1)
        raise AssertionError("it went on")

    def step(self):
        raise error

    monkeypatch.setattr(Engine, "step", step)
    scheduler, client = scheduler_of(pair, full_gate=gate), Client()
    with pytest.raises(type(error)):
        scheduler.run()
    assert client.updates[-1].error.status == 500


def test_a_gate_under_way_does_not_keep_the_server_from_stopping(pair):
    def gate(*, progress):
        scheduler.admission.close()
        progress("anything", 0, 1)
        raise AssertionError("it went on")

    scheduler = scheduler_of(pair, full_gate=gate)
    scheduler.run()


def test_a_trace_whose_file_cannot_be_closed_costs_a_warning_and_no_answer(pair, tmp_path, caplog, monkeypatch):
    real = TraceWriter.close

    def close(self):
        real(self)
        raise TraceError("quota exceeded")

    monkeypatch.setattr(TraceWriter, "close", close)
    (client,) = run(scheduler_of(pair, folder=tmp_path), Client(tokens=9))
    assert len(client.ids) == 9
    assert "quota exceeded" in caplog.text


def test_a_trace_that_cannot_be_written_costs_a_warning_and_no_answer(pair, tmp_path, caplog):
    (client,) = run(scheduler_of(pair, folder=tmp_path / "missing"), Client(tokens=9))
    assert len(client.ids) == 9
    assert "test is not recorded" in caplog.text
