"""A recorded run on this machine: put at any step, moved on step by step, laid open where it stands.

Before the first step the prompt goes through the engine's own prefill. To stand at step N the caches are then refilled:
every step before it is repeated at its recorded width and position with its recorded proposals, so that every entry
gets the bits it had. Steps are run by the engine's own compiled functions. Where K was chosen from step to step the
recorded ones are run, and beside them they are chosen again from the trace's costs and steps.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from posttrainllm.adapters.adaptive import Pacer, curve_mode
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.replay.trace import StepRecord, Trace
from posttrainllm.adapters.rows import RowPlace, RowRequest, RowStep, read_rows, sampling_of
from posttrainllm.kernel.compiled import Refill, compile_refill
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.errors import TraceError
from posttrainllm.kernel.explain import Explanation, explain_step
from posttrainllm.kernel.noise import root_key
from posttrainllm.kernel.state import DecodeState, Sampling

__all__ = ["Replayer"]


class Replayer:
    """One row of a run, standing before a step.

    Args:
        pair: the trace's models.
        trace: what was recorded.
        compiled: False runs prefill, refill and steps operation by operation.

    Raises:
        CapacityError: the trace's shapes or ids do not fit the models.
        MemoryLimitError: the caches cannot fit.
        TraceError: the key is not the seed's.
    """

    def __init__(self, pair: Pair, trace: Trace, *, compiled: bool = True) -> None:
        header = trace.header
        if compiled != pair.runtime.compiled:
            pair = attrs.evolve(pair, runtime=attrs.evolve(pair.runtime, compiled=compiled))
        self._pair, self._trace, self._header, self._compiled = pair, trace, header, compiled
        self._request = RowRequest(
            **{name: getattr(header, name) for name in ("prompt", "limit", "seed", "draft_k")},
            **{name: getattr(header, name) for name in ("temperature", "top_k", "top_p", "min_p", "logit_bias")},
            **{name: getattr(header, name) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
            coupled=header.accept_rule == "coupled",
        )
        key = tuple(np.array(root_key(header.seed)).tolist())
        if key != header.key:
            raise TraceError(
                f"{trace.path}: line 1: key: got {list(header.key)}, expected {list(key)}, that of seed {header.seed}"
            )
        self._engine = self._new_engine()  # first: it refuses shapes that no memory holds
        rows = [self._request if row == header.row else None for row in range(header.rows)]
        self._sampling = sampling_of(rows, pair.vocab_size)
        self._state: DecodeState | None = None
        self._pacer, self._behind = self._new_pacer(), 0
        self._place = RowPlace(length=len(header.prompt), last=header.prompt[-1])

    @property
    def place(self) -> RowPlace:
        """Where the row stands."""
        return self._place

    @property
    def state(self) -> DecodeState:
        """The state before the next step; whoever keeps it makes that step copy the caches."""
        assert self._state is not None, "seek() comes first"
        return self._state

    def seek(self, step: int) -> None:
        """Stand before a step, whatever was run before.

        Args:
            step: 0 to the number of recorded steps.

        Raises:
            CapacityError: the prompt does not fit the models.
            TraceError: a step before it contradicts the one before that, or names an id that the models lack.
        """
        self._check_history(self._trace.steps[:step])
        self._state = None  # freed before the new one is made
        engine = self._new_engine()
        engine.insert(self._header.row, self._request)
        self._state = engine.hand_over()
        self._place = RowPlace(length=len(self._header.prompt), last=self._header.prompt[-1])
        self._pacer, self._behind = self._new_pacer(), 0
        for record in self._trace.steps[:step]:
            self._refill(record)

    def run(self, record: StepRecord) -> RowStep:
        """Run the step it stands before.

        Args:
            record: names the step's configuration; nothing else of it is read.

        Returns:
            What the step did here.
        """
        config = self._config(record)
        chosen = self._decide(record)
        self._catch_up(record)
        keys = self.state.key
        sampling = self._sampling_of(record)
        # nothing may hold the old state while the new one is evaluated, or its buffers are copied
        state, self._state = self.state, None
        self._state, output = self._engine.compiled.step_for(config)(state, sampling)
        del state
        mx.eval(self._state.to_tree(), output.to_tree())
        draft_ks = [chosen] * self._header.rows
        places = {self._header.row: self._place}
        step = read_rows(output, keys, places, config, draft_ks=draft_ks)[self._header.row]
        self._place = self._place.after(step)
        self._read(record, proposed=step.proposed, accepted=step.accepted)
        return step

    def explain(self, record: StepRecord, window: Sequence[int]) -> dict[str, Any]:
        """Lay the step open that it stands before, with the proposals of a run of it.

        It is computed operation by operation: a graph of its own would be compiled for one use.

        Args:
            record: names the step's configuration.
            window: W ids, what the target was fed.

        Returns:
            The fields of `Explanation` for this row, as numbers and lists.
        """
        target, draft = self._engine.compiled.models
        windows = self._rows_of(window)
        state = self._engine.compiled.caught_up(self.state, self._behind_of(record))
        explanation = explain_step(self._config(record), target, draft, state, self._sampling_of(record), windows)
        mx.eval([getattr(explanation, field.name) for field in attrs.fields(Explanation)])
        return {
            field.name: np.array(getattr(explanation, field.name))[self._header.row].tolist()
            for field in attrs.fields(Explanation)
        }

    def _new_engine(self) -> Engine:
        header = self._header
        return Engine(
            self._pair,
            capacity=header.capacity,
            width=header.width,
            rows=header.rows,
            diagnostics=header.diagnostics,
            chunk=header.chunk,
        )

    def _config(self, record: StepRecord) -> StepConfig:
        config = self._engine.compiled.config_for(record.mode, adjusted=self._request.adjusted, draft_k=record.drawn)
        return attrs.evolve(config, narrow_draft=record.narrow_draft)

    def _new_pacer(self) -> Pacer | None:
        header = self._header
        if header.auto is None:
            return None
        pacer = Pacer(1, {curve_mode(self._request.mode): header.auto})
        pacer.enter(0, self._request.mode, header.draft_k)
        return pacer

    def _decide(self, record: StepRecord) -> int:
        """The K that is chosen here for the next step; the recorded one where nothing is chosen."""
        return record.draft_k if self._pacer is None else self._pacer.decide()[0][0]

    def _catch_up(self, record: StepRecord) -> None:
        """Feed the draft what steps without it left out, where the step drafts."""
        if self._pacer is None:
            return
        state, self._state = self.state, None
        self._state = self._engine.compiled.caught_up(state, self._behind_of(record))
        del state
        self._behind = 0 if record.draft_k else self._behind + 1

    def _behind_of(self, record: StepRecord) -> list[int]:
        here = self._behind if record.draft_k > 0 else 0
        return [here * (row == self._header.row) for row in range(self._header.rows)]

    def _sampling_of(self, record: StepRecord) -> Sampling:
        """The request's, with this step's K."""
        draft_ks = [record.draft_k * (row == self._header.row) for row in range(self._header.rows)]
        return attrs.evolve(self._sampling, draft_k=mx.array(draft_ks, dtype=mx.int32))

    def _read(self, record: StepRecord, *, proposed: int, accepted: int) -> None:
        if self._pacer is not None:
            self._pacer.read(0, record.draft_k, proposed=proposed, accepted=accepted)

    def _refill(self, record: StepRecord) -> None:
        config, width = self._config(record), self._header.width
        self._decide(record)  # the recorded K is run; the pacer still has to come past this step
        self._catch_up(record)
        self._read(record, proposed=record.proposed, accepted=record.accepted)
        padded = (*record.emitted, *[0] * (width - len(record.emitted)))
        emitted = mx.array([len(record.emitted) * (row == self._header.row) for row in range(self._header.rows)])
        state, self._state = self.state, None
        self._state = self._refill_for(config)(
            state, self._rows_of(record.window), self._rows_of(padded), emitted.astype(mx.int32)
        )
        del state
        mx.eval(self._state.to_tree())
        last = record.emitted[-1] if record.emitted else self._place.last
        self._place = RowPlace(length=record.length + len(record.emitted), last=last)

    def _refill_for(self, config: StepConfig) -> Refill:
        return self._pair.once(
            ("refill", config, self._compiled),
            lambda: compile_refill(config, *self._engine.compiled.models, compiled=self._compiled),
        )

    def _rows_of(self, ids: Sequence[int]) -> mx.array:
        """int32 [B, len(ids)]: the ids in this row, zeros in the others."""
        filled = np.zeros((self._header.rows, len(ids)), dtype=np.int32)
        filled[self._header.row] = ids
        return mx.array(filled)

    def _check_history(self, steps: Sequence[StepRecord]) -> None:
        """Steps that are not run again must at least follow from each other: they decide where the others begin."""
        place = RowPlace(length=len(self._header.prompt), last=self._header.prompt[-1])
        width = self._header.width
        for record in steps:
            drawn = record.drawn if self._header.drafted else 0
            stands = record.proposals[: max(len(record.emitted) - 1, 0)]
            if not len(record.emitted) - 1 <= record.accepted <= record.proposed:
                raise TraceError(
                    f"{self._trace.path}: line {self._trace.line_of(record.step)}: accepted: got {record.accepted} of "
                    f"{record.proposed} proposed with {len(record.emitted)} ids emitted, expected counts that agree"
                )
            for name, got, expected in (
                ("key", record.key, self._header.key),
                ("length", record.length, place.length),
                ("window", record.window, (place.last, *record.proposals[:drawn], *[0] * (width - 1 - drawn))),
                ("emitted", record.emitted[: len(stands)], stands),
            ):
                if got != expected:
                    raise TraceError(
                        f"{self._trace.path}: line {self._trace.line_of(record.step)}: {name}: got {_shown(got)}, "
                        f"expected {_shown(expected)}, which follows from the rest; --from-step {record.step} runs it"
                    )
            bad = [index for index in (*record.proposals, *record.emitted) if index >= self._pair.vocab_size]
            if bad:
                raise TraceError(
                    f"{self._trace.path}: line {self._trace.line_of(record.step)}: got id {bad[0]}, "
                    f"expected 0 to {self._pair.vocab_size - 1}: the models have no more"
                )
            place = (
                place
                if not record.emitted
                else RowPlace(length=place.length + len(record.emitted), last=record.emitted[-1])
            )


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
