"""What commands make of a verdict on file."""

import click

from posttrainllm.adapters.gate.cache import known_broken
from posttrainllm.adapters.loading.pair import Pair

__all__ = ["unless_broken"]


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
        f"warning: the gate calls this pair broken here, decoding without the draft: {reason} "
        "(`posttrainllm gate --fresh` looks again)",
        err=True,
    )
    return pair.plain(f"broken, says the gate: {reason}")
