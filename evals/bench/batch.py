"""Our engine alone, in other ways than one greedy row: with several rows, and at T=1."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.evals.bench.contenders import Ours, synchronize
from posttrainllm.kernel.errors import NonFiniteError

__all__ = ["RULES", "measure_rows", "measure_rules"]

RULES = {"T=0": (0.0, False), "T=1, leviathan": (1.0, False), "T=1, coupled": (1.0, True)}
"""Temperature, and whether the noise is shared."""
_STEPS = 32  # a step's cost does not depend on what it accepts: a fixed number of them is timed


def measure_rows(
    ours: Ours, rows: Sequence[int], prompts: Sequence[Sequence[int]], count: int, *, capacity: int
) -> list[dict[str, Any]]:
    """Tokens a second of all rows together, while all of them are taken.

    Args:
        ours: what decodes; warmed up or not.
        rows: the B to measure, interleaved.
        prompts: ids, at least as many as the largest B; every round starts with another one.
        count: tokens to generate a row.
        capacity: C of every engine.

    Returns:
        For each B the median and the range of tokens a second, and the median ratio to the first B.
    """
    for batch in rows:
        _rate(ours, [prompts[row % len(prompts)] for row in range(batch)], count, capacity)  # compiles
    found: dict[int, list[float]] = {batch: [] for batch in rows}
    for start in range(len(prompts)):
        for turn in range(len(rows)):
            batch = rows[(turn + start) % len(rows)]
            chosen = [prompts[(start + row) % len(prompts)] for row in range(batch)]
            found[batch].append(_rate(ours, chosen, count, capacity))
    return [
        {
            "rows": batch,
            "tok_s": round(statistics.median(speeds), 2),
            "tok_s_range": [round(min(speeds), 2), round(max(speeds), 2)],
            "ratio": round(statistics.median(a / b for a, b in zip(speeds, found[rows[0]], strict=True)), 3),
        }
        for batch, speeds in found.items()
    ]


def _rate(ours: Ours, prompts: Sequence[Sequence[int]], count: int, capacity: int) -> float:
    """Tokens a second from the second step until the first row has all of its tokens."""
    engine = Engine(ours.pair, capacity=capacity, width=ours.draft_k + 1, rows=len(prompts))
    for row, prompt in enumerate(prompts):
        _insert(engine, ours, row, prompt, count)
    emitted = [len(step.tokens) for step in _step(engine).values()]
    first, started = sum(emitted), time.perf_counter()
    while max(emitted) < count:
        emitted = [before + len(step.tokens) for before, step in zip(emitted, _step(engine).values(), strict=True)]
    elapsed = time.perf_counter() - started
    synchronize()
    return (sum(emitted) - first) / elapsed


def measure_rules(ours: Ours, prompts: Sequence[Sequence[int]], count: int, *, capacity: int) -> list[dict[str, Any]]:
    """Seconds a step at T=0 and at T=1 with each accept rule.

    Args:
        ours: what decodes.
        prompts: ids of each; all rules take turns on each.
        count: tokens to generate at most.
        capacity: C.

    Returns:
        For each of RULES the median of the prompts' mean steps, and the median ratio to T=0.
    """
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for name in RULES:
        _seconds(ours, prompts[0], count, capacity, *RULES[name])  # compiles
    names = list(RULES)
    for index, prompt in enumerate(prompts):
        for turn in range(len(names)):
            name = names[(turn + index) % len(names)]
            found[name].append(_seconds(ours, prompt, count, capacity, *RULES[name]))
    greedy = found[names[0]]
    return [
        {
            "rule": name,
            "step_s": round(statistics.median(times), 7),
            "ratio": round(statistics.median(a / b for a, b in zip(times, greedy, strict=True)), 3),
        }
        for name, times in found.items()
    ]


def _seconds(ours: Ours, prompt: Sequence[int], count: int, capacity: int, temperature: float, coupled: bool) -> float:
    engine = Engine(ours.pair, capacity=capacity, width=ours.draft_k + 1)
    _insert(engine, ours, 0, prompt, count, temperature=temperature, coupled=coupled)
    emitted, steps = len(_step(engine)[0].tokens), 0
    started = time.perf_counter()
    while emitted < count and steps < _STEPS:
        emitted, steps = emitted + len(_step(engine)[0].tokens), steps + 1
    elapsed = time.perf_counter() - started
    synchronize()
    return elapsed / max(steps, 1)


def _insert(engine: Engine, ours: Ours, row: int, prompt: Sequence[int], count: int, **sampling: Any) -> None:
    if ours.script is not None:
        ours.script.turn_to(prompt)
    engine.insert(row, RowRequest(prompt=prompt, limit=len(prompt) + count, draft_k=ours.draft_k, **sampling))


def _step(engine: Engine) -> dict[int, Any]:
    steps = engine.step()
    if not all(step.finite for step in steps.values()):
        raise NonFiniteError(f"step {engine.steps - 1}: the target's logits are not finite, nothing is measured")
    return steps
