"""What steps cost here, measured once for a pair in its shapes and kept beside the gate's verdicts.

`--draft-k auto` chooses by these numbers, and under `leviathan` K decides which ids are drawn: so they are never
measured again where they are on file, and a run holds them in its trace.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.adaptive import Curve, curve_mode
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.key import models_of, setting_of
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.user_cache import file_name, user_cache, write_whole
from posttrainllm.kernel.config import Mode
from posttrainllm.kernel.errors import LoadError

__all__ = ["CostShape", "curve_on_file", "curves_for"]

_FORMAT = 2
_ROUNDS = 15  # of each step: the shortest of so many is hardly touched by what else the machine does
_LEAST_ROUNDS, _BUDGET_S = 3, 1.0  # large models are clocked less often: somebody waits for it
_DIGITS = 4  # no clock is better, and a trace and a key of the gate hold these numbers


@attrs.frozen(kw_only=True)
class CostShape:
    """What the cost of a step depends on beside the models and the machine."""

    rows: int
    """B."""
    capacity: int
    """C."""
    width: int
    """W."""
    draft_ks: tuple[int, ...]
    """The K to measure, rising."""


def curves_for(
    pair: Pair,
    shape: CostShape,
    modes: Sequence[Mode],
    *,
    progress: Callable[[], None] = lambda: None,
    fresh: bool = False,
) -> dict[Mode, Curve]:
    """The costs of a pair's steps: those of this process, else those on file, else measured now and kept.

    Args:
        pair: with a draft.
        shape: of the engine.
        modes: those of its requests.
        progress: called after each step that is clocked.
        fresh: whether to measure although they are on file; those of this process stand.

    Returns:
        A curve for "greedy" and for "sampled", as far as the modes need them.

    Raises:
        MemoryLimitError: the caches that measuring needs cannot fit.
    """
    return {
        mode: pair.once(("curve", shape, mode), partial(_find, pair, shape, mode, progress, fresh))
        for mode in dict.fromkeys(map(curve_mode, modes))
    }


def curve_on_file(pair: Pair, shape: CostShape, mode: Mode) -> Curve | None:
    """The costs where nothing has to be measured for them.

    Args:
        pair: with a draft.
        shape: of the engine.
        mode: of a request.

    Returns:
        Those of this process, else those on file; None where they are not known.
    """
    mode = curve_mode(mode)
    if ("curve", shape, mode) in pair.compiled:
        return curves_for(pair, shape, [mode])[mode]
    key = _key(pair, shape, mode)
    return None if key is None else _read(key)


def _find(pair: Pair, shape: CostShape, mode: Mode, progress: Callable[[], None], fresh: bool) -> Curve:
    key = _key(pair, shape, mode)
    found = None if key is None or fresh else _read(key)
    if found is not None:
        return found
    curve = _measure(pair, shape, mode, progress)
    file = None if key is None else _file(key)
    if key is not None and file is not None:
        text = json.dumps({"format": _FORMAT, "key": key, "curve": attrs.asdict(curve)})
        unkept = write_whole(file, text)
        if unkept is not None:
            LOGGER.warning("the costs of steps are not kept, the next start measures again: %s", unkept)
    return curve


def _measure(pair: Pair, shape: CostShape, mode: Mode, progress: Callable[[], None]) -> Curve:
    """Clock every step in turns, so that what else the machine does meets all of them alike."""
    engine = Engine(pair, rows=shape.rows, capacity=shape.capacity, width=shape.width)
    half = shape.capacity // 2  # the costs are fixed, and a row is about half as long as it gets, on the average
    configs = {draft_k: engine.compiled.usual_config(mode, half, draft_k=draft_k) for draft_k in shape.draft_ks}
    usual = attrs.evolve(engine.compiled.usual_config(mode, half), width=1)
    runs: dict[int | None, Callable[[], None]] = {
        draft_k: partial(engine.rehearse, config) for draft_k, config in configs.items()
    }
    runs[None] = partial(engine.rehearse, usual, plain=True)
    for run in runs.values():  # the first one compiles
        run()
        run()
        progress()
    times: dict[int | None, list[float]] = {draft_k: [] for draft_k in runs}
    began = time.perf_counter()
    for done in range(_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() - began > _BUDGET_S:
            break
        for draft_k, run in runs.items():
            run()  # after another kind of step the processor's caches hold what that one used: up to half slower
            started = time.perf_counter()
            run()
            times[draft_k].append(time.perf_counter() - started)
            progress()
    # whatever else the machine does can only add to a step: of several the shortest is nearest to its cost
    least = {draft_k: float(f"{min(found):.{_DIGITS}g}") for draft_k, found in times.items()}
    return Curve(
        draft_ks=shape.draft_ks,
        seconds=tuple(least[draft_k] for draft_k in shape.draft_ks),
        plain_seconds=least[None],
    )


def _key(pair: Pair, shape: CostShape, mode: Mode) -> dict[str, Any] | None:
    """Everything that the costs depend on; None for a pair that no directory holds."""
    try:
        models = models_of(pair)
    except LoadError:
        return None
    shapes = attrs.asdict(shape) | {"draft_ks": list(shape.draft_ks)}
    return {**models, **setting_of(pair, shape.width - 1), **shapes, "mode": mode}


def _file(key: dict[str, Any]) -> Path | None:
    folder = user_cache("costs")
    return None if folder is None else folder / file_name(key)


def _read(key: dict[str, Any]) -> Curve | None:
    """The costs on file; a file that is not what its name says counts as absent."""
    file = _file(key)
    try:
        value = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        if value is None or value["format"] != _FORMAT or value["key"] != key:
            return None
        found = value["curve"]
        if not (isinstance(found["seconds"], list) and isinstance(found["draft_ks"], list)):
            return None
        curve = Curve(
            draft_ks=tuple(found["draft_ks"]),
            seconds=tuple(map(float, found["seconds"])),
            plain_seconds=float(found["plain_seconds"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    sane = list(curve.draft_ks) == key["draft_ks"] and len(curve.seconds) == len(curve.draft_ks)
    return curve if sane and all(0 < value < 1e6 for value in (*curve.seconds, curve.plain_seconds)) else None
