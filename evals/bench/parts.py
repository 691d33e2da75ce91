"""Where the time of a step goes, found by leaving parts out, beside what the memory allows."""

import statistics
import time
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.rows import RowRequest, sampling_of
from posttrainllm.adapters.shapes import draft_width
from posttrainllm.evals.bench.costs import Chain
from posttrainllm.evals.bench.machine import CpuWatch
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import DecodeState, KVCache, StepOutput

__all__ = ["Parts", "measure_parts"]

_STEPS = 8  # launched in a row, as the engine does on a GPU
_COLUMNS = 4096
_COPY_BYTES = {"cpu": 2**28, "gpu": 2**31}


@attrs.frozen(kw_only=True)
class Parts:
    """Seconds of a greedy step of one row and of its parts at one capacity, medians."""

    capacity: int
    step: float
    """The compiled step, launched again and again."""
    engine_step: float
    """The same as the engine runs it, read on the host each time."""
    plain_step: float
    """A step without a draft at width K + 1, launched again and again."""
    call: float
    """Python and MLX until the step's graph is there; nothing is computed yet."""
    launch: float
    """The same and until it is launched. On a CPU MLX waits in there while the first operations run."""
    plain: float
    """The target's forward at width 1."""
    verify: float
    """At width K + 1."""
    draft: float
    """The draft's K forwards in one graph, each fed what the last one found likeliest."""


def measure_parts(
    pair: Pair, draft_k: int, capacities: Sequence[int], *, length: int, samples: int = 9
) -> tuple[list[Parts], float, float | None]:
    """Time a step and its parts, all capacities in turn.

    Args:
        pair: with a draft.
        draft_k: K.
        capacities: C of each; the cache is as large as that, the text is short.
        length: ids of the text.
        samples: of each; medians are taken.

    Returns:
        The parts by capacity, the most bytes a second that the memory delivered, and the share of the CPUs that others
        used meanwhile.
    """
    assert pair.draft is not None
    watch = CpuWatch()
    drafting = attrs.evolve(
        pair.draft, forward=_drafting(pair.draft.forward, draft_k, draft_width(pair.runtime.device))
    )
    timed: dict[tuple[int, str], Callable[[], float]] = {}
    for capacity in capacities:
        forwards = {
            "plain": (pair.target, 1),
            "verify": (pair.target, draft_k + 1),
            "draft": (drafting, 2),
        }
        for name, (model, width) in forwards.items():
            timed[capacity, name] = Chain(model, width, capacity, length).run
        steps, plain_steps = (_Steps(of, draft_k, capacity, length) for of in (pair, pair.plain("a part of the step")))
        timed |= {(capacity, "step"): steps.chained, (capacity, "plain_step"): plain_steps.chained}
        timed |= {(capacity, "call"): steps.called, (capacity, "launch"): steps.launched}
        timed[capacity, "engine_step"] = _EngineSteps(pair, draft_k, capacity, length).run
    found: dict[tuple[int, str], list[float]] = {key: [] for key in timed}
    memory, rates = _Memory(pair.runtime.device), []
    for _ in range(samples):
        for key, run in timed.items():
            found[key].append(run())
        rates.append(memory.rate())
    medians = {key: statistics.median(times) for key, times in found.items()}
    parts = [
        Parts(capacity=capacity, **{name: value for (of, name), value in medians.items() if of == capacity})
        for capacity in capacities
    ]
    return parts, max(rates), watch.others()


def _drafting(forward: Forward, draft_k: int, later: int) -> Forward:
    """K forwards, the first of width 2, as a step makes them and without whatever it does besides."""

    def run(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        logits, kv = forward(tokens, kv, position)
        last = tokens[:, -1:]
        for index in range(1, draft_k):
            drawn = mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32)  # [B, 1]
            window = drawn if later == 1 else mx.concatenate([last, drawn], axis=1)
            logits, kv = forward(window, kv, position + 2 + index - later)
            last = drawn
        return logits, kv

    return run


def _engine(pair: Pair, draft_k: int, capacity: int, length: int) -> Engine:
    """One whose row soon stops, which makes a step no cheaper: it stays as short as the step is for."""
    engine = Engine(pair, capacity=capacity, width=draft_k + 1)
    engine.insert(0, _request(pair, draft_k, length))
    return engine


def _request(pair: Pair, draft_k: int, length: int) -> RowRequest:
    limit = length + draft_k + 1
    return RowRequest(prompt=[1] * length, limit=limit, draft_k=0 if pair.draft is None else draft_k)


class _Steps:
    """The compiled step alone, on a state of its own."""

    def __init__(self, pair: Pair, draft_k: int, capacity: int, length: int) -> None:
        engine = _engine(pair, draft_k, capacity, length)
        self._step = engine.compiled.step_for(engine.compiled.usual_config("greedy", length + 3 * engine.width))
        self._sampling = sampling_of([_request(pair, draft_k, length)], pair.vocab_size)
        self._state: DecodeState | None = engine.hand_over()
        self.chained()  # compiles

    def chained(self) -> float:
        """Seconds a step, several launched in a row."""
        started = time.perf_counter()
        for _ in range(_STEPS):
            self._launch()
        self._wait()
        return (time.perf_counter() - started) / _STEPS

    def called(self) -> float:
        """Seconds until one's graph is there."""
        return self._timed(self._call)

    def launched(self) -> float:
        """Seconds until one is launched, from a device that has nothing to do."""
        return self._timed(self._launch)

    def _timed(self, part: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        part()
        elapsed = time.perf_counter() - started
        self._wait()
        return elapsed

    def _launch(self) -> None:
        output = self._call()
        assert self._state is not None
        mx.async_eval(self._state.to_tree(), output.to_tree())  # type: ignore[no-untyped-call] # as MLX declares it

    def _call(self) -> StepOutput:
        state, self._state = self._state, None  # nothing may hold it, or it is copied
        assert state is not None, "a step failed and took the state with it"
        self._state, output = self._step(state, self._sampling)
        return output

    def _wait(self) -> None:
        if self._state is not None:
            mx.eval(self._state.to_tree())


class _EngineSteps:
    """Steps as a request gets them."""

    def __init__(self, pair: Pair, draft_k: int, capacity: int, length: int) -> None:
        self._engine = _engine(pair, draft_k, capacity, length)
        self.run()

    def run(self) -> float:
        """Seconds a step."""
        self._engine.step()
        started = time.perf_counter()
        for _ in range(_STEPS):
            self._engine.step()
        return (time.perf_counter() - started) / _STEPS


class _Memory:
    """What the memory delivers: the faster of a large copy and a product that reads a large matrix once."""

    def __init__(self, device: str) -> None:
        size = _COPY_BYTES[device]
        self._matrix = mx.ones((size // 4 // _COLUMNS, _COLUMNS), dtype=mx.float32)
        self._row = mx.ones((1, _COLUMNS), dtype=mx.float32)
        mx.eval(self._matrix, self._row)
        self.rate()  # the memory of the results is mapped

    def rate(self) -> float:
        """Bytes a second, read and written."""
        moved = self._matrix.nbytes
        return max(2 * moved / _seconds(self._matrix + 1.0), moved / _seconds(self._row @ self._matrix.T))


def _seconds(lazy: mx.array) -> float:
    started = time.perf_counter()
    mx.eval(lazy)
    return time.perf_counter() - started
