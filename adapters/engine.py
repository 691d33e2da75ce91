"""The one host loop: prefill, insert, step, one read.

An engine has fixed shapes for life: B rows, capacity C, window W, prefill chunk P. Bits may differ when they differ,
so rows of different engines never share a step. MLX checks no index: every id, length and limit is checked here first.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx

from posttrainllm.adapters.adaptive import Curve, Pacer
from posttrainllm.adapters.checks import check_ids
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.prefill import PromptPrefill, prefill_chunk
from posttrainllm.adapters.rows import (
    RowPlace,
    RowRequest,
    RowStep,
    needed_rules,
    read_rows,
    sampling_of,
    smallest_mode,
    wanted_logprobs,
)
from posttrainllm.kernel.cache import insert_request, insert_row
from posttrainllm.kernel.config import Mode, Rules, StepConfig
from posttrainllm.kernel.draft import CATCH_UP_WIDTH, Draft
from posttrainllm.kernel.errors import CapacityError
from posttrainllm.kernel.forward import BoundedForward, Forward, bounded
from posttrainllm.kernel.pure_step import CatchUp, Prefill, Step, compile_catch_up, compile_prefill, compile_step
from posttrainllm.kernel.state import DecodeState, StepOutput

__all__ = ["Engine", "capacity_for", "draft_width", "live_slots"]

# A second step in flight hides the host's work behind the device's. It also shows every token one step later and is in
# vain at the end, so steps that are long beside the host's work (about 1 ms) go one at a time.
_PIPELINED_BELOW_S = 0.05
_BUCKET = 256  # one capacity for many prompts: every capacity is a trace of its own


def capacity_for(length: int, width: int) -> int:
    """Cache slots for a row that grows to `length`: a multiple of 256 that also holds a window and the scratch slot."""
    return -(-(length + width) // _BUCKET) * _BUCKET


def live_slots(length: int, capacity: int) -> int | None:
    """Slots that a step has to look at: 256 times the least power of two that holds `length`; None for all C of them.

    Few buckets, since each is a trace of its own.
    """
    live = _BUCKET
    while live < length:
        live *= 2
    return live if live < capacity else None


def draft_width(device: str) -> int:
    """Tokens that the draft is fed a forward, after its first: a row costs time on a CPU, and hardly any on a GPU."""
    return 1 if device == "cpu" else 2


@attrs.frozen(eq=False, kw_only=True)
class _InFlight:
    """A step that was launched and not read."""

    epochs: tuple[int, ...]
    config: StepConfig
    keys: mx.array
    output: StepOutput
    draft_ks: tuple[int, ...]
    """How many ids the draft may propose to each row."""


class Engine:
    """B rows of one pair, stepped together.

    Args:
        pair: the models. With a draft, `width` - 1 tokens are proposed a step; without one, the step is plain.
        rows: B.
        capacity: C; a row may grow to C - 1.
        width: W.
        diagnostics: whether steps report logit margins.
        chunk: P; None takes the device's own.
        curves: what steps cost, by mode; with them every row's K is chosen step by step, W - 1 at most.

    Raises:
        CapacityError: the shapes make no engine.
        MemoryLimitError: the caches cannot fit; said before they are allocated.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        capacity: int,
        width: int,
        rows: int = 1,
        diagnostics: bool = False,
        chunk: int | None = None,
        curves: Mapping[Mode, Curve] | None = None,
    ) -> None:
        narrowest = 1 if pair.draft is None else 2
        if rows < 1 or width < narrowest or capacity < width + 2:
            raise CapacityError(
                f"engine: got {rows} rows, width {width}, capacity {capacity}, "
                f"expected 1 or more, {narrowest} or more, {width + 2} or more"
            )
        self.pair, self.rows, self.capacity, self.width = pair, rows, capacity, width
        self._vocab_size = pair.vocab_size
        self.steps = 0
        self._compiled = pair.runtime.compiled
        self.diagnostics = diagnostics
        self.chunk = chunk or prefill_chunk(pair.runtime.device)
        self._depth = 0
        self._bounded = isinstance(pair.target.forward, BoundedForward)
        self._models = [pair.target] if pair.draft is None else [pair.target, pair.draft]
        self.forecast = Forecast(
            weights=tuple(model.weight_bytes for model in self._models),
            kv=tuple(model.kv_bytes(capacity) for model in self._models),
            rows=rows,
            capacity=capacity,
        )
        self.forecast.check()
        self._requests: list[RowRequest | None] = [None] * rows
        self._epochs = [0] * rows
        self._places: dict[int, RowPlace] = {}
        self.curves = curves
        self._pacer = None if curves is None or pair.draft is None else Pacer(rows, curves)
        self._in_flight: deque[_InFlight] = deque()
        kv = [model.make_kv(rows, capacity) for model in self._models]
        self._state: DecodeState | None = DecodeState(
            tokens=mx.zeros((rows, capacity), dtype=mx.int32),
            length=mx.zeros((rows,), dtype=mx.int32),
            limit=mx.zeros((rows,), dtype=mx.int32),
            target_kv=kv[0],
            draft_kv=kv[1] if len(kv) > 1 else (),
            key=mx.zeros((rows, 2), dtype=mx.uint32),
        )
        self._sampling = sampling_of(self._requests, self._vocab_size)

    def insert(self, row: int, request: RowRequest) -> None:
        """Prefill a prompt and put it in a row, whose old contents are overwritten whole.

        Args:
            row: 0 <= row < B.
            request: the prompt and how to sample.

        Raises:
            CapacityError: an id, the prompt or the limit does not fit.
            UsageError: the seed is out of range.
        """
        prefill = self.prefill(request)
        while not prefill.done:
            prefill.advance()
        self.place(row, prefill)

    def prefill(self, request: RowRequest) -> PromptPrefill:
        """Begin with a prompt; its chunks are written by `advance()`, between any steps of the rows.

        Args:
            request: the prompt and how to sample.

        Returns:
            What `place` takes once it is done; each one holds the caches of a row.

        Raises:
            CapacityError: an id, the prompt or the limit does not fit.
        """
        self._check(request)
        return PromptPrefill(request, self._models, self._prefill_for, capacity=self.capacity, chunk=self.chunk)

    def place(self, row: int, prefill: PromptPrefill) -> None:
        """Put a prefilled prompt in a row, whose old contents are overwritten whole.

        Args:
            row: 0 <= row < B.
            prefill: done, and of this engine.

        Raises:
            CapacityError: there is no such row.
            UsageError: the seed is out of range.
        """
        self._check_row(row)
        prefilled, request = prefill.state(), prefill.request
        # from here on nothing may fail: the other rows live in this state
        state, self._state = self._take(), None
        self._state = insert_request(state, prefilled, row)
        del state, prefilled
        mx.eval(self._state.to_tree())
        self._requests[row] = request
        self._places[row] = RowPlace(length=len(request.prompt), last=int(request.prompt[-1]))
        self._epochs[row] += 1
        self._sampling = sampling_of(self._requests, self._vocab_size)
        if self._pacer is not None:
            self._pacer.enter(row, request.mode, request.draft_k)

    def release(self, row: int) -> None:
        """Make a row idle; a step in flight for it is forgotten.

        Args:
            row: 0 <= row < B.

        Raises:
            CapacityError: there is no such row.
        """
        self._check_row(row)
        state = self._take()
        limit = insert_row(state.limit, mx.zeros((1,), dtype=mx.int32), row)
        self._state = attrs.evolve(state, limit=limit)
        self._requests[row] = None
        self._epochs[row] += 1
        self._sampling = sampling_of(self._requests, self._vocab_size)
        if self._pacer is not None:
            self._pacer.leave(row)

    def step(self) -> dict[int, RowStep]:
        """Run one step for all rows and read it.

        Returns:
            What each occupied row emitted, by row; a row at its limit emits nothing more.
        """
        started = time.perf_counter()
        while len(self._in_flight) <= self._depth:
            self._launch()
        flight = self._in_flight.popleft()
        self.steps += 1
        current = {
            row: self._places[row]
            for row in range(self.rows)
            if self._requests[row] is not None and flight.epochs[row] == self._epochs[row]
        }
        steps = read_rows(
            flight.output,
            flight.keys,
            current,
            flight.config,
            wanted_logprobs(self._requests),
            draft_ks=flight.draft_ks,
        )
        if self._pacer is not None:
            for row, step in steps.items():
                self._pacer.read(row, step.draft_k, proposed=step.proposed, accepted=step.accepted)
        self._depth = 1 if time.perf_counter() - started < _PIPELINED_BELOW_S else 0
        self._places |= {row: place.after(steps[row]) for row, place in current.items()}
        return steps

    def hand_over(self) -> DecodeState:
        """Give the state away, for whoever steps it; this engine cannot step any more."""
        state, self._state = self._take(), None
        return state

    def _launch(self) -> None:
        draft_ks = tuple(0 if request is None else request.draft_k for request in self._requests)
        sampling, most = self._sampling, self.width - 1
        if self._pacer is not None:
            draft_ks, behind = self._pacer.decide()
            most = max(draft_ks)
            sampling = attrs.evolve(sampling, draft_k=mx.array(draft_ks, dtype=mx.int32))
            state, self._state = self._take(), None
            self._state = self.caught_up(state, behind)
            del state
        config = self.config_for(
            smallest_mode(self._requests),
            adjusted=any(request is not None and request.adjusted for request in self._requests),
            logprobs=bool(wanted_logprobs(self._requests)),
            rules=needed_rules(self._requests),
            live=self._live(),
            draft_k=most,
        )
        step = self.step_for(config)
        # nothing may hold the old state while the new one is evaluated, or its buffers are copied
        state, self._state = self._take(), None
        self._state, output = step(state, sampling)
        del state
        mx.async_eval(self._state.to_tree(), output.to_tree())  # type: ignore[no-untyped-call] # as MLX declares it
        self._in_flight.append(
            _InFlight(epochs=tuple(self._epochs), config=config, keys=self._state.key, output=output, draft_ks=draft_ks)
        )

    def caught_up(self, state: DecodeState, behind: Sequence[int]) -> DecodeState:
        """The state with the draft's cache of every row as far as a step that drafts needs it.

        Args:
            state: B rows.
            behind: how many ids each row's draft has not been fed, 0 for a row that is to stay as it is.

        Returns:
            The same state where none is behind.
        """
        catch_up: CatchUp | None = None
        for done in range(0, max(behind), CATCH_UP_WIDTH):
            if catch_up is None:
                catch_up = self._catch_up_for()
            left = mx.array([max(count - done, 0) for count in behind], dtype=mx.int32)
            state = catch_up(state, left)
        return state

    def rehearse(self, config: StepConfig, *, plain: bool = False) -> None:
        """Run one step of a configuration while every row is idle, and wait for it: to compile it, or to clock it.

        Args:
            config: static shape; W may be another than the engine's.
            plain: whether to leave the draft out.
        """
        assert not any(self._requests), "a step would move the rows that are not idle"
        step = self.step_for(config, plain=plain)
        state, self._state = self._take(), None
        self._state, output = step(state, self._sampling)
        del state
        mx.eval(self._state.to_tree(), output.to_tree())

    def usual_config(self, mode: Mode, length: int, *, coupled: bool = False, draft_k: int | None = None) -> StepConfig:
        """What most steps of a mode are: rows of one accept rule, which have grown to a length."""
        rules: Rules = "coupled" if coupled else "leviathan"
        return self.config_for(
            mode,
            rules="both" if mode == "greedy" else rules,
            live=live_slots(length, self.capacity) if self._bounded else None,
            draft_k=draft_k,
        )

    def warm_up(self, *, coupled: bool = False) -> None:
        """Compile the steps of every K that may be chosen, as short rows of one accept rule take them, and the way back
        to the draft, while every row is idle.
        """
        for mode, curve in (self.curves or {}).items():
            for draft_k in curve.draft_ks:
                self.rehearse(self.usual_config(mode, 1, coupled=coupled, draft_k=draft_k))
        if self._pacer is not None:
            state, self._state = self._take(), None
            self._state = self.caught_up(state, [1] * self.rows)
            del state
            mx.eval(self._state.to_tree())

    def config_for(
        self,
        mode: Mode,
        *,
        adjusted: bool = False,
        logprobs: bool = False,
        rules: Rules = "both",
        live: int | None = None,
        draft_k: int | None = None,
    ) -> StepConfig:
        """Static shape of this engine's steps in a mode; `draft_k` is None, or how many ids the draft draws."""
        return StepConfig(
            draft_k=None if draft_k == self.width - 1 else draft_k,
            width=self.width,
            vocab_size=self._vocab_size,
            mode=mode,
            rules=rules,
            live=live,
            narrow_draft=draft_width(self.pair.runtime.device) == 1,
            arithmetic_exp=self.pair.runtime.scalar_exp,
            diagnostics=self.diagnostics,
            adjusted=adjusted,
            logprobs=logprobs,
        )

    def _live(self) -> int | None:
        """The bucket of the longest row, as far as it may have grown in the steps in flight and grows in the next."""
        if not self._bounded:
            return None
        lengths = [place.length for row, place in self._places.items() if self._requests[row] is not None]
        return live_slots(max(lengths, default=0) + self.width * (len(self._in_flight) + 1), self.capacity)

    def step_for(self, config: StepConfig, *, plain: bool = False) -> Step:
        """The compiled step of a configuration, on this engine's models, or on its target alone."""
        target, draft = self.models
        draft = None if plain else draft
        return self.pair.once(
            ("step", config, draft is None, self._compiled),
            lambda: compile_step(config, target, draft, compiled=self._compiled),
        )

    def _catch_up_for(self) -> CatchUp:
        draft = self.models[1]
        assert draft is not None, "without a draft nothing is paced"
        return self.pair.once(("catch up", self._compiled), lambda: compile_catch_up(draft, compiled=self._compiled))

    @property
    def models(self) -> tuple[Forward, Draft | None]:
        """The target's forward and the draft, as the kernel takes them."""
        model = self.pair.draft
        if model is None:
            return self.pair.target.forward, None
        draft = Draft(forward=model.forward, vocab_size=model.vocab_size, context=model.context)
        return self.pair.target.forward, draft

    def _prefill_for(self, index: int, length: int) -> Prefill:
        live = live_slots(length, self.capacity)
        forward = bounded(self._models[index].forward, live)
        live = live if forward is not self._models[index].forward else None
        return self.pair.once(
            ("prefill", index, live, self._compiled), lambda: compile_prefill(forward, compiled=self._compiled)
        )

    def _take(self) -> DecodeState:
        assert self._state is not None, "a step failed and took the state with it"
        return self._state

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise CapacityError(f"row: got {row}, expected 0 to {self.rows - 1}")

    def _check(self, request: RowRequest) -> None:
        if not request.prompt:
            raise CapacityError("prompt: got no token, expected 1 or more")
        check_ids("prompt", request.prompt, self.pair.target.vocab_size)
        check_ids("logit-bias", [index for index, _ in request.logit_bias], self._vocab_size)
        most = min(self.capacity - 1, self.pair.target.context)
        if not len(request.prompt) < request.limit <= most:
            raise CapacityError(
                f"limit: got {request.limit} for a prompt of {len(request.prompt)} tokens, "
                f"expected {len(request.prompt) + 1} to {most}"
            )
