"""What `--draft-k` says: a number, or `auto`."""

from typing import Any

import attrs

from posttrainllm.adapters.params import MAX_DRAFT_K, is_int
from posttrainllm.kernel.errors import UsageError

__all__ = ["DraftLength"]

_MOST = {"cpu": 4, "gpu": 8}  # a wider window costs a CPU much at every step, a GPU little


@attrs.frozen(kw_only=True)
class DraftLength:
    """How many ids the draft proposes a step."""

    most: int | None
    """K, or the most that `auto` may choose; None is the device's own, under `auto` alone."""
    auto: bool = False
    """Whether K is chosen from step to step."""
    given: bool = attrs.field(default=True, eq=False)
    """Whether somebody asked for it; where nobody did, `--draft-model auto` chooses K with the draft."""

    @classmethod
    def parse(cls, value: Any) -> "DraftLength":
        """Read the option.

        Args:
            value: 1 to 32, the same as text, "auto", or "auto:N" where N is the most.

        Returns:
            What it says.

        Raises:
            UsageError: with got and expected.
        """
        if isinstance(value, cls):
            return value
        text = value if isinstance(value, str) else str(int(value)) if is_int(value) else ""
        if text == "auto":
            return cls(most=None, auto=True)
        word, _, count = text.partition(":")
        auto = word == "auto"
        most = _number(count if auto else text)
        if most is None or not 1 <= most <= MAX_DRAFT_K:
            got = value if auto or most is None else most
            raise UsageError(f"--draft-k: got {got!r}, expected 1 to {MAX_DRAFT_K}, auto or auto:N")
        return cls(most=most, auto=auto)

    def on(self, device: str) -> int:
        """K, or the most that may be chosen, on a device.

        Args:
            device: "cpu" or "gpu".

        Returns:
            1 to 32: the window is one wider.
        """
        return _MOST[device] if self.most is None else self.most


def _number(text: str) -> int | None:
    """A whole number in digits and nothing else; None for another text."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else None
