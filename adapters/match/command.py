"""`posttrainllm match`: parse, call, print."""

import json
from typing import Any

import click

from posttrainllm.adapters.change_options import change_options
from posttrainllm.adapters.checks import check_not_empty
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import DTYPES, FORWARDS, Pair, load_pair
from posttrainllm.adapters.status_line import status_line, writer

__all__ = ["match"]


@click.command()
@click.argument("model", metavar="[TARGET]", required=False)
@click.option(
    "--candidates",
    multiple=True,
    metavar="DIR",
    help="A model, or a directory of models; may be given several times. Default: the hub's cache here, and the "
    "package's models, of which the 8 smallest that fit are measured.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="As in `sample`.")
@click.option("--forward", type=click.Choice(FORWARDS), default="auto", show_default=True, help="As in `sample`.")
@change_options(drafted=False)
@click.option("--fresh", is_flag=True, help="Measure although the results are on file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def match(
    *,
    model: str | None,
    candidates: tuple[str, ...],
    dtype: str,
    forward: str,
    changes: ModelChanges,
    fresh: bool,
    as_json: bool,
) -> None:
    """Find the draft that makes TARGET fastest on this machine, or say that none does.

    A candidate must be smaller than TARGET and mean the same by every token id. Those that are left decode a few
    prompts, and their steps are clocked; Leviathan's formula says what that makes of the speed. TARGET is a directory,
    a .tinygpt or GGUF file, or an id of the hub; without it, the embedded target. Results are kept.
    """
    from posttrainllm.adapters.loading.found import models_in

    for folder in candidates:
        check_not_empty("--candidates", folder, "a directory of models")
    found = [model for folder in candidates for model in models_in(folder)]
    with status_line() as status:
        pair = load_pair(model, speculate=False, dtype=dtype, forward=forward, changes=changes)
        from posttrainllm.adapters.match.auto import MOST, local_models, say
        from posttrainllm.adapters.match.decide import Search
        from posttrainllm.adapters.match.measure import Setting
        from posttrainllm.adapters.match.report import command_of, table

        search = Search(
            pair=pair,
            setting=Setting(),
            dtype=dtype,
            forward=forward,
            changes=changes,
            fresh=fresh,
            most=None if candidates else MOST,
            say=say,
            progress=writer(status),
        )
        decision = search.decide(found if candidates else local_models(say))
    command = command_of(decision, model, dtype=dtype, forward=forward, changes=changes)
    if not as_json:
        click.echo("\n".join(table(decision, pair, command, changes)))
        return
    winner = decision.winner
    value = {
        **_setting_of(pair),
        "candidates": [candidate.to_dict() for candidate in decision.candidates],
        "measured": decision.fresh,
        "winner": None if winner is None else winner.name,
        "reason": decision.reason,
        "command": command,
    }
    click.echo(json.dumps(value, ensure_ascii=False))


def _setting_of(pair: Pair) -> dict[str, Any]:
    """What the numbers were measured on."""
    from posttrainllm.adapters.match.measure import MAX_TOKENS, PROMPTS

    runtime, packing = pair.runtime, pair.target.packing
    return {
        "target": pair.target.name,
        "dtype": pair.target.dtype,
        **({} if not pair.adapters else {"adapters": pair.adapters}),
        **({} if packing is None else {"kv_bits": packing.bits, "kv_group_size": packing.group_size}),
        "device": runtime.device,
        "device_name": runtime.device_name,
        "blas": runtime.blas,
        "versions": runtime.versions,
        "temperature": 0,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
    }
