"""`posttrainllm bench`, also `python -m posttrainllm.evals.throughput`: does a draft pay on this machine?

The workload: prompts of 64 tokens, all different, 128 tokens generated, greedy, end of text ignored, no prefix used
twice. The prompt, the first step and a whole warm-up stand outside the clock; contenders take turns on every prompt.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.pair import Pair, load_pair
from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.options import check_draft_k, model_options
from posttrainllm.evals.accept_rate import HELD_OUT, read_prompts
from posttrainllm.evals.bench.extras import Extras, extra_options, extras_from
from posttrainllm.evals.bench.shapes import shapes_on_disk
from posttrainllm.kernel.errors import CapacityError, UsageError

__all__ = ["bench", "choose_prompts", "run"]

_FAILED = 3  # exit status: a row's output is not the reference's


@click.command()
@model_options()
@click.option("--draft-k", default="1,2,4,8", show_default=True, metavar="LIST", help="Ks to measure, 1 to 32 each.")
@click.option("--repeats", default=8, show_default=True, help="Prompts measured, each of its own.")
@click.option("--prompt-tokens", default=64, show_default=True, help="Tokens of each prompt.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens generated for each.")
@click.option("--prompts-file", metavar="FILE", help='JSON lines with a "text". Default: 40 from held-out packages.')
@click.option("--no-mlx-lm", is_flag=True, help="Leave mlx-lm's own loops out.")
@extra_options
@click.option("--plot", metavar="FILE.png", help="Draw speed and acceptance against K (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line alone.")
def bench(*, draft_k: str, plot: str | None, as_json: bool, **options: Any) -> None:
    """Measure decoding with and without a draft, ours and mlx-lm's, on one pair in one run.

    A speculative row of ours whose output is not that of plain decoding at the width of its verification is reported as
    failed, whatever its speed, and the exit status is 3. One of mlx-lm's is held against mlx-lm's own plain output, and
    its rate stands in brackets where it differs.
    """
    ks = _parse_ks(draft_k)
    target = None
    if plot is not None:
        from posttrainllm.evals.bench.plot import check_plot

        target = check_plot(plot)
    result = run(draft_ks=ks, quiet=as_json, **options)
    if not as_json:
        from posttrainllm.evals.bench.batch import format_batch
        from posttrainllm.evals.bench.floors import format_ratios
        from posttrainllm.evals.bench.summary import format_table

        for line in (*format_table(result["rows"]), *format_batch(result), *format_ratios(result["ratios"])):
            click.echo(line)
        click.echo(_setting_line(result))
    click.echo(json.dumps(result, ensure_ascii=False))
    if target is not None:
        from posttrainllm.evals.bench.plot import draw

        draw(target, result["rows"], _title(result))
    if any(row["failed"] for row in result["rows"] if row["engine"] == "posttrainllm"):
        sys.exit(_FAILED)


def run(
    *,
    model: str | None = None,
    draft_model: str | None = None,
    dtype: str = "auto",
    forward: str = "auto",
    changes: ModelChanges = UNCHANGED,
    draft_ks: list[int],
    repeats: int = 8,
    prompt_tokens: int = 64,
    max_tokens: int = 128,
    prompts_file: str | None = None,
    no_mlx_lm: bool = False,
    shapes: str | None = None,
    quiet: bool = False,
    **extras: Any,
) -> dict[str, Any]:
    """Load the pair and measure it.

    Args:
        model: as `sample` takes it.
        draft_model: the same.
        dtype: the same.
        forward: the same.
        changes: the same.
        draft_ks: K of each speculative row.
        repeats: prompts measured.
        prompt_tokens: of each.
        max_tokens: generated for each, more than the largest K + 1.
        prompts_file: JSON lines with a "text"; None for the held-out ones.
        no_mlx_lm: whether to leave mlx-lm's loops out.
        shapes: of random weights to be written and measured in place of a model; None for none.
        quiet: whether to show no progress.
        extras: the other arguments of `extras_from`.

    Returns:
        What the JSON line holds.

    Raises:
        UsageError: an option is out of range, or there are too few prompts.
        CapacityError: prompt and reply do not fit the context.
        LoadError: see `load_pair`.
        PosttrainllmError: another engine's process cannot take part.
    """
    # a first step may emit K + 1 tokens, and something has to be left for the clock
    least = max(draft_ks) + 2
    for name, got, wanted in (
        ("repeats", repeats, 1),
        ("prompt-tokens", prompt_tokens, 1),
        ("max-tokens", max_tokens, least),
    ):
        if got < wanted:
            raise UsageError(f"--{name}: got {got}, expected {wanted} or more")
    wanted_extras = extras_from(shapes=shapes, repeats=repeats, **extras)
    _refuse_others(changes, wanted_extras)
    texts = read_prompts(Path(prompts_file) if prompts_file is not None else HELD_OUT)
    with contextlib.ExitStack() as stack:
        if shapes is not None:
            model, draft_model = shapes_on_disk(shapes, model, draft_model, stack)
        pair = load_pair(model, draft_model, dtype=dtype, forward=forward, changes=changes)
        asked = [f"--{name.replace('_', '-')}" for name in ("accept_rate", "rows", "sampled") if extras.get(name)]
        if asked and pair.draft is None:
            raise UsageError(f"{asked[0]}: got no draft model, expected one")
        found = _measure(pair, texts, draft_ks, repeats, prompt_tokens, max_tokens, wanted_extras, no_mlx_lm, quiet)
        return {**found, "changes": changes.options}


def _refuse_others(changes: ModelChanges, extras: Extras) -> None:
    """Processes of other engines load the models from their directories alone."""
    others = {"as-installed": extras.as_installed, "transformers": extras.transformers, "start-up": extras.start_up}
    asked = [name for name, value in others.items() if value]
    if asked and changes.options:
        raise UsageError(f"--{asked[0]}: got {changes.options[0]} beside it, expected the models as they are")


def _measure(
    pair: Pair,
    texts: list[tuple[str, str]],
    draft_ks: list[int],
    repeats: int,
    prompt_tokens: int,
    max_tokens: int,
    extras: Extras,
    no_mlx_lm: bool,
    quiet: bool,
) -> dict[str, Any]:
    length = prompt_tokens + max_tokens
    if length > pair.target.context:
        raise CapacityError(
            f"workload: got {prompt_tokens} prompt tokens and {max_tokens} generated, expected at most the context of "
            f"{pair.target.context}"
        )
    prompts = choose_prompts(pair.tokenizer, texts, prompt_tokens, repeats + 1)
    from posttrainllm.evals.bench.workload import measure_pair

    return measure_pair(pair, prompts, draft_ks, max_tokens, mlx_lm=not no_mlx_lm, quiet=quiet, extras=extras)


def choose_prompts(
    tokenizer: Tokenizer, texts: list[tuple[str, str]], tokens: int, count: int, *, warm_up: int = 1
) -> list[list[int]]:
    """Cut texts to prompts.

    Args:
        tokenizer: of the target.
        texts: (text, continuation): the second is used where the first is too short.
        tokens: of each prompt.
        count: how many are wanted.
        warm_up: how many of them warm up, for the message.

    Returns:
        `count` different prompts, spread over the texts.

    Raises:
        UsageError: there are fewer.
    """
    encoded = [tokenizer.encode(text + more)[:tokens] for text, more in texts]
    found = [list(prompt) for prompt in dict.fromkeys(map(tuple, encoded)) if len(prompt) == tokens]
    if len(found) <= warm_up:
        raise UsageError(
            f"--prompt-tokens: got {tokens}, expected no more than the prompts have: {len(found)} of {len(texts)} "
            f"are as long and differ, and {warm_up + 1} are needed"
        )
    if len(found) < count:
        raise UsageError(
            f"--repeats: got {count - warm_up}, expected at most {len(found) - warm_up}: a prompt of {tokens} "
            f"tokens for each and {warm_up} to warm up"
        )
    return [found[index * len(found) // count] for index in range(count)]


def _parse_ks(text: str) -> list[int]:
    try:
        ks = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--draft-k: got {text!r}, expected whole numbers with commas between them") from None
    return sorted({check_draft_k(k) for k in ks})


def _title(result: dict[str, Any]) -> str:
    pair = " + ".join(Path(name).name for name in (result["model"], result["draft_model"]) if name)
    return f"{pair}, {result['device_name']}, {result['dtype']}"


def _setting_line(result: dict[str, Any]) -> str:
    others, simulated = result["others_cpu"], result["simulated"]
    return (
        f"\n{_title(result)}, T=0, {result['prompt_tokens']} + {result['max_tokens']} tokens, "
        f"{result['repeats']} prompts, C={result['capacity']}, MLX {result['versions']['mlx']}, BLAS {result['blas']}"
        + ("" if others is None else f"; others used {others:.0%} of the CPUs meanwhile")
        + ("" if simulated is None else f"; simulated accept rate {simulated['accept_rate']:g} a position")
    )


if __name__ == "__main__":
    cli.main(["bench", *sys.argv[1:]], prog_name="posttrainllm")
