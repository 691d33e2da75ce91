"""Where the prompt comes from."""

import sys
from pathlib import Path

from posttrainllm.kernel.errors import UsageError

__all__ = ["read_prompt"]


def read_prompt(text: str | None, file: str | None) -> str:
    """Take the prompt from an option, a file, or standard input when that is not a terminal.

    Args:
        text: of --prompt.
        file: of --prompt-file.

    Returns:
        The prompt, not empty.

    Raises:
        UsageError: there is none, there are two, it is empty, or it is not UTF-8.
    """
    if text is not None and file is not None:
        raise UsageError("got both --prompt and --prompt-file, expected one of them")
    if text is not None:
        return _check(_valid(text), "--prompt")
    if file is not None:
        try:
            return _check(_decode(Path(file).read_bytes(), file), file)
        except OSError as error:
            raise UsageError(f"--prompt-file: {file}: {error.strerror or error}") from None
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("got no prompt, expected --prompt, --prompt-file or text on standard input")
    try:
        data = sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"standard input: {error.strerror or error}") from None
    return _check(_decode(data, "standard input"), "standard input")


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: byte {error.start} is {data[error.start]:#04x}, expected UTF-8 text") from None


def _valid(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # the shell passed bytes that are no UTF-8
        raise UsageError(f"--prompt: character {error.start} is no text, expected UTF-8") from None
    return text


def _check(text: str, name: str) -> str:
    if not text:
        raise UsageError(f"{name}: got an empty prompt, expected text")
    return text
