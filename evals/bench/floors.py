"""The ratios that say whether speculation is worth its name here, beside what they have to be and what is aimed at.

Floors and aims are those of two pairs: the embedded one on a CPU, and one of the shapes "mega" and "tiny" at an accept
rate of 0.8, simulated, on a GPU. For other pairs they are a measure to hold against.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from posttrainllm.evals.bench.contenders import SAME_PROCESS
from posttrainllm.evals.bench.measure import Round

__all__ = ["find_ratios", "format_ratios", "main_k"]


def main_k(draft_ks: Sequence[int]) -> int:
    """The K that the ratios are of: 4 where it is measured, else the largest."""
    return 4 if 4 in draft_ks else max(draft_ks)


def find_ratios(result: dict[str, Any], repeats: Sequence[Sequence[Round]]) -> list[dict[str, Any]]:
    """Every ratio of which both sides were measured.

    Args:
        result: what the JSON line holds so far.
        repeats: the rounds of every prompt.

    Returns:
        Each with its name, value, unit, floor and aim (None where there is none for this device); the value is the
        median of the ratios within each prompt.
    """
    return [*_of_rounds(result, repeats), *_of_the_rest(result)]


def _of_rounds(result: dict[str, Any], repeats: Sequence[Sequence[Round]]) -> Iterator[dict[str, Any]]:
    on_gpu = result["device"] == "gpu"

    def plain(*engines: str) -> Callable[[Round], bool]:
        return lambda one: not one.draft_k and one.engine in engines

    def fastest(of_prompt: Sequence[Round], chosen: Callable[[Round], bool]) -> float | None:
        return max((one.tokens_per_s for one in of_prompt if chosen(one)), default=None)

    def ratio(name: str, ours: Callable[[Round], bool], others: Callable[[Round], bool], *wanted: float) -> Any:
        both = [(fastest(of_prompt, ours), fastest(of_prompt, others)) for of_prompt in repeats]
        found = [a / b for a, b in both if a is not None and b is not None]
        return _entry(name, statistics.median(found), "x", *wanted) if found else None

    k = main_k(result["draft_ks"]) if result["draft_ks"] else None

    def drafted(engine: str) -> Callable[[Round], bool]:
        return lambda one: one.draft_k == k and one.engine == engine

    own, ours, theirs = drafted("posttrainllm"), plain("posttrainllm"), plain("mlx-lm")
    installed = "mlx-lm as installed"

    def gpu(*wanted: float) -> tuple[float, ...]:
        return wanted if on_gpu else ()

    def cpu(*wanted: float) -> tuple[float, ...]:
        return () if on_gpu or result.get("simulated") else wanted  # they are of the embedded pair

    found = [
        ratio(f"speculative, K={k} / faster plain", own, plain(*SAME_PROCESS), *gpu(1.4, 2.5)),
        ratio(f"speculative, K={k} / our plain", own, ours, *cpu(1.5, 2.0)),
        ratio(f"speculative, K={k} / mlx-lm speculative", own, drafted("mlx-lm"), *gpu(3.0, 4.0)),
        ratio("our plain, width 1 / mlx-lm plain", ours, theirs, *gpu(1.0, 1.5)),
        ratio(f"speculative, K={k} / transformers plain", own, plain("transformers"), *gpu(1.2, 2.0)),
        ratio(f"speculative, K={k} / mlx-lm plain as installed", own, plain(installed), *cpu(3.4, 5.0)),
        ratio(f"speculative, K={k} / mlx-lm speculative as installed", own, drafted(installed), *cpu(2.2, 3.5)),
    ]
    yield from (one for one in found if one is not None)
    row = next((row for row in result["rows"] if row["draft_k"] == k and "reached" in row), None)
    if row is not None:
        yield _entry(f"share of the predicted speed-up, K={k}", row["reached"], "", *gpu(0.85, 0.95))


def _of_the_rest(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    on_gpu = result["device"] == "gpu"
    for row in (result.get("batch") or {}).get("rows", [])[1:]:
        first = result["batch"]["rows"][0]["rows"]
        wanted = (4.0, 6.0) if on_gpu and (first, row["rows"]) == (1, 8) else ()
        yield _entry(f"{row['rows']} rows / {first}, tokens a second of all", row["ratio"], "x", *wanted)
    for rule in (result.get("sampled") or [])[1:]:
        yield _entry(f"step at {rule['rule']} / at T=0", rule["ratio"], "x", 1.15, 1.05)
    for run in result.get("start_up") or []:
        wanted = (2.0, 0.8) if run["name"].startswith("posttrainllm") and not on_gpu else ()
        yield _entry(f"shell to first token, {run['name']}", run["first_token_s"], "s", *wanted)


def _entry(name: str, value: float, unit: str, floor: float | None = None, aim: float | None = None) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "unit": unit, "floor": floor, "aim": aim}


def format_ratios(ratios: Sequence[dict[str, Any]]) -> list[str]:
    """The ratios for people.

    Args:
        ratios: from `find_ratios`.

    Returns:
        Lines, one a ratio below a header; nothing without any.
    """
    if not ratios:
        return []
    lines = ["", f"{'':52}{'':>9}{'floor':>8}{'aim':>8}"]
    for one in ratios:
        cells = [_cell(one[name], one["unit"]) for name in ("value", "floor", "aim")]
        lines.append("{:<52}{:>9}{:>8}{:>8}".format(one["name"], *cells).rstrip())
    return lines


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.2f}{unit}" if unit else f"{value:.0%}"
