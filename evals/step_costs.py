"""Where each microsecond of a step goes: `python -m posttrainllm.evals.step_costs`.

The step, its forwards and the engine's loop are timed one after the other, so that parts are found by leaving others
out. Beside them stands the limit: bytes of weights over what the memory delivers to a large copy, or to a product
that reads a large matrix once. The last table is the price of a cache's capacity: forwards alone go over all C slots,
the step over those in use where its forwards can.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import attrs
import click

from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import Pair, load_pair
from posttrainllm.adapters.options import check_draft_k, model_options
from posttrainllm.evals.bench.machine import cpu_count
from posttrainllm.evals.bench.shapes import SHAPES, shapes_on_disk
from posttrainllm.evals.entry import run_command
from posttrainllm.kernel.errors import UsageError

__all__ = ["command", "format_costs", "step_costs"]

_SHORT = 256
_TEXT = 64
_LONG = (1024, 4096, 32768)


def step_costs(pair: Pair, *, draft_k: int, capacities: Sequence[int] = _LONG, samples: int = 9) -> dict[str, Any]:
    """Time a greedy step of one row and its parts.

    Args:
        pair: with a draft.
        draft_k: K.
        capacities: C whose price is asked, beside 256.
        samples: of each time; medians are taken.

    Returns:
        What the JSON line holds; all times in seconds.

    Raises:
        UsageError: the pair has no draft.
    """
    if pair.draft is None:
        raise UsageError("got no draft model, expected one: a plain step is its forward")
    from posttrainllm.evals.bench.parts import measure_parts

    every = list(dict.fromkeys((_SHORT, 2 * _SHORT, *capacities)))
    measured, bandwidth, others = measure_parts(pair, draft_k, every, samples=samples, length=_TEXT)
    by_capacity = {parts.capacity: parts for parts in measured}
    base, double = by_capacity[_SHORT], by_capacity[2 * _SHORT]
    attention = double.verify - base.verify + double.draft - base.draft  # as many slots again
    target, draft = pair.target.weight_bytes / bandwidth, pair.draft.weight_bytes / bandwidth
    return {
        "benchmark": "step-costs",
        "model": pair.target.name,
        "draft_model": pair.draft.name,
        "variants": [pair.target.variant, pair.draft.variant],
        "dtype": pair.target.dtype,
        "draft_k": draft_k,
        "device": pair.runtime.device,
        "device_name": pair.runtime.device_name,
        "cpus": cpu_count(),
        "blas": pair.runtime.blas,
        "versions": pair.runtime.versions,
        "others_cpu": others,
        "bandwidth_bytes_per_s": bandwidth,
        "weight_bytes": [pair.target.weight_bytes, pair.draft.weight_bytes],
        "capacity": _SHORT,
        "parts": {
            "draft": base.draft,
            "verify": base.verify,
            "choosing": base.step - base.draft - base.plain_step,
            "commit": base.plain_step - base.verify,
            "step": base.step,
            "engine_step": base.engine_step,
            "host_not_hidden": base.engine_step - base.step,
            "call": base.call,
            "launch": base.launch,
            "attention": attention,
            "plain": base.plain,
        },
        "limit": {"draft": draft_k * draft, "verify": target, "step": target + draft_k * draft, "plain": target},
        "by_capacity": [attrs.asdict(by_capacity[capacity]) for capacity in sorted(by_capacity)],
    }


_NAMES = {
    "draft": "draft's K forwards",
    "verify": "target's forward, width K + 1",
    "choosing": "proposals chosen, accepted (what is left)",
    "commit": "window, argmax, commit (as without a draft)",
    "step": "the step",
    "engine_step": "a step of the engine, read",
    "host_not_hidden": "of it host, not hidden",
    "call": "host: building its graph",
    "launch": "host: until it is launched",
    "attention": "what 256 slots more cost the forwards",
    "plain": "plain forward, width 1",
}


def format_costs(result: dict[str, Any]) -> list[str]:
    """The result for people.

    Args:
        result: of `step_costs`.

    Returns:
        Lines: the parts with their limits, then the price of a capacity.
    """
    step = result["parts"]["step"]
    lines = [f"{'':42}{'ms':>9}{'of a step':>11}{'limit, ms':>11}"]
    for name, seconds in result["parts"].items():
        limit = result["limit"].get(name)
        cells = [f"{seconds * 1e3:.3f}", f"{seconds / step:.0%}", "" if limit is None else f"{limit * 1e3:.3f}"]
        lines.append("{:42}{:>9}{:>11}{:>11}".format(_NAMES[name], *cells).rstrip())
    lines += ["", f"{'C':>8}{'plain, ms':>12}{'verify, ms':>12}{'draft, ms':>12}{'step, ms':>12}{'step':>8}"]
    for parts in result["by_capacity"]:
        times = (parts["plain"], parts["verify"], parts["draft"], parts["step"])
        cells = [f"{seconds * 1e3:.3f}" for seconds in times]
        lines.append(
            "{:>8}{:>12}{:>12}{:>12}{:>12}{:>8}".format(parts["capacity"], *cells, f"{parts['step'] / step:.2f}x")
        )
    others = result["others_cpu"]
    target, draft = result["variants"]
    return [
        *lines,
        f"\nK={result['draft_k']}, C={result['capacity']}, forwards {target} and {draft}, {result['dtype']}, "
        f"{result['device_name']}, the memory moves {result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s"
        + ("" if others is None else f"; others used {others:.0%} of the CPUs meanwhile"),
    ]


def _parse_capacities(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--capacities: got {text!r}, expected whole numbers with commas between them") from None
    wrong = [size for size in sizes if size < _SHORT or size % _SHORT]
    if wrong:
        raise UsageError(f"--capacities: got {wrong[0]}, expected multiples of {_SHORT}, as decoding takes them")
    return sizes


@click.command(help="Time a greedy step and its parts, beside the limit of the memory; JSON on the last line.")
@model_options()
@click.option(
    "--shapes", metavar="TARGET+DRAFT", help=f"Random weights in place of models: two of {', '.join(SHAPES)}."
)
@click.option("--draft-k", type=int, default=4, show_default=True, help="K.")
@click.option(
    "--capacities",
    default=",".join(map(str, _LONG)),
    show_default=True,
    metavar="LIST",
    help="Cache slots whose price is asked; the text stays short.",
)
@click.option("--samples", type=click.IntRange(1), default=9, show_default=True, help="Of each time.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line alone.")
def command(
    *,
    model: str | None,
    draft_model: str | None,
    dtype: str,
    forward: str,
    changes: ModelChanges,
    shapes: str | None,
    draft_k: int,
    capacities: str,
    samples: int,
    as_json: bool,
) -> None:
    """Load, measure, print."""
    check_draft_k(draft_k)
    sizes = _parse_capacities(capacities)
    with contextlib.ExitStack() as stack:
        if shapes is not None:
            model, draft_model = shapes_on_disk(shapes, model, draft_model, stack)
        pair = load_pair(model, draft_model, dtype=dtype, forward=forward, changes=changes)
        result = step_costs(pair, draft_k=draft_k, capacities=sizes, samples=samples)
        result["changes"] = changes.options
    if not as_json:
        click.echo("\n".join(format_costs(result)))
    click.echo(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    run_command(command)
