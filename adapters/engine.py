"""The one host loop: prefill, insert, step, one read.

An engine has fixed shapes for life: B rows, capacity C, window W, prefill chunk P. Bits may differ when they differ,
so rows of different engines never share a step. MLX checks no index: every id, length and limit is checked here first.
"""

import time
from collections import deque
from collections.abc import Mapping

import attrs
import mlx.core as mx

from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.compiled import CompiledPair
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.occupancy import InFlight, Occupancy
from posttrainllm.adapters.prefill import PromptPrefill, check_request, prefill_chunk
from posttrainllm.adapters.prefix_cache import PrefixCache
from posttrainllm.adapters.rows import RowRequest, RowStep, needed_rules, smallest_mode, wanted_logprobs
from posttrainllm.kernel.cache import insert_request, insert_row
from posttrainllm.kernel.config import Mode, StepConfig
from posttrainllm.kernel.errors import CapacityError
from posttrainllm.kernel.state import DecodeState

__all__ = ["Engine"]

# A second step in flight hides the host's work behind the device's. It also shows every token one step later and is in
# vain at the end, so steps that are long beside the host's work (about 1 ms) go one at a time.
_PIPELINED_BELOW_S = 0.05


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
        prefix_bytes: what the chunks of earlier prompts may take, to be used again; None is `Forecast.spare`.

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
        prefix_bytes: int | None = 0,
    ) -> None:
        narrowest = 1 if pair.draft is None else 2
        if rows < 1 or width < narrowest or capacity < width + 2:
            raise CapacityError(
                f"engine: got {rows} rows, width {width}, capacity {capacity}, "
                f"expected 1 or more, {narrowest} or more, {width + 2} or more"
            )
        self.pair, self.rows, self.capacity, self.width = pair, rows, capacity, width
        self.steps = 0
        self.compiled = CompiledPair(pair, capacity=capacity, width=width, diagnostics=diagnostics)
        self.chunk = chunk or prefill_chunk(pair.runtime.device)
        self._depth = 0
        self._models = [pair.target] if pair.draft is None else [pair.target, pair.draft]
        self.forecast = Forecast(
            weights=tuple(model.weight_bytes for model in self._models),
            kv=tuple(model.kv_bytes(capacity) for model in self._models),
            rows=rows,
            capacity=capacity,
            copies=sum(
                rows * forwards * model.kv_bytes(capacity)
                for model, forwards in zip(self._models, (1, width - 1), strict=False)
                if model.copies_cache
            ),
        )
        if prefix_bytes is None:
            prefix_bytes = self.forecast.spare
        self.forecast = attrs.evolve(self.forecast, prefixes=prefix_bytes)
        self.forecast.check()
        self.prefixes = PrefixCache(limit=prefix_bytes, chunk=self.chunk) if prefix_bytes else None
        self.curves = curves
        self.occupancy = Occupancy(rows, pair.vocab_size, None if pair.draft is None else curves)
        self._in_flight: deque[InFlight] = deque()
        kv = [model.make_kv(rows, capacity) for model in self._models]
        self._state: DecodeState | None = DecodeState(
            tokens=mx.zeros((rows, capacity), dtype=mx.int32),
            length=mx.zeros((rows,), dtype=mx.int32),
            limit=mx.zeros((rows,), dtype=mx.int32),
            target_kv=kv[0],
            draft_kv=kv[1] if len(kv) > 1 else (),
            key=mx.zeros((rows, 2), dtype=mx.uint32),
        )

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
        check_request(request, self.pair, self.capacity)
        return PromptPrefill(
            request,
            self._models,
            self.compiled.prefill_for,
            capacity=self.capacity,
            chunk=self.chunk,
            prefixes=self.prefixes,
        )

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
        self.occupancy.enter(row, request)

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
        self.occupancy.leave(row)

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
        steps = self.occupancy.read(flight)
        self._depth = 1 if time.perf_counter() - started < _PIPELINED_BELOW_S else 0
        return steps

    def hand_over(self) -> DecodeState:
        """Give the state away, for whoever steps it; this engine cannot step any more, and keeps no prompt."""
        if self.prefixes is not None:
            self.prefixes.clear()
        state, self._state = self._take(), None
        return state

    def _launch(self) -> None:
        requests, pacer = self.occupancy.requests, self.occupancy.pacer
        draft_ks = tuple(0 if request is None else request.draft_k for request in requests)
        sampling, most = self.occupancy.sampling, self.width - 1
        if pacer is not None:
            draft_ks, behind = pacer.decide()
            most = max(draft_ks)
            sampling = attrs.evolve(sampling, draft_k=mx.array(draft_ks, dtype=mx.int32))
            state, self._state = self._take(), None
            self._state = self.compiled.caught_up(state, behind)
            del state
        # as far as it may have grown in the steps in flight and grows in this one
        longest = self.occupancy.longest + self.width * (len(self._in_flight) + 1)
        config = self.compiled.config_for(
            smallest_mode(requests),
            adjusted=any(request is not None and request.adjusted for request in requests),
            logprobs=bool(wanted_logprobs(requests)),
            rules=needed_rules(requests),
            live=self.compiled.live(longest),
            draft_k=most,
        )
        step = self.compiled.step_for(config)
        # nothing may hold the old state while the new one is evaluated, or its buffers are copied
        state, self._state = self._take(), None
        self._state, output = step(state, sampling)
        del state
        mx.async_eval(self._state.to_tree(), output.to_tree())  # type: ignore[no-untyped-call] # as MLX declares it
        self._in_flight.append(
            InFlight(
                epochs=self.occupancy.epochs, config=config, keys=self._state.key, output=output, draft_ks=draft_ks
            )
        )

    def rehearse(self, config: StepConfig, *, plain: bool = False) -> None:
        """Run one step of a configuration while every row is idle, and wait for it: to compile it, or to clock it.

        Args:
            config: static shape; W may be another than the engine's.
            plain: whether to leave the draft out.
        """
        assert not any(self.occupancy.requests), "a step would move the rows that are not idle"
        step = self.compiled.step_for(config, plain=plain)
        state, self._state = self._take(), None
        self._state, output = step(state, self.occupancy.sampling)
        del state
        mx.eval(self._state.to_tree(), output.to_tree())

    def warm_up(self, *, coupled: bool = False) -> None:
        """Compile the steps of every K that may be chosen, as short rows of one accept rule take them, and the way back
        to the draft, while every row is idle.
        """
        for mode, curve in (self.curves or {}).items():
            for draft_k in curve.draft_ks:
                self.rehearse(self.compiled.usual_config(mode, 1, coupled=coupled, draft_k=draft_k))
        if self.occupancy.pacer is not None:
            state, self._state = self._take(), None
            self._state = self.compiled.caught_up(state, [1] * self.rows)
            del state
            mx.eval(self._state.to_tree())

    def _take(self) -> DecodeState:
        assert self._state is not None, "a step failed and took the state with it"
        return self._state

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise CapacityError(f"row: got {row}, expected 0 to {self.rows - 1}")
