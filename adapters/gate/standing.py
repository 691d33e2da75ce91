"""What a long-lived process asks of the gate: may the draft be used here, and is that proved yet?

Whoever serves requests asks `boot_standing` before the first one and, where that says so, runs `full_standing` while
nothing else is to be done. Both tell `progress` after every forward, from the thread that they run on: other engines
of the same pair may be stepped in that callback, and change nothing here.
"""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from posttrainllm.adapters.gate.cache import (
    good_in_other_shapes,
    known_broken,
    read_result,
    trace_file,
    write_result,
)
from posttrainllm.adapters.gate.findings import GateResult
from posttrainllm.adapters.gate.heed import broken_reason
from posttrainllm.adapters.gate.key import gate_key
from posttrainllm.adapters.gate.prompts import read_prompts
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.kernel.errors import PosttrainllmError

if TYPE_CHECKING:  # they import MLX, and the BLAS must come first
    from posttrainllm.adapters.gate.paths import Shape
    from posttrainllm.adapters.gate.plan import Plan
    from posttrainllm.adapters.gate.run import Progress

__all__ = ["FIRST", "FULL", "Extent", "GateMode", "Standing", "StandingVerdict", "boot_standing", "full_standing"]

GateMode: TypeAlias = Literal["auto", "full", "strict", "off"]
StandingVerdict: TypeAlias = Literal["identical", "width-identical", "broken", "provisional", "not gated"]


@attrs.frozen(kw_only=True)
class Extent:
    """How much a run compares."""

    prompts: int
    """The first so many of the package's set."""
    max_tokens: int
    """Ids to generate a prompt, where half of the context holds as many."""
    drawn: int | None
    """Requests for the law of `leviathan`; None is the gate's own number."""


FULL = Extent(prompts=100, max_tokens=128, drawn=None)
"""What `posttrainllm gate` compares."""
FIRST = Extent(prompts=8, max_tokens=64, drawn=2)
"""What nobody has to wait long for."""


@attrs.frozen(kw_only=True)
class Standing:
    """Whether the draft is used, and how well that is proved."""

    enabled: bool
    verdict: StandingVerdict | None
    """None without a draft; "provisional": nothing speaks against it, and the full gate is still to come."""
    reason: str | None
    """One line: why the draft is not used, or why there is no full verdict."""
    unkept: str | None = None
    """Why a verdict that was reached could not be kept; the next start runs the gate again."""


def _silent(what: str, done: int, total: int) -> None:
    pass


def boot_standing(
    pair: Pair,
    shape: "Shape",
    mode: GateMode,
    *,
    progress: "Progress" = _silent,
    first: Extent = FIRST,
    full: Extent = FULL,
) -> tuple[Standing, bool]:
    """Find out before the first request, running as little as the mode allows. Prints nothing.

    Args:
        pair: loaded.
        shape: B, C and K of the engine that will serve.
        mode: "auto" takes a verdict on file, or compares a few prompts and leaves the rest for later; "full" and
            "strict" want the full verdict now (who asks for "strict" goes on only with `identical`); "off" runs
            nothing, and heeds a broken verdict on file all the same.
        progress: told after each step, prefill and forward; what it raises passes through and leaves nothing behind.
        first: what "auto" compares.
        full: what a full run compares.

    Returns:
        The standing, and whether `full_standing` is still to be run when there is time. Where the gate cannot run,
        "auto" says "not gated" and why.

    Raises:
        MemoryLimitError, CapacityError, NonFiniteError, LoadError: the gate cannot run, in the modes "full" and
            "strict" alone.
    """
    if pair.draft is None:
        return Standing(enabled=False, verdict=None, reason=pair.reason), False
    if mode == "off":
        broken = known_broken(pair, shape.draft_k)
        return (_not_gated("the gate is switched off") if broken is None else _broken(broken)), False
    if mode != "auto":
        planned = _plan(pair, shape, full)
        return _of_result(*_found_or_run(pair, planned, progress)), False
    watched = _Watched(progress)
    try:
        return _auto(pair, shape, watched, first, full)
    except (PosttrainllmError, OSError) as error:
        if error is watched.raised:
            raise
        return _not_gated(f"the gate could not run: {error}"), False


