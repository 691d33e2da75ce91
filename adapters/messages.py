"""Values and errors of others in a message of ours: on one line, and short."""

import json
from typing import Any

__all__ = ["collapsed", "shown"]


def collapsed(text: object, most: int | None = None) -> str:
    """Put a text or an error of a library on one line, its white space collapsed.

    Args:
        text: what it says.
        most: characters that are kept; None for all.

    Returns:
        Its words with one space between them.
    """
    return " ".join(str(text).split())[:most]


def shown(value: Any) -> str:
    """A value of a header for a message, on one line and short: a broken file's may be as long as the file."""
    if value is None:
        return "nothing"
    if isinstance(value, list | dict) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
