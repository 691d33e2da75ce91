"""What commands make of a broken verdict."""

import click

from posttrainllm.adapters.gate.cache import known_broken
from posttrainllm.adapters.loading.pair import Pair

__all__ = ["AGAIN", "broken_reason", "unless_broken"]

AGAIN = "(`posttrainllm gate --fresh` looks again)"
"""Behind a warning: how the user gets rid of it."""


def broken_reason(reason: str) -> str:
    """Why nothing is drafted, given a broken verdict's reason."""
    return f"broken, says the gate: {reason}"


def unless_broken(pair: Pair, draft_k: int) -> Pair:
    """The pair, or its target alone where the gate has found that the draft changes the output here.

    Args:
        pair: loaded.
        draft_k: K.

    Returns:
        The pair itself, or a plain one whose `reason` says why, after one warning on standard error. No gate is run.
    """
    reason = known_broken(pair, draft_k)
    if reason is None:
        return pair
    click.echo(
        f"warning: the gate calls this pair broken here, decoding without the draft: {reason} {AGAIN}",
        err=True,
    )
    return pair.plain(broken_reason(reason))
