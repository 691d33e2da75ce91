"""`posttrainllm sample`: parse, call, print."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from posttrainllm.adapters.sample.prompt import read_prompt
from posttrainllm.kernel.errors import UsageError

if TYPE_CHECKING:  # it imports MLX, and --help must not
    from posttrainllm.adapters.generation import Generation
    from posttrainllm.adapters.loading.pair import Pair
    from posttrainllm.adapters.replay.writer import TraceWriter

__all__ = ["sample"]


@click.command()
@click.argument("model", required=False)
@click.option("--draft-model", metavar="PATH", help="Directory of the draft. Default: the embedded one without MODEL.")
@click.option("--no-draft", is_flag=True, help="Decode plainly, at width 1 unless --plain-width says otherwise.")
@click.option("--draft-k", type=int, default=4, show_default=True, help="Tokens the draft proposes a step, 1 to 32.")
@click.option("--prompt", metavar="TEXT", help="The prompt. Default: standard input.")
@click.option("--prompt-file", metavar="FILE", help="Read the prompt from a UTF-8 file.")
@click.option("--chat", is_flag=True, help="Wrap the prompt in the checkpoint's chat template.")
@click.option(
    "--max-tokens",
    type=int,
    default=128,
    show_default=True,
    help="Most tokens to generate, cut to the context.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest ids up to this mass.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Keep this many ids; 0 keeps all.")
@click.option(
    "--min-p",
    type=float,
    default=0.0,
    show_default=True,
    help="Drop ids under this share of the likeliest.",
)
@click.option("--seed", type=int, help="Same seed, same text. Default: fresh entropy.")
@click.option(
    "--accept-rule",
    type=click.Choice(["leviathan", "coupled"]),
    default="leviathan",
    show_default=True,
    help="How proposals are judged at T>0: by the ratio of probabilities, or by shared noise, which gives the ids "
    "that plain sampling with the same seed gives.",
)
@click.option(
    "--plain-width",
    type=int,
    metavar="N",
    help="Width without a draft, 1 to 33; K+1 is the reference for K.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Type of the weights. auto: the checkpoint's, or float32 on a CPU with OpenBLAS.",
)
@click.option("--record", metavar="FILE", help="Write a trace of every step, for `posttrainllm replay`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--quiet", is_flag=True, help="Print no statistics.")
def sample(
    *,
    model: str | None,
    draft_model: str | None,
    no_draft: bool,
    draft_k: int,
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    plain_width: int | None,
    dtype: str,
    record: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Decode one prompt with MODEL, a directory in Hugging Face / mlx-lm layout.

    No MODEL: the embedded pair. A draft alone: the embedded target. MODEL alone: plain decoding.
    """
    from posttrainllm.adapters.params import SamplingParams

    params = SamplingParams.from_options(options)
    plain = no_draft or (model is not None and draft_model is None)
    _check_widths(draft_k, plain_width, plain)
    text = read_prompt(prompt, prompt_file)
    with _status(enabled=not (quiet or as_json)) as status:
        from posttrainllm.adapters.loading.pair import load_pair

        pair = _unless_broken(load_pair(model, draft_model, speculate=not no_draft, dtype=dtype), draft_k)
        from posttrainllm.adapters.generation import Generation

        ids = pair.tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else pair.tokenizer.encode(text)
        if chat and not pair.tokenizer.has_chat_template:
            click.echo("warning: the checkpoint has no chat template; a plain User/Assistant one is used", err=True)
        status.update("prefill; the first run on a CPU also compiles kernels, for some seconds")
        with _recorder(record) as recorder:
            generation = Generation(pair, ids, params, draft_k=draft_k, plain_width=plain_width or 1, recorder=recorder)
            code = _run(generation, echo=not as_json, stop_status=status.stop)
    result = generation.result()
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    elif not quiet:
        from posttrainllm.adapters.sample.report import print_statistics

        print_statistics(result)
    if code:
        sys.exit(code)


def _unless_broken(pair: "Pair", draft_k: int) -> "Pair":
    """The pair, or its target alone where the gate has found that the draft changes the output here."""
    from posttrainllm.adapters.gate.cache import known_broken

    reason = known_broken(pair, draft_k)
    if reason is None:
        return pair
    click.echo(f"warning: the gate calls this pair broken here, decoding without the draft: {reason}", err=True)
    return pair.plain(f"broken, says the gate: {reason}")


def _recorder(path: str | None) -> "AbstractContextManager[TraceWriter | None]":
    """What --record asks for."""
    if path is None:
        return nullcontext()
    from posttrainllm.adapters.replay.writer import TraceWriter

    return TraceWriter(path)


def _run(generation: "Generation", *, echo: bool, stop_status: Any) -> int:
    """Stream to standard output; 130 after Ctrl-C, with what was decoded printed."""
    code = 0
    chunks = iter(generation)
    try:
        for chunk in chunks:
            stop_status()
            if echo:
                click.echo(chunk.text, nl=False)
    except KeyboardInterrupt:
        code = 130
        stop_status()
        if echo:
            click.echo(generation.cancel().text, nl=False)
        else:
            generation.cancel()
    if echo:
        click.echo()
    return code


def _check_widths(draft_k: int, plain_width: int | None, plain: bool) -> None:
    from posttrainllm.adapters.params import MAX_DRAFT_K, check_width

    check_width("draft-k", draft_k, 1, MAX_DRAFT_K)
    if plain_width is not None:
        check_width("plain-width", plain_width, 1, MAX_DRAFT_K + 1)
        if not plain:
            raise UsageError(f"--plain-width: got {plain_width} with a draft, expected --no-draft beside it")


def _status(*, enabled: bool) -> Any:
    """A line on a terminal's standard error while nothing is printed yet."""
    from rich.console import Console

    console = Console(stderr=True, quiet=not enabled or sys.stderr is None or not sys.stderr.isatty())
    return console.status("loading")
