"""Log probabilities as the two endpoints write them."""

from collections.abc import Sequence
from typing import Any

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.result import TokenLogprobs

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
    logprobs: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, *, offsets: Sequence[int], first: int
) -> dict[str, Any]:
    """The `logprobs` of a completion choice.

    Args:
        logprobs: of ids in order; None only for a prompt's first, which nothing comes before.
        tokenizer: the target's.
        offsets: characters of the choice before each of them.
        first: the id that a None stands for.

    Returns:
        Parallel lists; `top_logprobs` names alternatives by their texts, and the id itself is among them unless a
        likelier one has the same text.
    """
    tops = [None if token is None else _by_text(token, tokenizer) for token in logprobs]
    return {
        "tokens": [tokenizer.piece(first if token is None else token.token_id) for token in logprobs],
        "token_logprobs": [None if token is None else token.logprob for token in logprobs],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _by_text(token: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Alternatives and the id itself by their texts; of ids with one text, as parts of characters are, the likelier."""
    found: dict[str, float] = {}
    for index, logprob in (*token.top, (token.token_id, token.logprob)):
        text = tokenizer.piece(index)
        found[text] = max(logprob, found.get(text, logprob))
    return found
