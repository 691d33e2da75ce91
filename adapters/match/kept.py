"""What was found of a candidate before, one file each under the user's cache directory.

A file holds what its key says; one that cannot be read, or is not what its name says, counts as absent.
"""

import json
from pathlib import Path
from typing import Any

from posttrainllm.adapters.match.findings import Measured, StepTime
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.user_cache import file_name, user_cache, write_whole

__all__ = ["keep", "measured_from", "read"]

_FORMAT = 2


def read(key: dict[str, Any]) -> dict[str, Any] | None:
    """What is kept for a key.

    Args:
        key: plain values.

    Returns:
        What `keep` was given; None where there is nothing that can be used.
    """
    file = _file(key)
    try:
        value = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or value.get("format") != _FORMAT or value.get("key") != key:
            return None
    except (OSError, ValueError, RecursionError):
        return None
    found = value.get("found")
    return found if isinstance(found, dict) else None


def keep(key: dict[str, Any], found: dict[str, Any]) -> None:
    """Keep something; a warning says where that cannot be done.

    Args:
        key: plain values.
        found: plain values.
    """
    file = _file(key)
    if file is None:
        return
    unkept = write_whole(file, json.dumps({"format": _FORMAT, "key": key, "found": found}))
    if unkept is not None:
        LOGGER.warning("what was found of a draft is not kept, the next start measures again: %s", unkept)


def measured_from(found: dict[str, Any]) -> Measured | None:
    """Read back what `attrs.asdict` made of a measurement.

    Args:
        found: of `read`.

    Returns:
        The measurement; None where the values cannot be one.
    """
    try:
        steps = tuple(StepTime(**step) for step in found["steps"])
        measured = Measured(accepted=found["accepted"], proposed=found["proposed"], judged=found["judged"], steps=steps)
        counts = (measured.accepted, measured.proposed, measured.judged, *(step.draft_k for step in steps))
        times = [time for step in steps for time in (step.seconds, step.plain_seconds)]
        sane = (
            all(type(count) is int for count in counts)
            and 0 <= measured.accepted <= measured.judged <= measured.proposed
        )
        sane = sane and all(type(time) is float and 0 < time < 1e6 for time in times)
    except (KeyError, TypeError):
        return None
    return measured if sane and steps and all(step.draft_k > 0 for step in steps) else None


def _file(key: dict[str, Any]) -> Path | None:
    folder = user_cache("match")
    return None if folder is None else folder / file_name(key)
