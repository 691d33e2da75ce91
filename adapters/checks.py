"""Checks that stand before something that does not check: MLX, given an index, and the system, given a path."""

from collections.abc import Iterable

from posttrainllm.kernel.errors import CapacityError, UsageError

__all__ = ["check_ids", "check_not_empty"]


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse a token id that a model lacks.

    Args:
        name: of what holds them, for the message.
        ids: any whole numbers.
        vocab_size: one more than the largest id.

    Raises:
        CapacityError: naming the first such id, and the size.
    """
    for index in ids:
        if not 0 <= index < vocab_size:
            expected = f"expected 0 to {vocab_size - 1}, of a vocabulary of {vocab_size}"
            raise CapacityError(f"{name}: got token id {index}, {expected}")


def check_not_empty(name: str, text: str | None, expected: str) -> None:
    """Refuse an empty text where a path is expected: the system takes it for the directory that we are in.

    Args:
        name: of the option or argument.
        text: its value; None is not looked at.
        expected: what it names.

    Raises:
        UsageError: with got and expected.
    """
    if text == "":
        raise UsageError(f"{name}: got an empty text, expected {expected}")
