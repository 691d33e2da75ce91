"""What a terminal shows while nothing is printed yet."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes a moment to import, and --help must not wait for it
    from rich.status import Status

__all__ = ["status_line", "writer"]


def status_line(*, enabled: bool = True) -> "Status":
    """A line on standard error that is gone when the command prints.

    Args:
        enabled: False shows nothing, and so does a standard error that is no terminal.

    Returns:
        The line, a context manager; it begins with "loading".
    """
    from rich.console import Console

    console = Console(stderr=True, quiet=not enabled or sys.stderr is None or not sys.stderr.isatty())
    return console.status("loading")


def writer(status: "Status") -> Callable[[str], None]:
    """What changes the line.

    Args:
        status: of `status_line`.

    Returns:
        A function that takes the new text and shows it as it is: brackets in the name of a model are no markup.
    """
    from rich.text import Text

    return lambda line: status.update(Text(line))
