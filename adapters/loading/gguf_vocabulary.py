"""The tokens of a GGUF file, and the ids that begin and end a text."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.loading.gguf_config import whole_number
from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.adapters.loading.gguf_values import shown_value
from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["CONTROL", "KEY", "Kinds", "read_flag", "read_tokens", "text_ids", "token_id"]

KEY = "tokenizer.ggml."
"""What the keys of a tokenizer begin with."""
CONTROL = 3
"""The kind of a token that is no text."""
Kinds = npt.NDArray[np.integer[Any]]
# control tokens that end a reply beside the eos token: the file names one of them at most, as llama.cpp knows
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<|end_of_turn|>", "<EOT>", "</s>"),
    }
)


def text_ids(header: GgufHeader, rows: int) -> dict[str, Any]:
    """Ids that begin and end a text, for config.json.

    Args:
        header: of the file.
        rows: of the embedding.

    Returns:
        `bos_token_id` and `eos_token_id`, the second a list; None of what there is not.

    Raises:
        CheckpointError: the vocabulary is missing, or does not fit; with got and expected.
    """
    tokens, kinds = read_tokens(header)
    if len(tokens) > rows:
        raise CheckpointError(f"{header.path}: {KEY}tokens: got {len(tokens)}, expected {rows} at most, one a row")
    named = {name: token_id(header, f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    ends = {named[name] for name in ("eos", "eot", "eom")} - {None}
    ends |= {index for index, token in enumerate(tokens) if kinds[index] == CONTROL and token in _ENDS}
    return {"bos_token_id": named["bos"], "eos_token_id": sorted(ends) or None}


def read_tokens(header: GgufHeader) -> tuple[list[str], Kinds]:
    """Pieces and their kinds by id.

    Args:
        header: of the file.

    Returns:
        The pieces, none of them twice, and a number for each.

    Raises:
        CheckpointError: they are missing, or are not what they should be; with got and expected.
    """
    tokens = header.metadata.get(f"{KEY}tokens")
    if not isinstance(tokens, list) or len(tokens) < 2:
        raise CheckpointError(f"{header.path}: {KEY}tokens: got {shown_value(tokens)}, expected a list of texts")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise CheckpointError(f"{header.path}: {KEY}tokens: got {shown(twice)} twice, expected it once")
    kinds = header.metadata.get(f"{KEY}token_type")
    if kinds is None:
        return tokens, np.ones(len(tokens), dtype=np.int32)
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {KEY}token_type: got {shown_value(kinds)}, expected {len(tokens)} whole numbers"
        )
    return tokens, kinds


def token_id(header: GgufHeader, name: str, size: int) -> int | None:
    """An id of the vocabulary.

    Args:
        header: of the file.
        name: of the id, behind `KEY`.
        size: of the vocabulary.

    Returns:
        The id; None where the file names none.

    Raises:
        CheckpointError: there is no such id; with got and expected.
    """
    key = f"{KEY}{name}"
    if key not in header.metadata:
        return None
    index = whole_number(header, key, least=0)
    if index >= size:
        raise CheckpointError(f"{header.path}: {key}: got {index}, expected an id below {size}")
    return index


def read_flag(header: GgufHeader, name: str, *, default: bool) -> bool:
    """Whether something is switched on.

    Args:
        header: of the file.
        name: of the switch, behind `KEY`.
        default: where the file says nothing.

    Returns:
        Whether it is.

    Raises:
        CheckpointError: it is neither true nor false.
    """
    value = header.metadata.get(f"{KEY}{name}", default)
    if type(value) is not bool:
        raise CheckpointError(f"{header.path}: {KEY}{name}: got {shown_value(value)}, expected true or false")
    return value
