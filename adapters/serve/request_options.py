"""The options of a request, by the names that SamplingParams has for them."""

import re
import reprlib
from typing import Any

from posttrainllm.adapters.checks import check_ids
from posttrainllm.adapters.params import MAX_LOGPROBS
from posttrainllm.adapters.serve.errors import ApiError, invalid
from posttrainllm.adapters.serve.fields import LONGEST_STOP, MOST_STOP_IDS, MOST_STOPS
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest
from posttrainllm.adapters.serve.settings import ServeSettings

__all__ = ["options_of", "unknown_model"]

_COMPLETION_TOKENS = 16  # as OpenAI's API has it where a request says nothing
_TEMPERATURE = 1.0  # the same
_SAME_NAME = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")


def options_of(body: ChatRequest | CompletionRequest, settings: ServeSettings) -> dict[str, Any]:
    """What a body asks for, but the seed. Ranges are left to SamplingParams where the names are the same.

    Args:
        body: its fields have the right types.
        settings: the server's.

    Returns:
        Options for SamplingParams.

    Raises:
        ApiError: 400 or 404, naming the field.
        CapacityError: an id is outside the vocabulary.
    """
    if body.model is not None and body.model not in (settings.name, *settings.other_names):
        raise unknown_model(body.model, settings)
    options: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    options["temperature"] = _TEMPERATURE if body.temperature is None else body.temperature
    options["accept_rule"] = body.accept_rule or settings.accept_rule
    options["max_tokens"] = _max_tokens(body, settings)
    options["logprobs"] = _logprobs(body)
    if body.top_k is not None:
        options["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's name for all
    stops = body.stop or []
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise invalid(f"stop: expected at most {MOST_STOPS} texts of {LONGEST_STOP} characters", param="stop")
    options["stop"] = tuple(stops)
    stop_ids = body.stop_token_ids or []
    if len(stop_ids) > MOST_STOP_IDS:
        raise invalid(
            f"stop_token_ids: got {len(stop_ids)} ids, expected at most {MOST_STOP_IDS}", param="stop_token_ids"
        )
    options["stop_token_ids"] = tuple(stop_ids)
    options["logit_bias"] = _bias(body.logit_bias or {})
    for field in ("stop_token_ids", "logit_bias"):
        check_ids(field, options[field], settings.vocab_size)
    return options


def unknown_model(name: str, settings: ServeSettings) -> ApiError:
    """404: another model than the one that is served."""
    message = f"model: got {name[:200]!r}, expected {settings.name!r}, the one that is served"
    return ApiError(404, message, param="model", code="model_not_found")


def _max_tokens(body: ChatRequest | CompletionRequest, settings: ServeSettings) -> int:
    name, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:  # the newer name
        name, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        return settings.max_tokens if isinstance(body, ChatRequest) else min(_COMPLETION_TOKENS, settings.max_tokens)
    if asked < 1:
        raise invalid(f"{name}: got {asked}, expected 1 or more", param=name)
    return min(asked, settings.max_tokens)


def _logprobs(body: ChatRequest | CompletionRequest) -> int | None:
    """How many alternatives; None where no log probabilities are wanted."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    if not body.logprobs:
        raise invalid("top_logprobs: got it without logprobs, expected logprobs: true", param="top_logprobs")
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise invalid(f"top_logprobs: got {body.top_logprobs}, expected 0 to {MAX_LOGPROBS}", param="top_logprobs")
    return body.top_logprobs


def _bias(biases: dict[str, Any]) -> dict[int, float]:
    for name, bias in biases.items():
        if not re.fullmatch("0|-?[1-9][0-9]{0,18}", name):
            raise invalid(f"logit_bias: got the token id {name[:40]!r}, expected a whole number", param="logit_bias")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"logit_bias: got {reprlib.repr(bias)} for {name}, expected -100 to 100", param="logit_bias")
    return {int(name): bias for name, bias in biases.items()}
