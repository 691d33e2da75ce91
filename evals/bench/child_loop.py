"""The other end of a contender that runs in a process of its own: JSON lines on standard input and output.

A request is a prompt. The first answer comes when its first step is done; the next line, whatever it says, starts the
rest; the second answer comes when that is done. What a library prints meanwhile goes to standard error.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

__all__ = ["ChildError", "Decode", "First", "answer"]

First: TypeAlias = Callable[[Sequence[int]], None]
"""To be called with the ids so far, once, when the first step is done; it returns when the clock runs."""
Decode: TypeAlias = Callable[[dict[str, Any], First], tuple[list[int], list[tuple[int, int]]]]
"""(request, first) to ids and (proposed, accepted) of every step."""


class ChildError(Exception):
    """Why a contender cannot take part, in one line."""


def answer(start: Callable[[], tuple[dict[str, Any], Decode]]) -> None:
    """Load, say what was loaded, and decode until standard input ends.

    Args:
        start: loads; returns what to say of it, and what decodes.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def say(value: dict[str, Any]) -> None:
            out.write(json.dumps(value) + "\n")
            out.flush()

        try:
            facts, decode = start()
        except ChildError as error:
            say({"error": str(error)})
            return
        say(facts)
        for line in sys.stdin:

            def first(ids: Sequence[int]) -> None:
                say({"ids": list(ids)})
                sys.stdin.readline()

            ids, steps = decode(json.loads(line), first)
            say({"ids": ids, "steps": steps})
