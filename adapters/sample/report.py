"""The statistics that follow the text, on standard error."""

import sys

from rich.console import Console

from posttrainllm.adapters.payoff import Payoff
from posttrainllm.adapters.result import Result

__all__ = ["print_hint", "print_statistics", "statistics"]


def print_statistics(result: Result) -> None:
    """Write the statistics to standard error, dimmed on a terminal."""
    if sys.stderr is None:  # closed by whoever started us
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in statistics(result):
        console.print(line, style="dim", markup=False)


def print_hint(payoff: Payoff | None) -> bool:
    """Say on standard error that the draft does not pay, where that is so.

    Args:
        payoff: of the generation; None where nothing is known.

    Returns:
        Whether it was said.
    """
    if payoff is None or payoff.hint is None or sys.stderr is None:
        return False
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"hint: {payoff.hint}", markup=False)
    return True


def _lengths(result: Result) -> str:
    """The K of a run with a draft, or how often each was chosen."""
    steps = result.speculative.get("steps")
    if steps is None:
        return f"K={result.draft_k}"
    total = sum(steps.values())
    shares = ", ".join(f"{draft_k} in {count / total:.1%}" for draft_k, count in steps.items())
    return f"K=auto: {shares or 'none'} of the steps"


def statistics(result: Result) -> list[str]:
    """The lines of `print_statistics`.

    Args:
        result: what was generated.

    Returns:
        Lines: rates and times, the draft's part, and what it ran on.
    """
    usage, timings = result.usage, result.timings
    prompt_rate = f"{usage.prompt_tokens / timings.prefill_s:.1f} tok/s" if timings.prefill_s else "not timed"
    rate = timings.decode_tokens_per_s
    lines = [
        f"prompt {usage.prompt_tokens} tokens, {prompt_rate} | "
        f"decode {usage.completion_tokens} tokens, {'not timed' if rate is None else f'{rate:.1f} tok/s'} | "
        f"first token {timings.ttft_s:.2f} s | finish: {result.finish_reason}"
    ]
    if result.speculative["enabled"]:
        share = "nothing proposed" if usage.accept_rate is None else f"{usage.accept_rate:.3f}"
        lines.append(
            f"draft accepted {usage.draft_accepted} of {usage.draft_proposed} proposed ({share}) | "
            f"{timings.tokens_per_step or 0:.2f} tokens a step, {_lengths(result)}"
            + (f" | rule {result.accept_rule}" if result.accept_rule else "")
        )
    else:
        lines.append(f"no speculation: {result.speculative['reason']} | plain decoding at width {result.plain_width}")
    if result.sampling["temperature"] > 0:
        lines.append(f"temperature {result.sampling['temperature']:g} | seed {result.seed}")
    blas = f", BLAS {result.blas}" if result.blas else ""
    lines.append(f"peak MLX memory {result.peak_memory_bytes / 1e6:.0f} MB | {result.device}, {result.dtype}{blas}")
    return lines
