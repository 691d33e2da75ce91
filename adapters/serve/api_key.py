"""The key that clients must send: from an option, a variable or a file, and never in what is printed."""

import os
import re
from pathlib import Path

import click

from posttrainllm.adapters.serve.configuration import came_from, read_small_file
from posttrainllm.kernel.errors import UsageError

__all__ = ["check_variables", "find_key"]

_MOST_BYTES = 4096
_MUST_NOT_BE_EMPTY = ("POSTTRAINLLM_API_KEY", "POSTTRAINLLM_API_KEY_FILE", "POSTTRAINLLM_CONFIG")


def check_variables() -> None:
    """Refuse an empty variable where click would take it for none: that would start a server without a key.

    Raises:
        UsageError: naming it.
    """
    for name in _MUST_NOT_BE_EMPTY:
        if os.environ.get(name) == "":
            expected = "a key" if name.endswith("_KEY") else "a path"
            raise UsageError(f"{name}: got an empty variable, expected {expected}, or no such variable")


def find_key(ctx: click.Context, key: str | None, file: str | None) -> str | None:
    """The key, of --api-key and --api-key-file the one that counts more.

    Args:
        ctx: of the command, which knows where values come from.
        key: of --api-key.
        file: of --api-key-file.

    Returns:
        The key; None for none.

    Raises:
        UsageError: both come from the same place, the file cannot be read, or a header cannot carry the key.
    """
    if key is not None and file is not None:
        by_text, by_file = came_from(ctx, "api_key"), came_from(ctx, "api_key_file")
        if by_text == by_file:
            raise UsageError("--api-key-file: got it beside --api-key, expected one of them")
        key, file = (key, None) if by_text > by_file else (None, file)
    if file is not None:
        return _checked(_read(Path(file)), f"--api-key-file: {file}: got")
    return None if key is None else _checked(key, "--api-key: got")


def _checked(key: str, got: str) -> str:
    if not re.fullmatch("[!-~]([ -~]*[!-~])?", key):
        raise UsageError(f"{got} nothing, or what a header cannot carry, expected ASCII without spaces around it")
    return key


def _read(path: Path) -> str:
    """The text of a file, without the line's end."""
    data = read_small_file(path, "--api-key-file", most=_MOST_BYTES, expected="a key in one line")
    return data.decode("latin-1").removesuffix("\n").removesuffix("\r")  # what is no ASCII is refused with the rest
