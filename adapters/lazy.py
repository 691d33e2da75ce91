"""A group of commands that are named by import string, so that --help imports none of them."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called.

    Args:
        lazy: by name, where the command is ("package.module:attribute") and its line in --help.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of --help."""
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None for a name that is none."""
        if cmd_name not in self._lazy:
            return None
        module, _, name = self._lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines of --help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][1]) for name in self.list_commands(ctx)])
