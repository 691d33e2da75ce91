"""Where files are kept that a later run can use again."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["file_name", "user_cache", "write_whole"]


def user_cache(name: str) -> Path | None:
    """A folder of the user's cache directory; it need not exist yet.

    Args:
        name: what is kept there.

    Returns:
        The folder; None where the user has no home.
    """
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(root) / "posttrainllm" / name


def file_name(key: dict[str, Any]) -> str:
    """The name of the file that is kept for a key.

    Args:
        key: plain values.

    Returns:
        A hash of them, with the suffix of JSON.
    """
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32] + ".json"


def write_whole(file: Path, content: str | bytes) -> str | None:
    """Write a file, whose folder is made where it is missing.

    Args:
        file: what others may read or write meanwhile: they see the old one or the new one, whole.
        content: of it; text is written as UTF-8.

    Returns:
        None, or why it could not be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as own:
            draft = Path(own) / "result"
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
            draft.replace(file)
    except OSError as error:
        return f"{file.parent}: {error.strerror or error}"
    return None
