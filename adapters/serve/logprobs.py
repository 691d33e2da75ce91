"""Log probabilities as the two endpoints write them."""

from collections.abc import Sequence
from typing import Any

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.result import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs", "shown_length"]


def chat_logprobs(logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat choice: every emitted id, and its most likely alternatives."""

    def entry(index: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.piece(index)
        # a part of a character has no text of its own
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*alternative) for alternative in token.top]}
        for token in logprobs
        if token is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, *, offset: int = 0, first: int | None = None
) -> dict[str, Any]:
    """The `logprobs` of a completion choice.

    Args:
        logprobs: of ids in order; None only for a prompt's first, which nothing comes before.
        tokenizer: the target's.
        offset: characters of the choice before the first of them.
        first: that first id.

    Returns:
        Parallel lists; `top_logprobs` names an alternative by its text, and the id itself is among them.
    """
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in logprobs:
        index = first if token is None else token.token_id
        assert index is not None, "a prompt's first id is given apart"
        own = () if token is None else (*token.top, (token.token_id, token.logprob))
        columns["tokens"].append(tokenizer.piece(index))
        columns["token_logprobs"].append(None if token is None else token.logprob)
        columns["top_logprobs"].append({tokenizer.piece(index): value for index, value in own} or None)
        columns["text_offset"].append(offset)
        offset += shown_length(index, tokenizer)
    return columns


def shown_length(index: int, tokenizer: Tokenizer) -> int:
    """Characters that an id adds to the text of a choice; a special one adds none."""
    return 0 if index in tokenizer.special_ids else len(tokenizer.piece(index))
