"""One line of a trace, whose values are taken out with a check."""

import json
from collections.abc import Callable
from typing import Any

from posttrainllm.adapters.params import is_int
from posttrainllm.kernel.errors import TraceError

__all__ = ["TraceLine", "are_numbers", "is_printable", "json_object"]


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that a text is, None where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class TraceLine:
    """One line's object, or one inside it; what is wrong with it is a TraceError with the line, got and expected.

    Args:
        number: of the line, from 1.
        text: of the line, where there is no value yet.
        value: an object inside it.
        prefix: where that stands, for messages.
    """

    def __init__(self, number: int, text: bytes = b"", value: dict[str, Any] | None = None, prefix: str = "") -> None:
        found = json_object(text) if value is None else value
        if found is None:
            shown = text[:40].decode("utf-8", "replace")
            raise TraceError(f"line {number}: got {shown!r}, expected a JSON object")
        self.number, self.value, self._prefix = number, found, prefix

    def take(self, name: str, good: Callable[[Any], bool], expected: str) -> Any:
        """A value for which good(value) holds."""
        if name not in self.value:
            raise TraceError(f"line {self.number}: {self._prefix}{name} is missing, expected {expected}")
        got = self.value[name]
        if not good(got):
            self.refuse(name, got, expected)
        return got

    def refuse(self, name: str, got: Any, expected: str) -> None:
        """Say what is wrong with a value."""
        shown = repr(got)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise TraceError(f"line {self.number}: {self._prefix}{name}: got {shown}, expected {expected}")

    def nested(self, name: str) -> "TraceLine":
        """An object inside."""
        value = self.take(name, lambda got: isinstance(got, dict), "an object")
        return TraceLine(self.number, value=value, prefix=f"{self._prefix}{name}.")

    def text(self, name: str) -> str:
        """A text of one line."""
        return str(self.take(name, is_printable, "text"))

    def texts(self, name: str, *needed: str, optional: bool = False) -> dict[str, Any]:
        """An object of texts (or null, where optional), with the needed names."""
        inner = self.nested(name)
        for key in dict.fromkeys((*needed, *inner.value)):
            inner.take(key, lambda got: is_printable(got) or (optional and got is None), "text")
        return inner.value

    def one_of(self, name: str, options: tuple[str, ...]) -> Any:
        """One of a few texts."""
        return self.take(name, lambda got: isinstance(got, str) and got in options, f"one of {', '.join(options)}")

    def flag(self, name: str) -> bool:
        """True or false."""
        return bool(self.take(name, lambda got: isinstance(got, bool), "true or false"))

    def integer(self, name: str, least: int, most: int) -> int:
        """A whole number from `least` to `most`."""
        expected = f"{least}" if least == most else f"{least} to {most}"
        return int(self.take(name, lambda got: is_int(got) and least <= got <= most, expected))

    def integers(self, name: str, least: int, most: int, below: int) -> tuple[int, ...]:
        """`least` to `most` numbers, each from 0 to below - 1."""
        got = self.take(name, lambda got: isinstance(got, list), "a list")
        if not least <= len(got) <= most:
            count = f"{least}" if least == most else f"{least} to {most}"
            self.refuse(name, got, f"{count} numbers")
        for index, number in enumerate(got):
            if not is_int(number) or not 0 <= number < below:
                self.refuse(f"{name}[{index}]", number, f"0 to {below - 1}")
        return tuple(got)


def are_numbers(got: Any, count: int) -> bool:
    """Whether it is a list of so many numbers that a float holds."""
    if not isinstance(got, list) or len(got) != count:
        return False
    return all(type(value) is float or (type(value) is int and abs(value) < 2**64) for value in got)


def is_printable(got: Any) -> bool:
    """Whether it is text of one line that can be printed; it may be shown in messages."""
    return isinstance(got, str) and got.isprintable()
