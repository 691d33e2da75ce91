"""Our engine alone, in other ways than one greedy row: with several rows, and at T=1."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.evals.bench.contenders import Ours, synchronize
from posttrainllm.kernel.errors import NonFiniteError

__all__ = ["RULES", "format_batch", "measure_rows", "measure_rules"]

RULES = {"T=0": (0.0, False), "T=1, leviathan": (1.0, False), "T=1, coupled": (1.0, True)}
"""Temperature, and whether the noise is shared."""
_STEPS = 32  # a step's cost does not depend on what it accepts: a fixed number of them is timed


def measure_rows(
    ours: Ours,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    capacity: int,
    expected: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """Tokens a second of all rows together, while all of them are taken.

    Args:
        ours: what decodes; warmed up or not.
        rows: the B to measure, interleaved.
        prompts: ids, at least as many as the largest B; every round starts with another one.
        count: tokens to generate a row.
        capacity: C of every engine.
        expected: what each prompt gets when it is alone.

    Returns:
        For each B the median and the range of tokens a second, the median ratio to the first B, and how many texts
        begin as they do alone (another B is another shape, which may round differently).
    """
    for batch in rows:
        _decode(ours, [prompts[row] for row in range(batch)], count, capacity)  # compiles
    speeds: dict[int, list[float]] = {batch: [] for batch in rows}
    equal = dict.fromkeys(rows, 0)
    for start in range(len(prompts)):
        for turn in range(len(rows)):
            batch = rows[(turn + start) % len(rows)]
            chosen = [(start + row) % len(prompts) for row in range(batch)]
            speed, texts = _decode(ours, [prompts[index] for index in chosen], count, capacity)
            speeds[batch].append(speed)
            equal[batch] += sum(
                text == list(expected[index][: len(text)]) for index, text in zip(chosen, texts, strict=True)
            )
    return [
        {
            "rows": batch,
            "tok_s": round(statistics.median(found), 2),
            "tok_s_range": [round(min(found), 2), round(max(found), 2)],
            "ratio": round(statistics.median(a / b for a, b in zip(found, speeds[rows[0]], strict=True)), 3),
            "texts": batch * len(prompts),
            "equal": equal[batch],
        }
        for batch, found in speeds.items()
    ]


def _decode(ours: Ours, prompts: Sequence[Sequence[int]], count: int, capacity: int) -> tuple[float, list[list[int]]]:
    """Tokens a second from the second step until the first row has all of its tokens, and every row's ids."""
    engine = Engine(ours.pair, capacity=capacity, width=ours.draft_k + 1, rows=len(prompts))
    for row, prompt in enumerate(prompts):
        _insert(engine, ours, row, prompt, count)
    texts = [list(step.tokens) for step in _step(engine).values()]
    first, started = sum(map(len, texts)), time.perf_counter()
    while max(map(len, texts)) < count:
        for text, step in zip(texts, _step(engine).values(), strict=True):
            text += step.tokens
    elapsed = time.perf_counter() - started
    synchronize()
    return (sum(map(len, texts)) - first) / elapsed, texts


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


def format_batch(result: dict[str, Any]) -> list[str]:
    """Rows and rules for people.

    Args:
        result: what the JSON line holds.

    Returns:
        Lines; none where neither was measured.
    """
    lines = []
    for row in (result["batch"] or {}).get("rows", []):
        speeds = "{:.1f}-{:.1f}".format(*row["tok_s_range"])
        lines.append(
            f"{row['rows']:>3} rows, K={result['batch']['draft_k']}: {row['tok_s']:.1f} tok/s of all ({speeds}), "
            f"{row['equal']} of {row['texts']} texts as alone"
        )
    lines += [f"step at {one['rule']}: {one['step_s'] * 1e3:.3f} ms" for one in result["sampled"] or []]
    return ["", *lines] if lines else []
