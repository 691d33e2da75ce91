"""Where files are kept that a later run can use again."""

import os
from pathlib import Path

__all__ = ["user_cache"]


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
