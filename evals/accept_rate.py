"""How much of what the draft proposes the target takes: `python -m posttrainllm.evals.accept_rate`.

An accept rate is accepted / proposed, both summed over every step of every prompt. A step proposes K ids, fewer where
fewer are left to generate; those behind a refused one count as proposed. The rate over the first 32 tokens sums the
whole steps that start with fewer than 32 ids of their prompt generated: their proposals behind the 32nd token count
too, since cutting them off would leave out the ones that are refused most.

Greedy text of a small model ends in loops, and loops are easy to propose: so the share of repeated 4-grams, the rate
over the first tokens and the rates at T=1 stand beside the headline.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posttrainllm.adapters.batch import decode
from posttrainllm.adapters.change_options import change_options
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import DTYPES, FORWARDS, Pair, load_pair
from posttrainllm.adapters.params import MAX_DRAFT_K, is_text
from posttrainllm.evals.counting import acceptance, count_equal, generated, repeated_share
from posttrainllm.evals.entry import run_command
from posttrainllm.kernel.errors import CapacityError, UsageError

if TYPE_CHECKING:  # it imports MLX, and the BLAS must come first
    from posttrainllm.adapters.rows import RowRequest, RowStep

__all__ = ["HELD_OUT", "command", "measure", "read_prompts"]

HELD_OUT = Path(__file__).parent / "prompts" / "heldout.jsonl"
_FIRST_TOKENS = 32
_DIFFERS = 3  # exit status: speculative output is not the reference's


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Read JSON lines with a `text` and, where known, the `continuation` it has in its source.

    Args:
        path: the file, UTF-8; fields of other names are for people.

    Returns:
        Pairs of text and continuation, one or more; "" for a continuation that is not there.

    Raises:
        UsageError: the file cannot be read, or a line is not such an object.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        prompts = [(record["text"], record.get("continuation", "")) for record in map(json.loads, lines)]
    except OSError as error:
        raise UsageError(f"--prompts-file: {path}: {error.strerror or error}") from None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        prompts = []
    if not prompts or not all(is_text(text) and (rest == "" or is_text(rest)) for text, rest in prompts):
        raise UsageError(
            f"--prompts-file: {path}: expected a JSON object a line, with a `text` that is not empty"
        ) from None
    return prompts


def measure(
    pair: Pair, prompts: Sequence[tuple[str, str]], *, draft_k: int, max_tokens: int, rows: int
) -> dict[str, Any]:
    """Decode every prompt five times and count.

    Greedily, at T=1 with each accept rule (seed = index of the prompt), and plainly at widths K + 1 and 1; all with the
    same rows and capacity.

    Args:
        pair: with a draft.
        prompts: from `read_prompts`.
        draft_k: K, 1 to 32.
        max_tokens: ids to generate a prompt, 1 or more; an end-of-text id is one like any other.
        rows: B of every engine, 1 or more.

    Returns:
        The counts and what they were measured on, for JSON. Rates are None where nothing was counted.

    Raises:
        UsageError: the pair has no draft.
        CapacityError: a prompt is empty, or does not fit the context.
    """
    from posttrainllm.adapters.engine import Engine
    from posttrainllm.adapters.shapes import capacity_for

    if pair.draft is None:
        raise UsageError("got no draft model, expected one: nothing is proposed without it")
    greedy = _requests(pair, [text for text, _ in prompts], draft_k, max_tokens)
    sampled = [attrs.evolve(request, temperature=1.0) for request in greedy]
    coupled = [attrs.evolve(request, coupled=True) for request in sampled]
    capacity = capacity_for(max(request.limit for request in greedy), draft_k + 1)
    engine = Engine(pair, capacity=capacity, width=draft_k + 1, rows=rows)
    runs = {
        "t0": decode(engine, greedy),
        "t1_leviathan": decode(engine, sampled),
        "t1_coupled": decode(engine, coupled),
    }
    plain_pair = pair.plain("a reference is decoded plainly")
    reference, narrow = (
        decode(Engine(plain_pair, capacity=capacity, width=width, rows=rows), greedy) for width in (draft_k + 1, 1)
    )
    source = [
        pair.tokenizer.encode(text + rest)[len(request.prompt) :]
        for (text, rest), request in zip(prompts, greedy, strict=True)
    ]
    return {
        "prompts": len(prompts),
        "max_tokens": max_tokens,
        "draft_k": draft_k,
        **{name: _summary(run) for name, run in runs.items()},
        "source_repeated_4_grams": repeated_share(source),
        "equal_width_k_plus_1": count_equal(runs["t0"], reference),
        "equal_width_1": count_equal(runs["t0"], narrow),
        "model": pair.target.label,
        "draft_model": pair.draft.label,
        "dtype": pair.target.dtype,
        "rows": rows,
        "capacity": capacity,
        **{name: getattr(pair.runtime, name) for name in ("device", "device_name", "blas", "mlx_version")},
    }


def _requests(pair: Pair, texts: Sequence[str], draft_k: int, max_tokens: int) -> list["RowRequest"]:
    from posttrainllm.adapters.rows import RowRequest

    ids = [pair.tokenizer.encode(text) for text in texts]
    longest, context = max(map(len, ids)) + max_tokens, pair.target.context
    if longest > context:
        raise CapacityError(f"got a prompt that ends at {longest} tokens, expected at most the context of {context}")
    return [RowRequest(prompt=p, limit=len(p) + max_tokens, seed=i, draft_k=draft_k) for i, p in enumerate(ids)]


def _summary(runs: Sequence[Sequence["RowStep"]]) -> dict[str, Any]:
    counts = {"": acceptance(runs), "_first_32": acceptance(runs, _FIRST_TOKENS)}
    texts = generated(runs)
    return {
        **{f"accept_rate{name}": hits / tried if tried else None for name, (hits, tried) in counts.items()},
        **{f"accepted_proposed{name}": list(both) for name, both in counts.items()},
        "tokens_per_step": sum(map(len, texts)) / sum(map(len, runs)),
        "repeated_4_grams": repeated_share(texts),
    }


def _table(result: dict[str, Any]) -> list[str]:
    columns = ("accept_rate", "accept_rate_first_32", "tokens_per_step", "repeated_4_grams")
    lines = [f"{'':14}{'accept rate':>14}{'first 32':>14}{'tokens/step':>14}{'repeated 4':>14}"]
    for name in ("t0", "t1_leviathan", "t1_coupled"):
        lines.append(f"{name:14}" + "".join(f"{_number(result[name][column]):>14}" for column in columns))
    lines.append(f"{'source':14}{_number(result['source_repeated_4_grams']):>56}")
    for name, width in (("equal_width_k_plus_1", result["draft_k"] + 1), ("equal_width_1", 1)):
        lines.append(f"equal to plain greedy at width {width}: {result[name]} of {result['prompts']} prompts")
    lines.append(
        f"{result['model']} + {result['draft_model']}, K={result['draft_k']}, {result['max_tokens']} tokens, "
        f"{result['rows']} rows, {result['device']} ({result['device_name']}), {result['dtype']}, "
        f"BLAS {result['blas'] or 'none'}, mlx {result['mlx_version']}"
    )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@click.command(help="Print a pair's accept rate on held-out prompts, with what qualifies it; JSON on the last line.")
@click.option("--model", metavar="PATH", help="Directory of the target. Default: the embedded one.")
@click.option(
    "--draft-model", metavar="PATH", help="Directory of the draft. Default without --model: the embedded one."
)
@click.option(
    "--draft-k", type=click.IntRange(1, MAX_DRAFT_K), default=4, show_default=True, help="Ids proposed a step."
)
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Ids to generate a prompt.")
@click.option("--prompts-file", type=click.Path(path_type=Path), default=HELD_OUT, help="Default: the held-out ones.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of both models.")
@click.option("--forward", type=click.Choice(FORWARDS), default="auto", show_default=True, help="As in `sample`.")
@change_options()
@click.option("--rows", type=click.IntRange(1), default=8, show_default=True, help="Prompts decoded at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def command(
    *,
    model: str | None,
    draft_model: str | None,
    draft_k: int,
    max_tokens: int,
    prompts_file: Path,
    dtype: str,
    forward: str,
    changes: ModelChanges,
    rows: int,
    as_json: bool,
) -> None:
    """Load, measure, print; exit status 3 when speculative output differs from the reference."""
    prompts = read_prompts(prompts_file)
    pair = load_pair(model, draft_model, dtype=dtype, forward=forward, changes=changes)
    result = measure(pair, prompts, draft_k=draft_k, max_tokens=max_tokens, rows=rows)
    result["changes"] = changes.options
    if not as_json:
        click.echo("\n".join(_table(result)))
    click.echo(json.dumps(result, ensure_ascii=False))
    if result["equal_width_k_plus_1"] != result["prompts"]:
        sys.exit(_DIFFERS)


if __name__ == "__main__":
    run_command(command)
