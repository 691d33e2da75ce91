"""From rounds to rows: medians, ratios, acceptance by position, prediction."""

import statistics
from collections.abc import Sequence
from typing import Any

from posttrainllm.evals.bench.contenders import SAME_PROCESS
from posttrainllm.evals.bench.costs import Costs, predicted_speedup
from posttrainllm.evals.bench.measure import Round

__all__ = ["acceptance_by_position", "format_table", "missing_fields", "summarize"]

_EVERY = ("name", "engine", "draft_k", "tok_s", "tok_s_range", "ratio", "ratio_range", "prompts", "failed")
_DRAFTED = ("equal", "accept_rate", "acceptance_by_position", "tokens_per_step")
_PREDICTED = ("draft_cost", "verify_cost", "predicted", "reached")
_LINE = "{:<{width}}{:>8}  {:<12}{:>6}  {:<10}{:>7}{:>7}  {}"
_COST_LINE = "{:>3}{:>16}{:>16}{:>12}{:>10}{:>10}   {}"


def acceptance_by_position(steps: Sequence[tuple[int, int]]) -> list[float]:
    """Share of the steps that accepted a proposal at a position, of those that had one there.

    Args:
        steps: (proposed, accepted) of each.

    Returns:
        One share for each position that was ever proposed.
    """
    most = max((proposed for proposed, _ in steps), default=0)
    shares = []
    for position in range(1, most + 1):
        there = [accepted for proposed, accepted in steps if proposed >= position]
        shares.append(sum(accepted >= position for accepted in there) / len(there))
    return shares


def summarize(repeats: Sequence[Sequence[Round]], costs: Costs | None) -> list[dict[str, Any]]:
    """One row a contender.

    Args:
        repeats: the rounds of every prompt, contenders in the same order in each.
        costs: of the forwards; None without a draft.

    Returns:
        Rows as the JSON line has them. A ratio is taken within its prompt, to the plain one of this process that was
        faster there.
    """
    best = [
        max(one.tokens_per_s for one in rounds if not one.draft_k and one.engine in SAME_PROCESS) for rounds in repeats
    ]
    own_plain = [rounds[0].tokens_per_s for rounds in repeats]
    found = []
    for column, first in enumerate(repeats[0]):
        rounds = [of_prompt[column] for of_prompt in repeats]
        speeds = [one.tokens_per_s for one in rounds]
        ratios = [speed / plain for speed, plain in zip(speeds, best, strict=True)]
        compared = [one.equal for one in rounds if one.equal is not None]
        row: dict[str, Any] = {
            "name": first.contender,
            "engine": first.engine,
            "draft_k": first.draft_k,
            "tok_s": round(statistics.median(speeds), 2),
            "tok_s_range": [round(min(speeds), 2), round(max(speeds), 2)],
            "ratio": round(statistics.median(ratios), 3),
            "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "prompts": len(rounds),
            "equal": sum(compared) if compared else None,
            "failed": not all(compared),
        }
        if first.draft_k:
            steps = [step for one in rounds for step in one.steps]
            row |= _drafted(steps, sum(one.tokens for one in rounds))
            if costs is not None and first.engine == "posttrainllm":
                against = statistics.median(speed / plain for speed, plain in zip(speeds, own_plain, strict=True))
                row |= _predicted(first.draft_k, steps, costs, against)
        found.append(row)
    return found


def _drafted(steps: Sequence[tuple[int, int]], tokens: int) -> dict[str, Any]:
    proposed = sum(step[0] for step in steps)
    return {
        "accept_rate": round(sum(step[1] for step in steps) / proposed, 4) if proposed else None,
        "acceptance_by_position": [round(share, 4) for share in acceptance_by_position(steps)],
        "tokens_per_step": round(tokens / len(steps), 3),
    }


def _predicted(draft_k: int, steps: Sequence[tuple[int, int]], costs: Costs, against: float) -> dict[str, Any]:
    """The formula wants the chance that a proposal stands once those before it do: accepted over those looked at."""
    accepted = sum(step[1] for step in steps)
    looked_at = accepted + sum(accepted_there < proposed for proposed, accepted_there in steps)
    draft_cost = costs.draft(draft_k) / draft_k / costs.plain
    verify_cost = costs.verify[draft_k] / costs.plain
    predicted = predicted_speedup(
        accepted / looked_at if looked_at else 0.0, draft_k, draft_cost=draft_cost, verify_cost=verify_cost
    )
    return {
        "draft_cost": round(draft_cost, 4),
        "verify_cost": round(verify_cost, 4),
        "predicted": round(predicted, 3),
        "reached": round(against / predicted, 3),
    }


def format_table(table: Sequence[dict[str, Any]]) -> list[str]:
    """The rows for people.

    Args:
        table: from `summarize`.

    Returns:
        Lines: rates, then for our speculative rows their costs, what the formula makes of them and how much is reached.
    """
    width = max(25, *(len(row["name"]) + 2 for row in table))
    rates = ("", "tok/s", "min-max", "ratio", "min-max", "accept", "a step", "output")
    printed = [_LINE.format(*rates, width=width).rstrip()]
    printed += [_LINE.format(*_cells(row), width=width).rstrip() for row in table]
    predicted = [row for row in table if "predicted" in row]
    if predicted:
        header = ("K", "draft / plain", "verify / plain", "predicted", "reached", "accepted", "at each position")
        printed += ["", _COST_LINE.format(*header).rstrip()]
        for row in predicted:
            printed.append(
                _COST_LINE.format(
                    row["draft_k"],
                    f"{row['draft_cost']:.2f}",
                    f"{row['verify_cost']:.2f}",
                    f"{row['predicted']:.2f}x",
                    f"{row['reached']:.0%}",
                    f"{row['accept_rate']:.3f}" if row["accept_rate"] is not None else "",
                    " ".join(f"{share:.2f}" for share in row["acceptance_by_position"]),
                )
            )
    return printed


def _cells(row: dict[str, Any]) -> list[str]:
    """A row that failed has no rate; one of mlx-lm's, which promises nothing, has it in brackets."""
    ours = row["engine"] == "posttrainllm"
    rates = [
        f"{row['tok_s']:.1f}",
        "{:.1f}-{:.1f}".format(*row["tok_s_range"]),
        f"{row['ratio']:.2f}",
        "{:.2f}-{:.2f}".format(*row["ratio_range"]),
    ]
    if row["failed"]:
        rates = ["failed", "", "", ""] if ours else [f"({rates[0]})", "", "", ""]
    drafted = [f"{row['accept_rate']:.3f}" if row.get("accept_rate") is not None else ""]
    drafted += [f"{row['tokens_per_step']:.2f}" if "tokens_per_step" in row else ""]
    output = "" if row["equal"] is None else f"{'differs' if row['failed'] else '='} {row['equal']}/{row['prompts']}"
    return [row["name"], *rates, *drafted, output]


def missing_fields(table: Sequence[dict[str, Any]]) -> list[str]:
    """What is missing in rows.

    Args:
        table: from `summarize`, or read back from the JSON line.

    Returns:
        One text for each field that is missing or empty; nothing when all is there.
    """
    missing = []
    for row in table:
        wanted = [*_EVERY]
        if row.get("draft_k"):
            wanted += _DRAFTED + (_PREDICTED if row.get("engine") == "posttrainllm" else ())
        missing += [f"{row.get('name')}: {name}" for name in wanted if row.get(name) in (None, [])]
    return missing
