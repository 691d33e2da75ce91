"""The `posttrainllm` command. Names its commands by import string, so that --help imports none of them."""

import contextlib
import logging
import os
import sys
from typing import Any, NoReturn

import click

from posttrainllm.adapters.guessed_options import GUESSED_COMMANDS, no_such_option
from posttrainllm.adapters.lazy import LazyGroup
from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.errors import PosttrainllmError, UsageError

__all__ = ["cli", "main"]

_COMMANDS = {
    "bench": ("posttrainllm.evals.throughput:bench", "Measure decoding with a draft and without, beside mlx-lm."),
    "chat": ("posttrainllm.adapters.chat.command:chat", "Talk with a model on the terminal."),
    "convert": ("posttrainllm.adapters.convert:convert", "Write a GGUF file, or a model's first layers, for mlx-lm."),
    "doctor": ("posttrainllm.adapters.doctor.command:doctor", "Say what is here, what would be slow, and what to do."),
    "export-mlx": ("posttrainllm.adapters.export_mlx:export_mlx", "Write a .tinygpt file in mlx-lm's layout."),
    "gate": ("posttrainllm.adapters.gate.command:gate", "Prove here that a draft changes nothing but the speed."),
    "match": ("posttrainllm.adapters.match.command:match", "Find the draft that makes a model fastest here."),
    "replay": ("posttrainllm.adapters.replay.command:replay", "Run a recorded decoding again, bit for bit."),
    "serve": ("posttrainllm.adapters.serve.command:serve", "Answer OpenAI's API over HTTP."),
    "sample": ("posttrainllm.adapters.sample.command:sample", "Decode one prompt, with a draft or without."),
    "zoo": ("posttrainllm.evals.zoo.command:zoo", "Build a corpus and train small models on it."),
}


class _Group(LazyGroup):
    """The whole program: its errors are one line each."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:  # we always exit
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # one line a problem, and it is ours
        logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
        kwargs["standalone_mode"] = False
        _fill_closed_streams()
        try:
            if sys.stdout is None:
                raise OSError(None, "standard output is closed")
            code = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = 2
        except click.NoSuchOption as error:
            words = args[0] if args else kwargs.get("args")
            code = _fail(no_such_option(error, sys.argv[1:] if words is None else words), error.exit_code)
        except click.ClickException as error:
            code = _fail(error.format_message(), error.exit_code)
        except UsageError as error:
            code = _fail(str(error), 2)
        except PosttrainllmError as error:
            code = _fail(str(error), 1)
        except (click.Abort, KeyboardInterrupt):
            code = 130
        except OSError as error:
            code = _fail(f"cannot write the output: {error.strerror or error}", 1)
            _drop_output()
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {collapsed(message)}", err=True)
    return code


def _fill_closed_streams() -> None:
    """Put the null device where standard input, output or error is closed: the next file would get its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _drop_output() -> None:
    """Let what standard output still holds go nowhere: Python would try to write it once more at exit, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is no file, closed, or none at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    import posttrainllm
    from posttrainllm.adapters.runtime import start

    click.echo(f"posttrainllm {posttrainllm.__version__} ({start().description})")
    ctx.exit()


@click.group(
    cls=_Group, lazy=_COMMANDS, guessed=GUESSED_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions, the device and the BLAS in use, and exit.",
)
def cli() -> None:
    """Speculative decoding for MLX: exact and deterministic."""


def main() -> NoReturn:
    """Entry point of the console command."""
    cli.main(prog_name="posttrainllm")
