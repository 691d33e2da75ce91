"""What the doctor found."""

from typing import Any, Literal, TypeAlias

import attrs

__all__ = ["Finding", "Status"]

Status: TypeAlias = Literal["ok", "note", "slow", "broken"]
"""`slow`: decoding runs and might be faster. `broken`: it could not run. `note`: neither, and worth knowing."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    """What is here, one line."""
    why: str | None = None
    """What follows from it; None where all is well."""
    remedy: str | None = None
    """What to do about it; with `why` alone."""
    facts: dict[str, Any] = attrs.field(factory=dict)
    """The same for programs, plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return attrs.asdict(self)
