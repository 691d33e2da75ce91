"""Who has which row, as the host knows it: requests, how far each has got, and what a step in flight was for."""

from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx

from posttrainllm.adapters.adaptive import Curve, Pacer
from posttrainllm.adapters.rows import RowPlace, RowRequest, RowStep, read_rows, sampling_of, wanted_logprobs
from posttrainllm.kernel.config import Mode, StepConfig
from posttrainllm.kernel.state import StepOutput

__all__ = ["InFlight", "Occupancy"]


@attrs.frozen(eq=False, kw_only=True)
class InFlight:
    """A step that was launched and not read."""

    epochs: tuple[int, ...]
    config: StepConfig
    keys: mx.array
    output: StepOutput
    draft_ks: tuple[int, ...]
    """How many ids the draft may propose to each row."""


class Occupancy:
    """The requests in the rows of an engine.

    Args:
        rows: B.
        vocab_size: V.
        curves: what steps cost, by mode; None leaves every row the K of its request.
    """

    def __init__(self, rows: int, vocab_size: int, curves: Mapping[Mode, Curve] | None) -> None:
        self._vocab_size = vocab_size
        self._requests: list[RowRequest | None] = [None] * rows
        self._epochs = [0] * rows
        self._places: dict[int, RowPlace] = {}
        self.pacer = None if curves is None else Pacer(rows, curves)
        self.sampling = sampling_of(self._requests, vocab_size)

    @property
    def requests(self) -> Sequence[RowRequest | None]:
        """By row; None is idle."""
        return self._requests

    @property
    def epochs(self) -> tuple[int, ...]:
        """How often each row has changed hands: a step in flight of another epoch is not for who has the row now."""
        return tuple(self._epochs)

    @property
    def longest(self) -> int:
        """Length of the longest row, as far as its steps were read; 0 where all are idle."""
        return max((place.length for row, place in self._places.items() if self._requests[row] is not None), default=0)

    def enter(self, row: int, request: RowRequest) -> None:
        """Note that a request has a row from now on."""
        self._requests[row] = request
        self._places[row] = RowPlace(length=len(request.prompt), last=int(request.prompt[-1]))
        self._epochs[row] += 1
        self.sampling = sampling_of(self._requests, self._vocab_size)
        if self.pacer is not None:
            self.pacer.enter(row, request.mode, request.draft_k)

    def leave(self, row: int) -> None:
        """Note that a row is idle from now on."""
        self._requests[row] = None
        self._epochs[row] += 1
        self.sampling = sampling_of(self._requests, self._vocab_size)
        if self.pacer is not None:
            self.pacer.leave(row)

    def read(self, flight: InFlight) -> dict[int, RowStep]:
        """Wait for a step and note how far it took each row.

        Args:
            flight: the oldest that was not read.

        Returns:
            What each row emitted that has been occupied ever since the launch.
        """
        current = {
            row: place
            for row, place in sorted(self._places.items())
            if self._requests[row] is not None and flight.epochs[row] == self._epochs[row]
        }
        wanted = wanted_logprobs(self._requests)
        steps = read_rows(flight.output, flight.keys, current, flight.config, wanted, draft_ks=flight.draft_ks)
        if self.pacer is not None:
            for row, step in steps.items():
                self.pacer.read(row, step.draft_k, proposed=step.proposed, accepted=step.accepted)
        self._places |= {row: place.after(steps[row]) for row, place in current.items()}
        return steps
