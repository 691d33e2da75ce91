"""The values of a GGUF header, read one behind the other; nothing is believed that does not fit the file."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["ValueReader", "shown_value"]

_BOOL, _TEXT, _ARRAY = 7, 8, 9
# by the number of a type: how struct and numpy read one value
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_DTYPES = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_MOST_TEXTS = 2**22
_LONGEST_NAME = 2**10


class ValueReader:
    """Reads from a place that moves on.

    Args:
        path: the file, for messages.
        data: its beginning, as far as a header may go.
        size: of the file.
        start: where to begin.
    """

    def __init__(self, path: Path, data: memoryview, size: int, *, start: int) -> None:
        self._path, self._data, self._size = path, data, size
        self.place = start

    def release(self) -> None:
        """Give the memory back, so that the map may be closed."""
        self._data.release()

    def number(self, code: str, what: str) -> int:
        """A whole number by its code of `struct`."""
        (found,) = struct.unpack_from(f"<{code}", self._data, self._take(struct.calcsize(f"<{code}"), what))
        return int(found)

    def name(self, what: str) -> str:
        """A short text: of a key, or of a tensor."""
        found = self.text(what)
        if not 0 < len(found) <= _LONGEST_NAME:
            raise CheckpointError(f"{self._path}: {what}: got {len(found)} characters, expected 1 to {_LONGEST_NAME}")
        return found

    def text(self, what: str) -> str:
        """A text with its length in front."""
        length = self.number("Q", f"the length of {what}")
        start = self._take(length, what)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: {what}: got bytes that are no UTF-8, expected text") from None

    def value(self, key: str) -> Any:
        """A value of the metadata with its type in front.

        Args:
            key: of the value, for messages.

        Returns:
            An int, a float, a bool, a text, a list of texts, or an array of numbers.

        Raises:
            CheckpointError: it does not fit the file, or has no type that is known.
        """
        what = shown(key)
        kind = self.number("I", f"the type of {what}")
        if kind == _TEXT:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind == _BOOL:
            flag = self.number("B", what)
            if flag > 1:
                raise CheckpointError(f"{self._path}: {what}: got {flag}, expected 0 or 1")
            return bool(flag)
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self._path}: {what}: type: got {kind}, expected 0 to 12")
        code = f"<{_NUMBERS[kind]}"
        (found,) = struct.unpack_from(code, self._data, self._take(struct.calcsize(code), what))
        return found

    def _array(self, what: str) -> list[str] | npt.NDArray[Any]:
        kind = self.number("I", f"the type of {what}")
        count = self.number("Q", f"the length of {what}")
        if kind == _TEXT:
            if count > _MOST_TEXTS:
                raise CheckpointError(f"{self._path}: {what}: got {count} texts, expected {_MOST_TEXTS} at most")
            return [self.text(what) for _ in range(count)]
        if kind not in _DTYPES:
            raise CheckpointError(f"{self._path}: {what}: got an array of type {kind}, expected numbers or texts")
        dtype = np.dtype(f"<{_DTYPES[kind]}")
        start = self._take(count * dtype.itemsize, what)
        # a copy: the file is closed when the header has been read
        return np.frombuffer(self._data[start : self.place], dtype=dtype).copy()

    def _take(self, count: int, what: str) -> int:
        """Where the next bytes begin; the place moves behind them."""
        start, end = self.place, self.place + count
        if end > len(self._data):
            problem = "truncated" if end > self._size else "its header is too long"
            raise CheckpointError(
                f"{self._path}: {problem}: got {min(self._size, len(self._data))} bytes, expected {end} for {what}"
            )
        self.place = end
        return start


def shown_value(value: Any) -> str:
    """A value of the metadata for a message, short and on one line."""
    if value is None or isinstance(value, str | int | float | list):
        return shown(value)
    return f"an array of {len(value)} numbers"
