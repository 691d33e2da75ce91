"""Near-duplicates by hashed windows of lines."""

import hashlib

__all__ = ["Windows", "windows_of"]

_LINES = 4  # of a window, blank ones not counted
_LEAST_CHARACTERS = 40  # of a window: shorter ones are brackets and the like, and say nothing
_COPIED_SHARE = 0.5
_HELD_OUT_WINDOWS = 6


def windows_of(text: str) -> set[int]:
    """Hash every run of four lines that are not blank.

    Args:
        text: of one file.

    Returns:
        64-bit hashes; indentation does not count.
    """
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    found = set()
    for at in range(len(lines) - _LINES + 1):
        window = "\n".join(lines[at : at + _LINES])
        if len(window) >= _LEAST_CHARACTERS:
            found.add(int.from_bytes(hashlib.blake2b(window.encode(), digest_size=8).digest(), "little"))
    return found


class Windows:
    """What was seen so far: the windows of what is held out, and those of what was kept for training."""

    def __init__(self) -> None:
        self._held_out: set[int] = set()
        self._kept: set[int] = set()

    def hold_out(self, windows: set[int]) -> None:
        """Note a file that must not be trained on.

        Args:
            windows: of the file, from `windows_of`.
        """
        self._held_out |= windows

    def keep(self, windows: set[int]) -> None:
        """Note a file that is kept for training.

        Args:
            windows: of the file.
        """
        self._kept |= windows

    def reason_against(self, windows: set[int]) -> str | None:
        """Tell whether a file repeats what was seen.

        Args:
            windows: of the file.

        Returns:
            `held out` if it shares 6 windows, or half of its own, with what is held out; `duplicate` if half of its
            windows were kept already; None otherwise.
        """
        shared = len(windows & self._held_out)
        if shared >= _HELD_OUT_WINDOWS or (windows and shared >= _COPIED_SHARE * len(windows)):
            return "held out"
        if windows and len(windows & self._kept) >= _COPIED_SHARE * len(windows):
            return "duplicate"
        return None
