import attrs
import mlx.core as mx
import pytest
from support import decode, tiny_pair, without_draft

from posttrainllm.adapters import engine as engine_module
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.kernel.errors import CapacityError, UsageError

PROMPT = [4, 5, 6, 7]


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(draft="noisy", context=20000)


@pytest.fixture(params=[0.0, 1e9], ids=["one step in flight", "two steps in flight"])
def pipelined(request, monkeypatch):
    monkeypatch.setattr(engine_module, "_PIPELINED_BELOW_S", request.param)


def collect(engine, row, count):
    ids = []
    while len(ids) < count:
        ids += engine.step()[row].tokens
    return ids


def test_the_number_of_steps_in_flight_changes_no_id(pair, monkeypatch):
    texts = []
    for bound in (0.0, 1e9):
        monkeypatch.setattr(engine_module, "_PIPELINED_BELOW_S", bound)
        texts.append(decode(pair, [PROMPT, [9] * 30], width=5, count=60, temperature=1.0))
    assert texts[0] == texts[1]


def test_a_request_inserted_while_steps_are_in_flight_starts_clean_and_disturbs_nobody(pair, pipelined):
    engine = Engine(pair, rows=2, capacity=256, width=5)
    engine.insert(0, RowRequest(prompt=PROMPT, limit=84, draft_k=4))
    engine.insert(1, RowRequest(prompt=[20] * 9, limit=200, draft_k=4))
    ids = collect(engine, 0, 20)
    engine.insert(1, RowRequest(prompt=[30, 31], limit=42, draft_k=4))
    second = []
    while len(ids) < 80 or len(second) < 40:
        for row, step in engine.step().items():
            (ids, second)[row].extend(step.tokens)
    alone = decode(pair, [PROMPT, [30, 31]], width=5, count=80)
    assert ids == alone[0]
    assert second == alone[1][:40]


def test_a_released_row_reports_nothing_more(pair, pipelined):
    engine = Engine(pair, rows=2, capacity=256, width=3)
    for row in (0, 1):
        engine.insert(row, RowRequest(prompt=PROMPT, limit=200, draft_k=2))
    engine.step()
    engine.release(0)
    assert set(engine.step()) == {1}
    assert set(engine.step()) == {1}


def test_a_request_that_is_refused_leaves_the_other_rows_decoding(pair, pipelined):
    engine = Engine(pair, rows=2, capacity=256, width=5)
    engine.insert(0, RowRequest(prompt=PROMPT, limit=64, draft_k=4))
    ids = collect(engine, 0, 8)
    for error, request in (
        (UsageError, RowRequest(prompt=[1], limit=9, seed=-1)),
        (CapacityError, RowRequest(prompt=[10**9], limit=9)),
        (CapacityError, RowRequest(prompt=[1], limit=256)),
        (CapacityError, RowRequest(prompt=[1, 2], limit=2)),
        (CapacityError, RowRequest(prompt=[], limit=2)),
    ):
        with pytest.raises(error):
            engine.insert(1, request)
    ids += collect(engine, 0, 60 - len(ids))
    assert ids == decode(pair, [PROMPT], width=5, count=60)[0]


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_does_not_exist_is_refused(pair, row):
    engine = Engine(pair, rows=2, capacity=256, width=5)
    with pytest.raises(CapacityError, match=f"row: got {row}, expected 0 to 1"):
        engine.insert(row, RowRequest(prompt=PROMPT, limit=20))
    with pytest.raises(CapacityError, match=f"row: got {row}, expected 0 to 1"):
        engine.release(row)


@pytest.mark.parametrize("shape", [{"rows": 0}, {"width": 1}, {"capacity": 4}])
def test_shapes_that_make_no_engine_are_refused(pair, shape):
    with pytest.raises(CapacityError, match="engine: got"):
        Engine(pair, **{"rows": 1, "width": 5, "capacity": 256, **shape})


def counting_traces(model):
    """The model, and a list that grows when its forward is traced."""
    traces, forward = [], model.forward

    def counting(tokens, kv, position):
        traces.append(tokens.shape)
        return forward(tokens, kv, position)

    return attrs.evolve(model, forward=counting), traces


def test_a_second_request_on_the_same_pair_traces_nothing(pair):
    plain = without_draft(pair)
    target, traces = counting_traces(plain.target)
    counted = attrs.evolve(plain, target=target)
    for _ in range(2):
        decode(counted, [PROMPT], width=1, count=6)
    assert len(traces) == 2  # one for the prefill, one for the step


def test_a_second_request_with_a_draft_traces_nothing(pair):
    target, of_target = counting_traces(pair.target)
    draft, of_draft = counting_traces(pair.draft)
    counted = attrs.evolve(pair, target=target, draft=draft)
    decode(counted, [PROMPT], width=5, count=40)
    traced = len(of_target), len(of_draft)
    assert min(traced) > 0
    decode(counted, [PROMPT[:-1]], width=5, count=60)
    assert (len(of_target), len(of_draft)) == traced


def test_the_capacity_holds_the_window_and_the_scratch_slot():
    assert capacity_for(251, 5) == 256
    assert capacity_for(252, 5) == 512


def test_the_engine_does_not_copy_the_cache(pair, pipelined):
    """A reference to the old state, wherever it hides, would copy the whole cache at every step."""
    engine = Engine(pair, capacity=16384, width=3)
    engine.insert(0, RowRequest(prompt=PROMPT, limit=16000, draft_k=2))
    # measured from a state that nothing has stepped yet: a reference kept by the first step counts as growth
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(4):
        engine.step()
    kv_bytes = sum(
        array.nbytes for model in (pair.target, pair.draft) for layer in model.make_kv(1, 16384) for array in layer
    )
    assert mx.get_peak_memory() - before < 0.6 * kv_bytes


def test_the_forecast_counts_the_caches_that_a_step_copies():
    pair = tiny_pair()
    copying = attrs.evolve(
        pair,
        target=attrs.evolve(pair.target, copies_cache=True),
        draft=attrs.evolve(pair.draft, copies_cache=True),
    )
    plain = Engine(pair, capacity=64, width=5, rows=2).forecast
    forecast = Engine(copying, capacity=64, width=5, rows=2).forecast
    # of each row the target's once, the draft's in each of its four forwards
    copies = 2 * (pair.target.kv_bytes(64) + 4 * pair.draft.kv_bytes(64))
    assert forecast.caches == plain.caches + copies
    assert "copies that a step makes" in forecast.description
    assert "copies" not in plain.description
