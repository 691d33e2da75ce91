"""`--draft-model auto`: the draft on this machine that pays best."""

from collections.abc import Callable
from pathlib import Path

import attrs
import click

from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.found import FoundModel, embedded_models, hub_models
from posttrainllm.adapters.loading.pair import AUTO, Pair, load_pair, with_draft
from posttrainllm.kernel.errors import CheckpointError, LoadError, MemoryLimitError, UsageError

__all__ = ["MOST", "load_chosen", "local_models", "say"]

MOST = 8
"""How many candidates are measured: somebody waits for it."""


def say(line: str) -> None:
    """Write a line to standard error.

    Args:
        line: of it.
    """
    click.echo(line, err=True)


def local_models(say: Callable[[str], None]) -> list[FoundModel]:
    """The models on this machine: those of the hub's cache and of the package. Nothing is downloaded.

    Args:
        say: told where the cache cannot be read.

    Returns:
        The models.
    """
    try:
        cached = hub_models()
    except CheckpointError as error:
        say(f"the hub's cache is left out: {error}")
        cached = []
    return cached + embedded_models()


def load_chosen(
    model: str | Path | None,
    draft_model: str | Path | None,
    *,
    speculate: bool,
    dtype: str,
    forward: str,
    changes: ModelChanges = UNCHANGED,
    draft_k: DraftLength,
    rows: int = 1,
    context: int | None = None,
    say: Callable[[str], None],
    tell: Callable[[str], None] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Pair, DraftLength]:
    """Load what the arguments name, as `load_pair` does; "auto" for a draft is the one here that pays best.

    Args:
        model: the target.
        draft_model: the draft, or "auto".
        speculate: False loads no draft.
        dtype: one of DTYPES.
        forward: one of FORWARDS.
        changes: adapters, and how keys and values are kept; "auto" takes no adapter of a draft.
        draft_k: of `--draft-k`; where nobody asked for one, K is chosen with the draft.
        rows: B of what will decode.
        context: most tokens of a row; None is that of a short request.
        say: told, one line each, that candidates are measured, and why no draft is taken.
        tell: told which draft is taken; None tells nobody.
        progress: told what is being done while candidates are measured, a line each time.

    Returns:
        The pair, plain where no draft pays, and K.

    Raises:
        PosttrainllmError: see `load_pair`.
    """
    if draft_model == AUTO and not speculate:
        raise UsageError("got both --draft-model auto and --no-draft (speculate=False), expected one of them")
    if draft_model != AUTO:
        pair = load_pair(model, draft_model, speculate=speculate, dtype=dtype, forward=forward, changes=changes)
        return pair, draft_k
    if changes.draft_options:
        raise UsageError(f"--draft-model auto: got it with {changes.draft_options[0]}, expected the path of a draft")
    pair = load_pair(model, speculate=False, dtype=dtype, forward=forward, changes=changes)
    from posttrainllm.adapters.match.decide import Search
    from posttrainllm.adapters.match.measure import Setting

    setting = Setting(rows=rows, context=context, draft_k=draft_k)
    search = Search(
        pair=pair,
        setting=setting,
        dtype=dtype,
        forward=forward,
        changes=changes,
        most=MOST,
        say=say,
        progress=progress,
    )
    decision = search.decide(local_models(say))
    winner, reason = decision.winner, decision.reason
    if winner is not None and winner.measured is not None:
        try:
            chosen = with_draft(pair, winner.path, dtype=dtype, forward=forward, changes=changes)
        except (LoadError, MemoryLimitError) as error:  # measured before, and now there is less room
            reason = f"the best, {winner.name}, cannot be loaded now: {error}"
        else:
            best = winner.measured.best.draft_k
            draft_k = draft_k if draft_k.given else attrs.evolve(draft_k, most=best)
            if tell is not None:
                tell(
                    f"draft: {winner.name}, K={best}, predicted {winner.speed_up:.2f} times the speed of plain decoding"
                )
            return chosen, draft_k
    say(f"decoding without a draft: {reason}")
    return pair.plain(reason or "no draft was found"), draft_k
