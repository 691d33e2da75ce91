"""What stands around the command of a measurement that is run as a module."""

import sys

import click

from posttrainllm.kernel.errors import PosttrainllmError, UsageError

__all__ = ["run_command"]


def run_command(command: click.Command) -> None:
    """Run a command and leave the process; an error of ours is one line and no traceback.

    Args:
        command: gets the process's arguments.
    """
    try:
        command()
    except PosttrainllmError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
