"""`posttrainllm chat`: a conversation on the terminal, every reply decoded like a sample."""

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import attrs
import click

from posttrainllm.adapters.chat.conversation import Conversation
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.options import chat_options, check_system, parse_template_args, sampling_options
from posttrainllm.adapters.pair_options import PairOptions, pair_options
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.kernel.errors import PosttrainllmError, UsageError

if TYPE_CHECKING:  # it imports MLX, and --help must not
    from posttrainllm.adapters.generation import Generation

__all__ = ["chat"]

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops a reply"


@click.command()
@pair_options()
@chat_options()
@sampling_options(max_tokens=512)
@click.option("--quiet", is_flag=True, help="Print no statistics after a reply.")
def chat(
    *,
    named: PairOptions,
    system: str | None,
    chat_template_args: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Talk with MODEL: a directory in Hugging Face / mlx-lm layout, a .tinygpt or GGUF file, or a hub id.

    Each line is a message, and the whole conversation is kept; the accept rate follows each reply. Lines that start
    with a slash are commands: /help lists them.
    """
    params = SamplingParams.from_options(options)
    check_system(system)
    conversation = Conversation(system=system, template_args=parse_template_args(chat_template_args))
    if sys.stdin is None:
        raise UsageError("got no standard input, expected a terminal or lines of text")
    pair, draft_k = named.load(quiet=quiet, shown=not quiet)
    if not pair.tokenizer.has_chat_template:
        click.echo("warning: the checkpoint has no chat template; a plain User/Assistant one is used", err=True)
    session = _Session(conversation, pair, params, draft_k=draft_k, quiet=quiet)
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        click.echo(_HELP, err=True)
        with contextlib.suppress(ImportError):  # lines can then be edited and called back
            import readline  # noqa: F401
    while (line := _read(on_terminal)) is not None and session.take(line):
        pass


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


@attrs.define(eq=False)
class _Session:
    """What every line is taken with."""

    conversation: Conversation
    pair: Pair
    params: SamplingParams
    draft_k: DraftLength = attrs.field(kw_only=True)
    quiet: bool = attrs.field(kw_only=True)
    hinted: bool = attrs.field(default=False, init=False)
    """Whether it was said that the draft does not pay: once is enough."""

    def take(self, line: str) -> bool:
        """Carry out a command, or answer a message; whether the session goes on."""
        command = line.strip()
        if command in ("/exit", "/quit"):
            return False
        if command == "/help":
            click.echo(_HELP, err=True)
        elif command == "/reset":
            self.conversation.reset()
            click.echo("the conversation is forgotten", err=True)
        elif command.startswith("/"):
            click.echo(f"error: got {command.split()[0]!r}, expected one of /help /reset /exit", err=True)
        elif command:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        """A message and its reply. What cannot be answered is forgotten, and the rest is kept."""
        from posttrainllm.adapters.generation import Generation

        self.conversation.ask(line)
        try:
            ids = self.conversation.encode(self.pair.tokenizer)
            generation = Generation(self.pair, ids, self.params, draft_k=self.draft_k)
            _stream(generation)
        except PosttrainllmError as error:
            self.conversation.take_back()
            click.echo(f"error: {error}; the message was not taken, /reset starts anew", err=True)
            return
        text = generation.result().text
        if text:
            self.conversation.reply(text)
        else:  # stopped before its first word: templates refuse an empty turn
            self.conversation.take_back()
        if not self.quiet:
            _report(generation)
            self._hint(generation)

    def _hint(self, generation: "Generation") -> None:
        from posttrainllm.adapters.sample.report import print_hint

        stopped = generation.result().finish_reason == "cancelled"  # then the next line is about to be typed
        self.hinted = self.hinted or (not stopped and print_hint(generation.payoff(measure=True)))


def _stream(generation: "Generation") -> None:
    """Print a reply as it is decoded, until it ends or Ctrl-C stops it."""
    try:
        for chunk in generation:
            click.echo(chunk.text, nl=False)
    except KeyboardInterrupt:
        click.echo(generation.cancel().text, nl=False)
    click.echo()


def _report(generation: "Generation") -> None:
    """One line after a reply."""
    result = generation.result()
    usage, rate = result.usage, result.timings.decode_tokens_per_s
    parts = [f"{usage.completion_tokens} tokens" + ("" if rate is None else f", {rate:.1f} tok/s")]
    if usage.accept_rate is not None:
        parts.append(f"draft accepted {usage.draft_accepted} of {usage.draft_proposed} ({usage.accept_rate:.3f})")
    parts.append(f"context {usage.total_tokens} of {generation.pair.target.context}")
    parts.append(f"finish: {result.finish_reason}")
    click.echo(click.style(" | ".join(parts), dim=True), err=True)
