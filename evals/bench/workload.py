"""All of a measurement once models and prompts are there."""

import sys
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.progress import Progress

from posttrainllm.adapters.engine import capacity_for
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.evals.bench.contenders import Contender, MlxLm, contenders_for
from posttrainllm.evals.bench.costs import Costs, forward_costs
from posttrainllm.evals.bench.machine import CpuWatch, cpu_count
from posttrainllm.evals.bench.measure import measure, references, warm_up
from posttrainllm.evals.bench.summary import rows

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
    contenders = contenders_for(pair, drafted, length=length, mlx_lm=mlx_lm)
    rest = prompts[1:]
    console = Console(stderr=True, quiet=quiet or sys.stderr is None or not sys.stderr.isatty())
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warm-up and references", total=None)
        expected: dict[tuple[bool, int], list[list[int]]] = {}
        for k in drafted:
            expected[False, k] = references(pair, k, rest, count, capacity)
        theirs = next((one for one in contenders if isinstance(one, MlxLm)), None)
        if theirs is not None and drafted:
            expected[True, 0] = [_ids(theirs, prompt, count) for prompt in rest]
        warm_up(contenders, prompts[0], count)
        costs = _costs(pair, drafted, capacity, length)
        progress.update(task, description="measuring", total=len(contenders) * len(rest))

        def reference(contender: Contender, index: int) -> list[int] | None:
            key = (True, 0) if isinstance(contender, MlxLm) else (False, contender.draft_k)
            return expected[key][index] if contender.draft_k else None

        repeats = measure(contenders, rest, count, reference, lambda: progress.advance(task))
    runtime = pair.runtime
    return {
        "benchmark": "throughput",
        "model": pair.target.name,
        "draft_model": pair.draft.name if pair.draft is not None else None,
        "dtype": pair.target.dtype,
        "device": runtime.device,
        "device_name": runtime.device_name,
        "cpus": cpu_count(),
        "others_cpu": watch.others(),
        "blas": runtime.blas,
        "versions": runtime.versions,
        "temperature": 0,
        "rows": rows(repeats, costs),
        "draft_ks": drafted,
        "prompt_tokens": len(prompts[0]),
        "max_tokens": count,
        "repeats": len(rest),
        "capacity": capacity,
        "forward_s": None if costs is None else attrs.asdict(costs),
    }


def _ids(contender: Contender, prompt: Sequence[int], count: int) -> list[int]:
    contender.begin(prompt, count)
    contender.finish()
    return contender.ids


def _costs(pair: Pair, draft_ks: Sequence[int], capacity: int, length: int) -> Costs | None:
    if pair.draft is None or not draft_ks:
        return None
    return forward_costs(pair, draft_ks, capacity=capacity, position=length // 2)
