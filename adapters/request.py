"""Checked parameters to a row of the engine."""

from collections.abc import Sequence

from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.rows import RowRequest

__all__ = ["request_of"]


def request_of(params: SamplingParams, prompt: Sequence[int], *, limit: int, draft_k: int) -> RowRequest:
    """What the engine is asked for.

    Args:
        params: of the request; `check_ids` holds its ids against the vocabulary.
        prompt: token ids.
        limit: length, prompt included, at which the row stops.
        draft_k: tokens that the draft may propose a step; 0 does not speculate.

    Returns:
        The request.
    """
    names = ("seed", "temperature", "top_k", "top_p", "min_p", "logit_bias", "logprobs")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    return RowRequest(
        prompt=prompt,
        limit=limit,
        draft_k=draft_k,
        coupled=params.accept_rule == "coupled",
        **{name: getattr(params, name) for name in (*names, *penalties)},
    )
