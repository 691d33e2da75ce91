"""The check that stands before every index that MLX is given: it checks none itself."""

from collections.abc import Iterable

from posttrainllm.kernel.errors import CapacityError

__all__ = ["check_ids"]


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
