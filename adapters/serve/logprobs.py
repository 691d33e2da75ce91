"""Log probabilities as the two endpoints write them."""

from collections.abc import Sequence
from typing import Any

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.rows import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]


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
    logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, *, offset: int = 0
) -> dict[str, Any]:
    """The `logprobs` of a completion choice.

    Args:
        logprobs: of ids in order; None only for a prompt's first, which nothing predicts: then its id is given apart.
        tokenizer: the target's.
        offset: characters of the choice before the first of them.

    Returns:
        Parallel lists; `top_logprobs` names an alternative by its text, and the id itself is among them.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token in logprobs:
        text = tokenizer.piece(token.token_id)
        tokens.append(text)
        values.append(token.logprob)
        tops.append({tokenizer.piece(index): value for index, value in (*token.top, (token.token_id, token.logprob))})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
