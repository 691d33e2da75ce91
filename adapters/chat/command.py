"""`posttrainllm chat`: a conversation on the terminal, every reply decoded like a sample."""

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from posttrainllm.adapters.options import chat_options, check_k, pair_options, sampling_options, template_args
from posttrainllm.kernel.errors import CapacityError, CheckpointError, UsageError

if TYPE_CHECKING:  # they import MLX, and --help must not
    from posttrainllm.adapters.chat.conversation import Conversation
    from posttrainllm.adapters.generation import Generation
    from posttrainllm.adapters.loading.pair import Pair
    from posttrainllm.adapters.params import SamplingParams

__all__ = ["chat"]

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops a reply"


@click.command()
@pair_options()
@chat_options()
@sampling_options(max_tokens=512)
@click.option("--quiet", is_flag=True, help="Print no statistics after a reply.")
def chat(
    *,
    model: str | None,
    draft_model: str | None,
    no_draft: bool,
    draft_k: int,
    dtype: str,
    system: str | None,
    chat_template_args: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Talk with MODEL, a directory in Hugging Face / mlx-lm layout or an id of the hub.

    Each line is a message, and the whole conversation is kept; the accept rate follows each reply. Lines that start
    with a slash are commands: /help lists them.
    """
    from posttrainllm.adapters.chat.conversation import Conversation
    from posttrainllm.adapters.params import SamplingParams

    params = SamplingParams.from_options(options)
    check_k(draft_k)
    conversation = Conversation(system=system, template_args=template_args(chat_template_args))
    from posttrainllm.adapters.gate.heed import unless_broken
    from posttrainllm.adapters.loading.pair import load_pair

    pair = unless_broken(load_pair(model, draft_model, speculate=not no_draft, dtype=dtype), draft_k)
    if not pair.tokenizer.has_chat_template:
        click.echo("warning: the checkpoint has no chat template; a plain User/Assistant one is used", err=True)
    on_terminal = sys.stdin is not None and sys.stdin.isatty()
    if on_terminal:
        click.echo(_HELP, err=True)
        with contextlib.suppress(ImportError):  # lines can then be edited and called back
            import readline  # noqa: F401
    while (line := _read(on_terminal)) is not None:
        _turn(line, conversation, pair, params, draft_k, quiet=quiet)


def _read(on_terminal: bool) -> str | None:
    """The next line; None at the end. Ctrl-C drops a line that is being typed."""
    while True:
        try:
            line = input("> " if on_terminal else "")
            line.encode("utf-8")
            return line
        except EOFError:
            if on_terminal:
                click.echo()
            return None
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            click.echo()
        except UnicodeError:
            if not on_terminal:
                raise UsageError("standard input: got bytes that are no UTF-8, expected text") from None
            click.echo("error: got bytes that are no UTF-8, expected text", err=True)


def _turn(
    line: str, conversation: "Conversation", pair: "Pair", params: "SamplingParams", draft_k: int, *, quiet: bool
) -> None:
    """One line: a command, or a message and its reply. What cannot be answered is forgotten and the rest kept."""
    from posttrainllm.adapters.generation import Generation

    command = line.strip()
    if command in ("/exit", "/quit"):
        raise click.exceptions.Exit(0)
    if command == "/reset":
        conversation.reset()
        click.echo("the conversation is forgotten", err=True)
    elif command.startswith("/"):
        known = command == "/help"
        click.echo(
            _HELP if known else f"error: got {command.split()[0]!r}, expected one of /help /reset /exit", err=True
        )
    elif command:
        conversation.ask(line)
        try:
            generation = Generation(pair, conversation.encode(pair.tokenizer), params, draft_k=draft_k)
        except (CapacityError, CheckpointError) as error:
            conversation.take_back()
            click.echo(f"error: {error}; the message was not taken, /reset starts anew", err=True)
            return
        conversation.reply(_stream(generation))
        if not quiet:
            _report(generation)


def _stream(generation: "Generation") -> str:
    """Print a reply as it is decoded, until it ends or Ctrl-C stops it."""
    try:
        for chunk in generation:
            click.echo(chunk.text, nl=False)
    except KeyboardInterrupt:
        click.echo(generation.cancel().text, nl=False)
    click.echo()
    return generation.result().text


def _report(generation: "Generation") -> None:
    """One line behind a reply."""
    result = generation.result()
    usage, rate = result.usage, result.timings.decode_tokens_per_s
    parts = [f"{usage.completion_tokens} tokens" + ("" if rate is None else f", {rate:.1f} tok/s")]
    if usage.accept_rate is not None:
        parts.append(f"draft accepted {usage.draft_accepted} of {usage.draft_proposed} ({usage.accept_rate:.3f})")
    parts.append(f"context {usage.total_tokens} of {generation.pair.target.context}")
    parts.append(f"finish: {result.finish_reason}")
    click.echo(click.style(" | ".join(parts), dim=True), err=True)
