"""A whole measurement, given models and prompts."""

import sys
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.progress import Progress

from posttrainllm.adapters.engine import capacity_for
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.evals.bench.contenders import Contender, contenders_for
from posttrainllm.evals.bench.costs import Costs, forward_costs
from posttrainllm.evals.bench.machine import CpuWatch, cpu_count
from posttrainllm.evals.bench.measure import measure, outputs, references, warm_up
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
) -> dict[str, Any]:
    """Measure everything on a pair.

    Args:
        pair: the models.
        prompts: ids, all of one length and different; the first warms up.
        draft_ks: K of each speculative row; none without a draft.
        count: tokens to generate.
        mlx_lm: whether mlx-lm's loops take part.
        quiet: whether to show no progress.

    Returns:
        What the JSON line holds.
    """
    watch, length = CpuWatch(), len(prompts[0]) + count
    drafted = list(draft_ks) if pair.draft is not None else []
    capacity = capacity_for(length, max(drafted, default=0) + 1)
    contenders = contenders_for(pair, drafted, capacity=capacity, mlx_lm=mlx_lm)
    rest = prompts[1:]
    console = Console(stderr=True, quiet=quiet or sys.stderr is None or not sys.stderr.isatty())
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warm-up and references", total=None)
        warm_up(contenders, prompts[0], count)
        expected = _references(pair, contenders, rest, count, capacity)
        costs = _costs(pair, drafted, capacity, length)
        progress.update(task, description="measuring", total=len(contenders) * len(rest))
        repeats = measure(contenders, rest, count, expected, lambda: progress.advance(task))
    return _setting(pair) | {
        "others_cpu": watch.others(),
        "temperature": 0,
        "draft_ks": drafted,
        "prompt_tokens": len(prompts[0]),
        "max_tokens": count,
        "repeats": len(rest),
        "capacity": capacity,
        "forward_s": None if costs is None else attrs.asdict(costs),
        "rows": summarize(repeats, costs),
    }


def _references(
    pair: Pair, contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], count: int, capacity: int
) -> dict[str, list[list[int]]]:
    """What the speculative ones have to emit: ours as plain decoding at that width, mlx-lm's as its own plain loop."""
    drafted = [one for one in contenders if one.draft_k]
    expected = {
        one.name: references(pair, one.draft_k, prompts, count, capacity)
        for one in drafted
        if one.engine == "posttrainllm"
    }
    theirs = [one for one in drafted if one.engine == "mlx-lm"]
    if theirs:
        plain = next(one for one in contenders if one.engine == "mlx-lm" and not one.draft_k)
        expected |= dict.fromkeys((one.name for one in theirs), outputs(plain, prompts, count))
    return expected


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


def _costs(pair: Pair, draft_ks: Sequence[int], capacity: int, length: int) -> Costs | None:
    if pair.draft is None or not draft_ks:
        return None
    return forward_costs(pair, draft_ks, capacity=capacity, position=length // 2)