def full_standing(pair: Pair, shape: "Shape", *, progress: "Progress" = _silent, full: Extent = FULL) -> Standing:
    """Run the full gate in the shapes that serve, whatever is on file, and keep the verdict. Prints nothing.

    Args:
        pair: with a draft.
        shape: B, C and K of the engine that serves.
        progress: as for `boot_standing`.
        full: what is compared.

    Returns:
        The standing: one of the three verdicts of the gate.

    Raises:
        MemoryLimitError, CapacityError, NonFiniteError, LoadError: the gate cannot run.
    """
    return _of_result(*_run(pair, _plan(pair, shape, full), progress))


def _auto(pair: Pair, shape: "Shape", progress: "Progress", first: Extent, full: Extent) -> tuple[Standing, bool]:
    planned = _plan(pair, shape, full)
    key = gate_key(pair, planned)
    found = _on_file(pair, key)
    if found is not None:
        return _of_result(found, None), False
    broken = known_broken(pair, shape.draft_k)
    if broken is not None:
        return _broken(broken), False
    if good_in_other_shapes(key):
        reason = "the gate has passed here in other shapes; the full one in the shapes of this server is still to come"
        return Standing(enabled=True, verdict="provisional", reason=reason), True
    few = _plan(pair, shape, first)
    result, unkept = _found_or_run(pair, few, progress)
    if result.verdict == "broken":
        return _of_result(result, unkept), False
    reason = f"{len(few.prompts)} of {len(planned.prompts)} prompts were compared, the full gate is still to come"
    return Standing(enabled=True, verdict="provisional", reason=reason, unkept=unkept), True


def _plan(pair: Pair, shape: "Shape", extent: Extent) -> "Plan":
    """The first prompts of the package, cut to leave half of the context at least for what is generated."""
    from posttrainllm.adapters.gate.plan import plan

    context = min(pair.target.context, shape.capacity - 1)
    return plan(
        pair,
        read_prompts(None, extent.prompts),
        draft_k=shape.draft_k,
        max_tokens=min(extent.max_tokens, context // 2),
        cut=True,
        drawn=extent.drawn,
        rows=shape.rows,
        capacity=shape.capacity,
        curves=shape.curves,
    )


def _on_file(pair: Pair, key: dict[str, Any]) -> GateResult | None:
    """The verdict for a key, unless it is a broken one that a later good one lifts."""
    found = read_result(key)
    if found is not None and found.verdict == "broken" and known_broken(pair, key["draft_k"]) is None:
        return None
    return found


def _found_or_run(pair: Pair, planned: "Plan", progress: "Progress") -> tuple[GateResult, str | None]:
    found = _on_file(pair, gate_key(pair, planned))
    return (found, None) if found is not None else _run(pair, planned, progress)


def _run(pair: Pair, planned: "Plan", progress: "Progress") -> tuple[GateResult, str | None]:
    """The result, and why it could not be kept."""
    import mlx.core as mx

    from posttrainllm.adapters.gate.run import run_gate

    key = gate_key(pair, planned)
    try:
        result = run_gate(pair, planned, progress=progress, trace_file=trace_file(key))
    finally:
        mx.clear_cache()  # the caches of another engine are to have the room
    return result, write_result(key, result)


def _of_result(result: GateResult, unkept: str | None) -> Standing:
    if result.verdict == "broken":
        return attrs.evolve(_broken(next(p.reason for p in result.paths if p.verdict == "broken")), unkept=unkept)
    return Standing(enabled=True, verdict=result.verdict, reason=None, unkept=unkept)


def _broken(reason: str) -> Standing:
    return Standing(enabled=False, verdict="broken", reason=broken_reason(reason))


def _not_gated(reason: str) -> Standing:
    return Standing(enabled=True, verdict="not gated", reason=reason)


class _Watched:
    """Calls a callback and remembers what it raised: that is no failure of the gate."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self.raised: Exception | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        try:
            self._progress(what, done, total)
        except Exception as error:
            self.raised = error
            raise
