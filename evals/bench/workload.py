"""A whole measurement, given models and prompts."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.progress import Progress

from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.evals.bench.batch import measure_rows, measure_rules
from posttrainllm.evals.bench.child import ChildContender
from posttrainllm.evals.bench.contenders import Contender, Ours
from posttrainllm.evals.bench.costs import Costs, forward_costs
from posttrainllm.evals.bench.extras import Extras
from posttrainllm.evals.bench.field import all_contenders, expected_outputs
from posttrainllm.evals.bench.floors import find_ratios, main_k
from posttrainllm.evals.bench.machine import CpuWatch, cpu_count
from posttrainllm.evals.bench.measure import measure, warm_up
from posttrainllm.evals.bench.simulated import expected_accepted
from posttrainllm.evals.bench.start_up import measure_start_up
from posttrainllm.evals.bench.summary import summarize

__all__ = ["measure_pair"]


def measure_pair(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    draft_ks: Sequence[int],
    count: int,
    *,
    mlx_lm: bool = True,
    quiet: bool = False,
    extras: Extras | None = None,
) -> dict[str, Any]:
    """Measure everything on a pair.

    Args:
        pair: the models.
        prompts: ids, all of one length and different; the first warms up.
        draft_ks: K of each speculative row; none without a draft.
        count: tokens to generate.
        mlx_lm: whether mlx-lm's loops take part.
        quiet: whether to show no progress.
        extras: what else takes part; None for nothing.

    Returns:
        What the JSON line holds.

    Raises:
        PosttrainllmError: a process of another engine cannot take part.
    """
    extras = extras or Extras()
    watch, length = CpuWatch(), len(prompts[0]) + count
    drafted = list(draft_ks) if pair.draft is not None else []
    capacity = capacity_for(length, max(drafted, default=0) + 1)
    rest = prompts[1:]
    console = Console(stderr=True, quiet=quiet or sys.stderr is None or not sys.stderr.isatty())
    with Progress(console=console, transient=True) as progress, contextlib.ExitStack() as stack:
        task = progress.add_task("warm-up and references", total=None)
        contenders = all_contenders(pair, drafted, extras, capacity=capacity, mlx_lm=mlx_lm, stack=stack)
        warm_up(contenders, prompts[0], count)
        expected = expected_outputs(pair, contenders, rest, count, capacity)
        costs, simulation = _costs(pair, contenders, drafted, extras, capacity, length // 2)
        progress.update(task, description="measuring", total=len(contenders) * len(rest))
        repeats = measure(contenders, rest, count, expected, lambda: progress.advance(task))
        progress.update(task, description="rows, rules, starts", total=None)
        others = _others(pair, contenders, drafted, extras, rest, count, capacity, expected)
    result = _setting(pair) | {
        "others_cpu": watch.others(),
        "temperature": 0,
        "draft_ks": drafted,
        "prompt_tokens": len(prompts[0]),
        "max_tokens": count,
        "repeats": len(rest),
        "capacity": capacity,
        "simulated": simulation,
        "others": {one.name: one.facts for one in contenders if isinstance(one, ChildContender) and not one.draft_k},
        "forward_s": None if costs is None else attrs.asdict(costs),
        "rows": summarize(repeats, costs),
        **others,
    }
    return result | {"ratios": find_ratios(result, repeats)}


def _others(
    pair: Pair,
    contenders: Sequence[Contender],
    draft_ks: Sequence[int],
    extras: Extras,
    prompts: Sequence[Sequence[int]],
    count: int,
    capacity: int,
    expected: Mapping[str, Sequence[Sequence[int]]],
) -> dict[str, Any]:
    """What is no row of the table."""
    found: dict[str, Any] = {"batch": None, "sampled": None, "start_up": None}
    if draft_ks and (extras.rows or extras.sampled):
        k = main_k(draft_ks)
        ours = next(one for one in contenders if isinstance(one, Ours) and one.draft_k == k)
        if extras.rows:
            texts = expected[ours.name]
            rows = measure_rows(ours, extras.rows, prompts, count, capacity=capacity, expected=texts)
            found["batch"] = {"draft_k": k, "rows": rows}
        if extras.sampled:
            found["sampled"] = measure_rules(ours, prompts, count, capacity=capacity)
    if extras.start_up:
        found["start_up"] = measure_start_up(
            extras.start_up,
            model=pair.target.name,
            draft_model=None if pair.draft is None else pair.draft.name,
            dtype=pair.target.dtype,
        )
    return found


def _costs(
    pair: Pair,
    contenders: Sequence[Contender],
    draft_ks: Sequence[int],
    extras: Extras,
    capacity: int,
    position: int,
) -> tuple[Costs | None, dict[str, Any] | None]:
    """Of the forwards that are measured; and of simulating, where the draft follows a script."""
    if pair.draft is None or not draft_ks:
        return None, None
    free = forward_costs(pair, draft_ks, capacity=capacity, position=position)
    if extras.accept_rate is None:
        return free, None
    ours = next(one for one in contenders if isinstance(one, Ours) and one.draft_k)
    costs = forward_costs(ours.pair, draft_ks, capacity=capacity, position=position)
    k = main_k(draft_ks)
    return costs, {
        "accept_rate": extras.accept_rate,
        "expected_accepted_per_step": round(expected_accepted(extras.accept_rate, k), 4),
        "draft_k": k,
        "draft_forward_added_s": round(costs.draft_later - free.draft_later, 8),
    }


def _setting(pair: Pair) -> dict[str, Any]:
    """What the numbers were measured on."""
    runtime = pair.runtime
    return {
        "benchmark": "throughput",
        "model": pair.target.name,
        "draft_model": pair.draft.name if pair.draft is not None else None,
        "dtype": pair.target.dtype,
        "device": runtime.device,
        "device_name": runtime.device_name,
        "cpus": cpu_count(),
        "blas": runtime.blas,
        "versions": runtime.versions,
    }
