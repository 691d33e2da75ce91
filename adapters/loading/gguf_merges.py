"""The merges of a GGUF file's tokenizer: written out, or in the order of scores."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.adapters.loading.gguf_values import shown_value
from posttrainllm.adapters.messages import shown
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["scored_merges", "stated_merges"]

_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_LONGEST_PIECE = 1024  # characters: every way to cut a piece is looked at


def stated_merges(header: GgufHeader, vocabulary: Mapping[str, int]) -> list[list[str]]:
    """Read the merges of a byte-level BPE.

    Args:
        header: of the file.
        vocabulary: ids by piece.

    Returns:
        Pairs of pieces, the first merged first.

    Raises:
        CheckpointError: there are none, or one makes no piece; with got and expected.
    """
    merges = header.metadata.get(_MERGES)
    if not isinstance(merges, list):
        raise CheckpointError(f"{header.path}: {_MERGES}: got {shown_value(merges)}, expected a list of texts")
    found = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left and right) or not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise CheckpointError(
                f"{header.path}: {_MERGES}: got {shown(merge)}, expected two pieces that make a third, all of them "
                "tokens"
            )
        found.append([left, right])
    return found


def scored_merges(header: GgufHeader, tokens: Sequence[str], *, normal: Collection[int]) -> list[list[str]]:
    """Find the merges of SentencePiece's BPE: of two neighbours, those whose piece has the highest score come first.

    Args:
        header: of the file.
        tokens: pieces by id.
        normal: ids of pieces that text is made of; others are no part of a merge.

    Returns:
        Pairs of pieces, the first merged first.

    Raises:
        CheckpointError: the scores are missing, or are none; with got and expected.
    """
    scores = header.metadata.get(_SCORES)
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f" or len(scores) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {_SCORES}: got {shown_value(scores)}, expected {len(tokens)} floats, one a token"
        )
    if not np.isfinite(scores).all():
        raise CheckpointError(f"{header.path}: {_SCORES}: got a score that is not finite, expected numbers")
    longest = max(map(len, tokens))
    if longest > _LONGEST_PIECE:
        raise CheckpointError(
            f"{header.path}: tokenizer.ggml.tokens: got a piece of {longest} characters, expected {_LONGEST_PIECE} "
            "at most"
        )
    ids = {tokens[index]: index for index in normal}
    found = []
    for index in normal:
        piece = tokens[index]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-float(scores[index]), ids[left], ids[right], [left, right]))
    found.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in found]
