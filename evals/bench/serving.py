"""Answers of servers, measured in turns and summed up."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs

from posttrainllm.evals.bench.asking import Answer, Asker, Group

__all__ = ["ACCEPTED_WELL", "Contender", "Rounds", "format_serving", "measure_serving", "summarize_serving"]

Rounds: TypeAlias = list[list[Group]]
"""For every group of prompts what each contender made of it, in the contenders' order."""
ACCEPTED_WELL = 0.6
"""An accept rate that is worth the draft."""
_LINE = "{:<22}{:>8}  {:<14}{:>6}  {:<12}{:>9}  {}"


@attrs.frozen(kw_only=True)
class Contender:
    """One way to ask; the first of several speculates, the second is the same server without."""

    name: str
    asker: Asker
    speculative: bool | None
    """The field of the request; None leaves it out."""


def measure_serving(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    count: int,
    parallel: int,
    progress: Callable[[], None] = lambda: None,
) -> Rounds:
    """Ask everyone for every prompt, in turns; the first group warms up and is not counted.

    Args:
        contenders: one or more.
        prompts: ids of each, all different, in groups of `parallel`.
        count: ids to generate.
        parallel: requests at a time.
        progress: called after each group that is counted.

    Returns:
        The rounds, one for each group but the first.
    """
    groups = [prompts[first : first + parallel] for first in range(0, len(prompts), parallel)]
    for contender in contenders:
        contender.asker.ask(groups[0], count, speculative=contender.speculative)
    rounds = []
    for index, group in enumerate(groups[1:]):
        found: list[Group | None] = [None] * len(contenders)
        for turn in range(len(contenders)):
            column = (turn + index) % len(contenders)  # each group starts with another one
            contender = contenders[column]
            found[column] = contender.asker.ask(group, count, speculative=contender.speculative)
            progress()
        rounds.append([one for one in found if one is not None])
    return rounds


def summarize_serving(names: Sequence[str], rounds: Rounds) -> dict[str, Any]:
    """Rows of rates, what was accepted, and whether speculation changed a text.

    Args:
        names: the contenders', the speculating one first, the same server without second.
        rounds: of `measure_serving`.

    Returns:
        What the JSON line has of them. A ratio is taken within its round, to the one that does not speculate and was
        the fastest there.
    """
    best = [max(group.tokens_per_s for group in groups[1:]) for groups in rounds]
    rows = []
    for column, name in enumerate(names):
        groups = [of_round[column] for of_round in rounds]
        speeds = [group.tokens_per_s for group in groups]
        ratios = [speed / plain for speed, plain in zip(speeds, best, strict=True)]
        decode = [
            answer.decode_tokens_per_s
            for group in groups
            for answer in group.answers
            if answer.decode_tokens_per_s is not None
        ]
        rows.append(
            {
                "name": name,
                "tok_s": round(statistics.median(speeds), 2),
                "tok_s_range": [round(min(speeds), 2), round(max(speeds), 2)],
                "ratio": round(statistics.median(ratios), 3),
                "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "decode_tok_s": round(statistics.median(decode), 2) if decode else None,
                "prompts": sum(len(group.answers) for group in groups),
                "equal": _equal(rounds, column),
            }
        )
    drafted = [answer for groups in rounds for answer in groups[0].answers]
    return {"rows": rows, "accept_rate": _accepted(drafted), "failed": rows[1]["equal"] < rows[1]["prompts"]}


def _equal(rounds: Rounds, column: int) -> int:
    """How many texts are those of the speculating contender."""
    return sum(
        ours.text == theirs.text
        for groups in rounds
        for ours, theirs in zip(groups[0].answers, groups[column].answers, strict=True)
    )


def _accepted(answers: Sequence[Answer]) -> dict[str, Any]:
    rates = [answer.accept_rate for answer in answers if answer.accept_rate is not None]
    proposed = sum(answer.proposed for answer in answers)
    return {
        "requests": len(rates),
        "mean": round(statistics.fmean(rates), 4) if rates else None,
        "min": round(min(rates), 4) if rates else None,
        "share_0.6": round(sum(rate >= ACCEPTED_WELL for rate in rates) / len(rates), 4) if rates else None,
        "pooled": round(sum(answer.accepted for answer in answers) / proposed, 4) if proposed else None,
    }


def format_serving(summary: dict[str, Any]) -> list[str]:
    """The summary for people.

    Args:
        summary: from `summarize_serving`.

    Returns:
        Lines: a row a contender, then what was accepted.
    """
    lines = [_LINE.format("", "tok/s", "min-max", "ratio", "min-max", "decode", "text").rstrip()]
    for column, row in enumerate(summary["rows"]):
        rates = [
            f"{row['tok_s']:.1f}",
            "{:.1f}-{:.1f}".format(*row["tok_s_range"]),
            f"{row['ratio']:.2f}",
            "{:.2f}-{:.2f}".format(*row["ratio_range"]),
            "-" if row["decode_tok_s"] is None else f"{row['decode_tok_s']:.1f}",
        ]
        if column == 0 and summary["failed"]:  # a fast wrong answer is none
            rates = ["failed", "", "", "", ""]
        text = "" if column == 0 else f"{row['equal']} of {row['prompts']} the same as speculative"
        lines.append(_LINE.format(row["name"], *rates, text).rstrip())
    accepted = summary["accept_rate"]
    if accepted["mean"] is not None:
        lines.append(
            f"accept rate of {accepted['requests']} requests: mean {accepted['mean']:.3f}, minimum "
            f"{accepted['min']:.3f}, {accepted['share_0.6']:.0%} at {ACCEPTED_WELL} or more; "
            f"of all proposals {accepted['pooled']:.3f}"
        )
    return lines
