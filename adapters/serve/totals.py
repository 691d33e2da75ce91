"""What the choices of a request add up to."""

from collections.abc import Sequence
from typing import Any

from posttrainllm.adapters.serve.jobs import Outcome
from posttrainllm.adapters.serve.prepare import Work

__all__ = ["totals"]


def totals(work: Work, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """`usage`, `speculative` and `timings`.

    Args:
        work: what was asked for.
        outcomes: one of every choice.

    Returns:
        Counts are sums, a prompt counted once for all its choices. Times are the longest of any choice, the one to the
        first token the shortest; `decode_tokens_per_s` is that of a single choice, and null for several.
    """
    completed = sum(outcome.usage.completion_tokens for outcome in outcomes)
    proposed = sum(outcome.usage.draft_proposed for outcome in outcomes)
    accepted = sum(outcome.usage.draft_accepted for outcome in outcomes)
    timings = [outcome.timings for outcome in outcomes]
    steps = sum(timing.steps for timing in timings)
    # choices differ in it only where the gate's verdict came between them: the last one to end tells
    speculative = outcomes[-1].speculative
    return {
        "usage": {
            "prompt_tokens": work.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": _cached(work, outcomes)},
            "completion_tokens": completed,
            "total_tokens": work.prompt_tokens + completed,
            "draft_proposed": proposed,
            "draft_accepted": accepted,
            "accept_rate": accepted / proposed if proposed else None,
        },
        "speculative": speculative,
        "timings": _rounded(
            {
                "queue_s": max(outcome.queue_s for outcome in outcomes),
                "prefill_s": max(timing.prefill_s for timing in timings),
                "ttft_s": min(timing.ttft_s for timing in timings),
                "decode_s": max(timing.decode_s for timing in timings),
                "decode_tokens_per_s": timings[0].decode_tokens_per_s if len(timings) == 1 else None,
                "steps": steps,
                "tokens_per_step": completed / steps if steps else None,
            }
        ),
    }


def _cached(work: Work, outcomes: Sequence[Outcome]) -> int:
    """Tokens of the prompts that were not computed: of each prompt those that none of its choices computed."""
    choices = len(work.choices) // work.prompts
    least: dict[int, int] = {}
    for outcome in outcomes:
        prompt = outcome.index // choices
        least[prompt] = min(outcome.cached_tokens, least.get(prompt, outcome.cached_tokens))
    return sum(least.values())


def _rounded(timings: dict[str, Any]) -> dict[str, Any]:
    """To microseconds."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in timings.items()}
