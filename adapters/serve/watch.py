"""Whether the draft pays on this server, by what its rows have done lately."""

from collections import Counter
from collections.abc import Callable

from posttrainllm.adapters.adaptive import Curve, curve_mode
from posttrainllm.adapters.costs import CostShape, curve_on_file, curves_for
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.payoff import Payoff, in_doubt, payoff
from posttrainllm.adapters.rows import RowStep
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.kernel.config import Mode
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["Watch"]

_LATELY = 256  # steps of rows that may be drafted for
_LONG = 8 * _LATELY  # in doubt for so long, a server that is never idle measures between two of its steps


class Watch:
    """Counts steps, and says once in the log when they would have been faster without the draft."""

    def __init__(self) -> None:
        self.payoff: Payoff | None = None
        """None until enough was decoded to say, or while nothing suggests that the draft does not pay."""
        self._steps: dict[Mode, Counter[int]] = {"greedy": Counter(), "sampled": Counter()}
        self._tokens: Counter[Mode] = Counter()
        self._missed: set[Mode] = set()
        """Modes whose costs were looked for on file in vain; they do not come while the server is busy."""
        self._said = self._gave_up = False

    @property
    def pays(self) -> bool | None:
        """Whether it pays; None where that is not known."""
        return None if self.payoff is None else self.payoff.pays

    @property
    def due(self) -> bool:
        """Whether enough steps have been counted."""
        return not self._gave_up and self._counted >= _LATELY

    @property
    def overdue(self) -> bool:
        """Whether costs have been wanted for so long that they are worth a pause between two steps."""
        return not self._gave_up and self._counted >= _LONG

    @property
    def _counted(self) -> int:
        return sum(map(Counter.total, self._steps.values()))

    def count(self, mode: Mode, step: RowStep) -> None:
        """Take a step of a row that may be drafted for into account.

        Args:
            mode: the smallest step that serves it.
            step: what it did.
        """
        mode = curve_mode(mode)
        self._steps[mode][step.drawn] += 1  # what the engine's step cost, whatever the row had of it
        self._tokens[mode] += len(step.tokens)

    def look(self, engine: Engine, *, progress: Callable[[], None] | None = None) -> None:
        """Judge the steps counted since the last time, and begin anew.

        Args:
            engine: of these steps.
            progress: called between two steps that are clocked, where costs are not known; None measures nothing and
                waits for a better time.

        Raises:
            Exception: what `progress` raises.
        """
        mode: Mode = max(self._steps, key=lambda mode: self._steps[mode].total())
        auto, found = engine.curves is not None, None
        if engine.pair.draft is not None and (auto or in_doubt(self._steps[mode], self._tokens[mode])):
            curve = self._curve(engine, mode, progress)
            if curve is None and not self._gave_up:
                return
            if curve is not None:  # rows may have been stepped while it was measured
                found = payoff(curve, self._steps[mode], self._tokens[mode], auto=auto)
        self._steps, self._tokens = {name: Counter() for name in self._steps}, Counter()
        self.payoff = found
        if found is not None and found.hint is not None and not self._said:
            self._said = True
            LOGGER.warning("%s", found.hint)

    def _curve(self, engine: Engine, mode: Mode, progress: Callable[[], None] | None) -> Curve | None:
        if engine.curves is not None:
            return engine.curves[mode]
        most = engine.width - 1
        shape = CostShape(rows=engine.rows, capacity=engine.capacity, width=engine.width, draft_ks=(most,))
        if progress is None:
            if mode in self._missed:
                return None
            found = curve_on_file(engine.pair, shape, mode)
            if found is None:
                self._missed.add(mode)
            return found
        self._missed.clear()
        try:
            return curves_for(engine.pair, shape, [mode], progress=progress)[mode]
        except PosttrainllmError as error:  # no room for the caches that measuring needs
            LOGGER.warning("whether the draft pays is not measured: %s", error)
            self._gave_up = True
            return None
