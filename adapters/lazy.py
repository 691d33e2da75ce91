"""A group of commands that are named by import string, so that --help imports none of them."""

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import click

from posttrainllm.adapters.messages import shown

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called.

    Args:
        lazy: by name, where the command is ("package.module:attribute") and its line in --help.
        guessed: names that others have for these commands, and theirs here.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, tuple[str, str]],
        guessed: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy, self._guessed = lazy, guessed or {}

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of a line.

        Raises:
            UsageError: there is none of that name; with the one that may have been meant, or all.
        """
        name = args[0]
        if name in self._lazy or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        raise click.UsageError(f"no such command {shown(name)}: {self._meant(ctx, name)}", ctx)

    def _meant(self, ctx: click.Context, name: str) -> str:
        if name in self._guessed:
            return f"it is {self._guessed[name]} here"
        names = self.list_commands(ctx)
        close = get_close_matches(name, names, n=1)
        return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines of --help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name][1]) for name in self.list_commands(ctx)])
