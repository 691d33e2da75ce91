"""The engine's thread: rows join and leave between steps, first come first served.

All MLX work is done here, since its streams belong to threads. A turn admits what fits, writes one prompt chunk and
runs one step, so that a prompt delays the rows beside it by a chunk a step, and whoever leaves frees a row within one.
"""

import time
from collections.abc import Callable
from functools import partial

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.payoff import Payoff
from posttrainllm.adapters.rows import RowStep
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.admission import Admission
from posttrainllm.adapters.serve.errors import failed
from posttrainllm.adapters.serve.gauges import StateCollector
from posttrainllm.adapters.serve.idle_gate import FaultError, FullGate, StopError, run_in_idle_time, tell
from posttrainllm.adapters.serve.jobs import Update
from posttrainllm.adapters.serve.metrics import Metrics
from posttrainllm.adapters.serve.recordings import Recordings
from posttrainllm.adapters.serve.seat import Seat
from posttrainllm.adapters.serve.watch import Watch
from posttrainllm.kernel.errors import NonFiniteError, PosttrainllmError

__all__ = ["Scheduler"]


class Scheduler:
    """Steps the rows of an engine for as long as there is work.

    Args:
        engine_for: makes the engine that a standing allows: with the draft, or plain.
        standing: what the gate has said so far.
        admission: where choices wait.
        recordings: where their traces go.
        full_gate: what is left for idle time; None for nothing.
    """

    def __init__(
        self,
        engine_for: Callable[[Standing], Engine],
        standing: Standing,
        admission: Admission,
        *,
        recordings: Recordings,
        full_gate: FullGate | None = None,
    ) -> None:
        self.standing = standing
        self.admission = admission
        self._engine_for, self._recordings, self._full_gate = engine_for, recordings, full_gate
        self._engine = engine_for(standing)
        self._free = list(range(self._engine.rows))[::-1]
        self._seats: dict[int, Seat] = {}
        self._entering: Seat | None = None  # its prompt is being read
        self._watch = Watch()
        self.metrics = Metrics(draft_k=self._engine.width - 1)
        """What this server counts, its state included."""
        self.metrics.registry.register(StateCollector(self))

    @property
    def pays(self) -> bool | None:
        """Whether the draft has made decoding faster lately; None where nothing can be said."""
        return self._watch.pays

    @property
    def payoff(self) -> Payoff | None:
        """What the steps looked at last came to; None where nothing can be said."""
        return self._watch.payoff

    @property
    def engine(self) -> Engine:
        """What is stepped now."""
        return self._engine

    def run(self) -> None:
        """Work until the admission is closed. An error of the engine closes it, and ends what is under way.

        Raises:
            Exception: the engine's own, once everybody has been told.
        """
        try:
            while self.admission.closed is None:
                if self._turn():
                    if self._watch.overdue:
                        self._watch.look(self._engine, progress=partial(self._pump, once=True))
                    continue
                if self._full_gate is not None:
                    self._run_full_gate()
                elif self._watch.due:
                    self._watch.look(self._engine, progress=self._pump)
                else:
                    self.admission.wait()
        except StopError:
            pass
        except FaultError as fault:
            self._end_all(failed())
            raise fault.error from None
        except Exception:
            self._end_all(failed())
            raise
        self._end_all(None)

    def _turn(self) -> bool:
        """Admit, read one prompt chunk, run one step; whether there was anything to do."""
        self._drop_cancelled()
        self._admit()
        busy = self._entering is not None or bool(self._seats)
        if self._entering is not None:
            self._read_chunk(self._entering)
        if self._seats:
            started = time.perf_counter()
            steps = self._engine.step()
            if steps:  # none where every row of it has changed hands since it was launched
                drafted = any(step.drawn for step in steps.values())
                self.metrics.stepped(time.perf_counter() - started, drafted=drafted)
            for number, step in steps.items():
                self._absorb(self._seats[number], step)
            if self._watch.due:
                self._watch.look(self._engine)
        return busy

    def _admit(self) -> None:
        """Let the next choice have a row; one prompt is read at a time, since each needs caches of its own."""
        while self._entering is None and self._free:
            job = self.admission.take()
            if job is None:
                return
            seat = self._entering = Seat(job, self._free.pop(), self.metrics)
            try:
                seat.begin(self._engine, self.standing, self._recordings)
            except PosttrainllmError as error:
                self._fail(seat, error)

    def _read_chunk(self, seat: Seat) -> None:
        try:
            if not seat.read_chunk():
                return
        except NonFiniteError as error:
            self._fail(seat, error)
            return
        seat.sit_down()
        self._seats[seat.number], self._entering = seat, None

    def _absorb(self, seat: Seat, step: RowStep) -> None:
        """Hand a step on. Whatever fails here is of the host, and ends this row alone."""
        if seat.drafted_mode is not None:
            self._watch.count(seat.drafted_mode, step)
        try:
            update = seat.absorb(step)
        except Exception as error:
            self._fail(seat, error)
            return
        if update.last:
            assert update.chunk is not None, "an outcome comes with the last chunk"
            self._leave(seat, update.chunk.finish_reason)
        seat.job.deliver(update)

    def _fail(self, seat: Seat, error: Exception) -> None:
        """End one choice with an error."""
        LOGGER.error("%s: %s", seat.job.request_id, error, exc_info=not isinstance(error, PosttrainllmError))
        self._leave(seat, None)
        seat.job.deliver(Update(error=error))

    def _leave(self, seat: Seat, reason: str | None) -> None:
        """Free a row."""
        if seat is self._entering:
            self._entering = None
        else:
            self._engine.release(seat.number)  # where this fails the seat still counts, and is told
            del self._seats[seat.number]
        self._free.append(seat.number)
        self.admission.left(seat.seconds)
        seat.end(reason)

    def _drop_cancelled(self) -> None:
        """Free what nobody wants any more."""
        for seat in self._all_seats():
            if seat.job.cancelled:
                self._leave(seat, "cancelled")
        self.admission.drop_cancelled()

    def _run_full_gate(self) -> None:
        """Run the whole gate, and heed it."""
        assert self._full_gate is not None
        gate, self._full_gate = self._full_gate, None
        started = time.perf_counter()
        standing = run_in_idle_time(gate, progress=self._pump)
        if standing is None:
            return
        self.standing = standing
        tell(standing, seconds=time.perf_counter() - started)
        if not standing.enabled:
            # the gate goes on only while no row is taken, so nothing is in flight that could be cut short
            self._engine.hand_over()  # its caches are freed before others are made
            self._engine = self._engine_for(standing)

    def _pump(self, *_: object, once: bool = False) -> None:
        try:
            while self._turn() and not once:
                pass
        except Exception as error:
            raise FaultError(error) from None
        if self.admission.closed is not None:
            raise StopError

    def _all_seats(self) -> list[Seat]:
        return [*([] if self._entering is None else [self._entering]), *self._seats.values()]

    def _end_all(self, error: Exception | None) -> None:
        """Tell everybody who still waits for something."""
        self.admission.close(error)
        for seat in self._all_seats():
            seat.end(None if error else "cancelled")
            seat.job.deliver(Update(error=self.admission.closed))
        for job in self.admission.take_all():
            job.deliver(Update(error=self.admission.closed))
