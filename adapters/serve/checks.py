"""What a request's texts and ids are held against before anything is made of them."""

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from posttrainllm.adapters.serve.errors import invalid
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.kernel.errors import CapacityError

__all__ = ["biases_of", "check_ids", "check_length", "check_text"]


def check_text(field: str, length: int, settings: ServeSettings) -> None:
    """Refuse what cannot fit before it is encoded: a long text takes seconds, and others wait for theirs.

    Args:
        field: for the message.
        length: characters.
        settings: the server's.

    Raises:
        CapacityError: with both numbers.
    """
    if length > settings.longest_text:
        most = f"at most {settings.longest_text}, which is what the context of {settings.context} tokens can hold"
        raise CapacityError(f"{field}: got {length} characters, expected {most}")


def check_length(field: str, ids: Sequence[int], settings: ServeSettings) -> None:
    """Refuse a prompt that leaves no room for a reply, or has nothing to go on from.

    Args:
        field: for the message.
        ids: of the prompt.
        settings: the server's.

    Raises:
        ApiError: there is none.
        CapacityError: with both numbers.
    """
    if not ids:
        raise invalid(f"{field}: got no token, expected one or more", param=field)
    if len(ids) >= settings.context:
        raise CapacityError(f"{field}: got {len(ids)} tokens, expected fewer than the context of {settings.context}")


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids that the model lacks: MLX checks no index.

    Args:
        field: for the message.
        ids: any whole numbers.
        vocab_size: how many there are.

    Raises:
        ApiError: naming the first one, and the size.
    """
    for index in ids:
        if not 0 <= index < vocab_size:
            raise invalid(
                f"{field}: got token id {index}, expected 0 to {vocab_size - 1}, of a vocabulary of {vocab_size}",
                param=field,
            )


def biases_of(given: Mapping[str, Any]) -> dict[int, float]:
    """The `logit_bias` of a body.

    Args:
        given: ids as JSON has them, and anything.

    Returns:
        Ids, not yet held against a vocabulary, and numbers from -100 to 100.

    Raises:
        ApiError: naming the first that is neither.
    """
    for name, bias in given.items():
        if not re.fullmatch("-?[0-9]{1,19}", name):
            raise invalid(f"logit_bias: got the token id {name[:40]!r}, expected a whole number", param="logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"logit_bias: got {reprlib.repr(bias)} for {name}, expected -100 to 100", param="logit_bias")
    return {int(name): bias for name, bias in given.items()}
