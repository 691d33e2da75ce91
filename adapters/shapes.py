"""Shapes that steps are compiled for, chosen so that they are few: each one is a trace of its own."""

__all__ = ["capacity_for", "draft_width", "live_slots"]

_BUCKET = 256  # one capacity for many prompts: every capacity is a trace of its own


def capacity_for(length: int, width: int) -> int:
    """Cache slots for a row that grows to `length`: a multiple of 256 that also holds a window and the scratch slot."""
    return -(-(length + width) // _BUCKET) * _BUCKET


def live_slots(length: int, capacity: int) -> int | None:
    """Slots that a step has to look at: 256 times the least power of two that holds `length`; None for all C of them.

    Few buckets, since each is a trace of its own.
    """
    live = _BUCKET
    while live < length:
        live *= 2
    return live if live < capacity else None


def draft_width(device: str) -> int:
    """Tokens that the draft is fed a forward, after its first: a row costs time on a CPU, and hardly any on a GPU."""
    return 1 if device == "cpu" else 2
