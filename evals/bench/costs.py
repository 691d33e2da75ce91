"""What the forwards cost, and the speed-up that Leviathan's formula makes of it."""

import statistics
import time
from collections.abc import Sequence

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.module import Model
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.shapes import draft_width
from posttrainllm.kernel.compiled import compile_forward

__all__ = ["Chain", "Costs", "forward_costs", "predicted_speedup"]

_CHAIN = 8  # forwards in a row, as a step makes them: the host then works while the device does
_SAMPLES = 9


@attrs.frozen(kw_only=True)
class Costs:
    """Seconds a forward of one row, medians."""

    plain: float
    """The target's, width 1."""
    verify: dict[int, float]
    """The target's, width K + 1, by K."""
    draft_first: float
    """The draft's first in a step, width 2."""
    draft_later: float
    """Each of the draft's others, at the width it is fed in a greedy step."""

    def draft(self, draft_k: int) -> float:
        """Seconds of all the draft's forwards of a step."""
        return self.draft_first + (draft_k - 1) * self.draft_later


def forward_costs(pair: Pair, draft_ks: Sequence[int], *, capacity: int, position: int) -> Costs:
    """Time the compiled forwards alone, interleaved.

    Args:
        pair: with a draft.
        draft_ks: the K to measure.
        capacity: C.
        position: where in the cache the windows stand.

    Returns:
        The costs.
    """
    assert pair.draft is not None
    later = draft_width(pair.runtime.device)
    chains = {("draft", width): Chain(pair.draft, width, capacity, position) for width in {2, later}}
    for width in (1, *(k + 1 for k in draft_ks)):
        chains["target", width] = Chain(pair.target, width, capacity, position)
    times: dict[tuple[str, int], list[float]] = {name: [] for name in chains}
    for _ in range(_SAMPLES):
        for name, chain in chains.items():
            times[name].append(chain.run())
    medians = {name: statistics.median(found) for name, found in times.items()}
    return Costs(
        plain=medians["target", 1],
        verify={k: medians["target", k + 1] for k in draft_ks},
        draft_first=medians["draft", 2],
        draft_later=medians["draft", later],
    )


class Chain:
    """One forward again and again on its own cache.

    Args:
        model: whose.
        width: W.
        capacity: C.
        position: where the window stands.
    """

    def __init__(self, model: Model, width: int, capacity: int, position: int) -> None:
        self._forward = compile_forward(model.forward)
        self._kv = model.make_kv(1, capacity)
        self._tokens = mx.zeros((1, width), dtype=mx.int32)
        self._position = mx.array([position], dtype=mx.int32)
        mx.eval(self._kv, self._tokens, self._position)
        self.run()  # compiles

    def run(self) -> float:
        """Seconds a forward."""
        kv, self._kv = self._kv, ()  # nothing else may hold it, or it is copied
        started = time.perf_counter()
        for _ in range(_CHAIN):
            logits, kv = self._forward(self._tokens, kv, self._position)
            mx.async_eval(logits, kv)  # type: ignore[no-untyped-call] # as MLX declares it
        mx.eval(logits, kv)
        elapsed = time.perf_counter() - started
        self._kv = kv
        return elapsed / _CHAIN


def predicted_speedup(alpha: float, draft_k: int, *, draft_cost: float, verify_cost: float) -> float:
    """Tokens a step over the cost of a step (Leviathan et al. 2023, theorem 3.8), with a verification that costs extra.

    Args:
        alpha: chance that a proposal is accepted, given that those before it were; taken as the same everywhere.
        draft_k: K.
        draft_cost: of a draft forward, mean of a step's, in plain target forwards (the paper's c).
        verify_cost: of the verification, in the same unit; 1 in the paper.

    Returns:
        Speed against plain decoding; bookkeeping is free.
    """
    tokens = draft_k + 1.0 if alpha >= 1 else (1 - alpha ** (draft_k + 1)) / (1 - alpha)
    return tokens / (draft_k * draft_cost + verify_cost)
