"""The bodies of requests: names and types. Ranges are checked by SamplingParams, once for every way to ask."""

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema

from posttrainllm.adapters.options import RESERVED_TEMPLATE_ARGS
from posttrainllm.adapters.params import AcceptRule
from posttrainllm.adapters.serve.errors import ApiError, invalid
from posttrainllm.adapters.serve.fields import (
    Bias,
    Choices,
    Content,
    Count,
    FromZeroToOne,
    Logprobs,
    Modalities,
    Penalty,
    Prompts,
    Repetition,
    Seed,
    Share,
    Stops,
    Temperature,
    TokenIds,
    TopK,
)

__all__ = ["ChatRequest", "CompletionRequest", "Message", "StreamOptions", "parse"]


_Body = TypeVar("_Body", bound=BaseModel)
_EXPECTED = {
    "prompt": "a text, token ids, or a list of either",
    "stop": "a text or a list of texts, none of them empty",
    "stop_token_ids": "a list of token ids",
}
_IN_WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a text",
}
_SUPPORTED = {
    "response_format": 'none but {"type": "text"}',
    "tool_choice": "no tools, only none and auto",
    "functions": "no functions",
    "function_call": "no functions, only none and auto",
    "modalities": "text alone",
    "suffix": "no suffix",
}


_TemplateArguments = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": sorted(RESERVED_TEMPLATE_ARGS)}}}),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    """How a stream ends; what else stands there is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class _Neutral(_Model):
    """{"type": "text"}: what would be done anyway."""

    type: Literal["text"]


class _Request(_Model):
    """What both endpoints take."""

    model: str | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: FromZeroToOne | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: Bias | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # ours
    speculative: bool | None = None
    accept_rule: AcceptRule | None = None
    ignore_eos: bool | None = None
    # harmless: they change nothing of an answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Message(_Model):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(json_schema_extra={"minItems": 1})]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    chat_template_kwargs: _TemplateArguments | None = None
    # neutral values of what is not supported
    response_format: _Neutral | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, Field(max_length=0)] = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Modalities | None = None


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    suffix: Literal[""] | None = None


_OTHERS: dict[type[BaseModel], tuple[type[BaseModel], str]] = {
    ChatRequest: (CompletionRequest, "/v1/completions"),
    CompletionRequest: (ChatRequest, "/v1/chat/completions"),
}


def parse(kind: type[_Body], value: dict[str, Any]) -> _Body:
    """Check a body's fields.

    Args:
        kind: what it must be.
        value: the JSON object.

    Returns:
        The request.

    Raises:
        ApiError: 400; names the first field that is wrong, with got and expected.
    """
    present = {name: entry for name, entry in value.items() if entry is not None}  # null is every field's default
    unknown = next((name for name in present if name not in kind.model_fields), None)
    if unknown is not None:  # pydantic would collect them all
        other, path = _OTHERS[kind]
        if unknown in other.model_fields:
            message = f"{unknown}: got a field of {path} on another endpoint"
            raise invalid(message, param=unknown, code="unsupported_parameter")
        raise _no_such_field(unknown)
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _told(error.errors(include_url=False)[0]) from None


def _told(error: Any) -> ApiError:
    """One line for the first thing that pydantic found."""
    field, loc = str(error["loc"][0])[:60], error["loc"]
    got = {True: "true", False: "false"}.get(error["input"]) if isinstance(error["input"], bool) else None
    got = got or reprlib.repr(error["input"])
    place = ".".join(map(str, loc))[:80]
    if error["type"] == "extra_forbidden":
        return _no_such_field(place)
    if error["type"] == "missing":
        return invalid(f"{place}: got nothing, expected a value", param=place, code="missing_required_parameter")
    if field in _EXPECTED:
        return invalid(f"{field}: got {got}, expected {_EXPECTED[field]}", param=field)
    if field in _SUPPORTED:
        message = f"{field}: got {got}, this server supports {_SUPPORTED[field]}"
        return invalid(message, param=field, code="unsupported_parameter")
    if field == "messages" and loc[-1] == "content":
        return invalid(f"{place}: got {got}, expected a text or a list of text parts", param=field)
    expected = _IN_WORDS.get(error["type"]) or error["msg"].removeprefix("Input should be ").replace("'", "")
    return invalid(f"{place}: got {got}, expected {expected}", param=field)


def _no_such_field(place: str) -> ApiError:
    return invalid(f"{place[:80]}: this server has no such field", param=place[:80], code="unsupported_parameter")
