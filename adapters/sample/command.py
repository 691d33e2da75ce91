"""`posttrainllm sample`: parse, call, print."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from posttrainllm.adapters.chat.conversation import Conversation
from posttrainllm.adapters.checks import check_not_empty
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.options import chat_options, check_system, parse_template_args, sampling_options
from posttrainllm.adapters.pair_options import PairOptions, pair_options
from posttrainllm.adapters.params import MAX_DRAFT_K, SamplingParams, check_width
from posttrainllm.adapters.sample.prompt import read_prompt
from posttrainllm.adapters.status_line import status_line
from posttrainllm.kernel.errors import UsageError

if TYPE_CHECKING:  # it imports MLX, and --help must not
    from posttrainllm.adapters.generation import Generation
    from posttrainllm.adapters.replay.writer import TraceWriter

__all__ = ["sample"]


@click.command()
@pair_options()
@click.option("--prompt", metavar="TEXT", help="The prompt. Default: standard input.")
@click.option("--prompt-file", metavar="FILE", help="Read the prompt from a UTF-8 file.")
@click.option("--chat", is_flag=True, help="Wrap the prompt in the checkpoint's chat template.")
@chat_options()
@sampling_options(max_tokens=128)
@click.option(
    "--plain-width",
    type=int,
    metavar="N",
    help="Width without a draft, 1 to 33; K+1 is the reference for K.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option("--record", metavar="FILE", help="Write a trace of every step, for `posttrainllm replay`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--quiet", is_flag=True, help="Print no statistics.")
@click.option(
    "--verbose",
    is_flag=True,
    help="Print a forecast of the memory, which forward computes, and in what the tokenizers differ.",
)
def sample(
    *,
    named: PairOptions,
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    system: str | None,
    chat_template_args: str | None,
    plain_width: int | None,
    record: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Decode one prompt with MODEL: a directory in Hugging Face / mlx-lm layout, a .tinygpt or GGUF file, or a hub id.

    No MODEL: the embedded pair. A draft alone: the embedded target. MODEL alone: plain decoding.
    """
    params = SamplingParams.from_options(options)
    _check_plain_width(plain_width, named.plain)
    check_system(system)
    template_args = parse_template_args(chat_template_args)
    if not chat and (system is not None or chat_template_args is not None):
        raise UsageError("--system and --chat-template-args: got them without --chat, expected --chat beside them")
    check_not_empty("--record", record, "a file to write")
    text = read_prompt(prompt, prompt_file)
    shown = not (quiet or as_json)
    pair, draft_k = named.load(quiet=quiet, shown=shown)
    with status_line(enabled=shown) as status:
        from posttrainllm.adapters.generation import Generation

        ids = _encode_chat(pair, text, system, template_args) if chat else pair.tokenizer.encode(text)
        if chat and not pair.tokenizer.has_chat_template:
            click.echo("warning: the checkpoint has no chat template; a plain User/Assistant one is used", err=True)
        status.update("prefill; the first run on a CPU also compiles kernels, for some seconds")
        with _recorder(record) as recorder:
            generation = Generation(pair, ids, params, draft_k=draft_k, plain_width=plain_width or 1, recorder=recorder)
            if verbose:
                for line in (generation.forecast.description, pair.forwards, *pair.notes):
                    click.echo(line, err=True)
            code = _run(generation, echo=not as_json, stop_status=status.stop)
    result = generation.result()
    if as_json:
        click.echo(json.dumps(result.to_dict(), ensure_ascii=False))
    elif not quiet:
        from posttrainllm.adapters.sample.report import print_hint, print_statistics

        print_statistics(result)
        if not code:  # after Ctrl-C nobody waits for costs to be measured
            print_hint(generation.payoff(measure=True))
    if code:
        sys.exit(code)


def _recorder(path: str | None) -> "AbstractContextManager[TraceWriter | None]":
    """What --record asks for."""
    if path is None:
        return nullcontext()
    from posttrainllm.adapters.replay.writer import TraceWriter

    return TraceWriter(path)


def _encode_chat(pair: Pair, text: str, system: str | None, template_args: dict[str, Any]) -> list[int]:
    conversation = Conversation(system=system, template_args=template_args)
    conversation.ask(text)
    return conversation.encode(pair.tokenizer)


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


def _check_plain_width(plain_width: int | None, plain: bool) -> None:
    if plain_width is not None:
        check_width("plain-width", plain_width, 1, MAX_DRAFT_K + 1)
        if not plain:
            raise UsageError(f"--plain-width: got {plain_width} with a draft, expected --no-draft beside it")
