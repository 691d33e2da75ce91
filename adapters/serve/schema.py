"""The bodies of requests: names and types. Ranges are checked by SamplingParams, once for every way to ask."""

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, ValidationError

from posttrainllm.adapters.params import AcceptRule
from posttrainllm.adapters.serve.errors import ApiError, invalid

__all__ = ["ChatRequest", "CompletionRequest", "Message", "StreamOptions", "parse"]


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Int = Annotated[int, BeforeValidator(_whole)]


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, ids, or a list of either, as a list; it looks no further than the first thing that is wrong.

    A union of four types would try them all, and keep what is wrong with every entry of each.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError
    if isinstance(value[0], (str, list)):
        return [entry if isinstance(entry, str) else _ids(entry) for entry in value]
    return [_ids(value)]


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise ValueError
    ids = [_whole(entry) for entry in value]
    if not all(type(entry) is int for entry in ids):  # a bool is an int, too
        raise ValueError
    return ids


def _content(value: Any) -> str:
    """A message's text, which may come in parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError
    return "".join(part["text"] for part in parts)


def _text_alone(value: Any) -> list[str]:
    """["text"]: what is answered anyway."""
    if not isinstance(value, list) or any(entry != "text" for entry in value):
        raise ValueError
    return value


def _texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


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
    n: _Int | None = None
    max_tokens: _Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    min_p: float | None = None
    seed: _Int | None = None
    stop: Annotated[list[str], PlainValidator(_texts)] | None = None
    stop_token_ids: Annotated[list[int], PlainValidator(_ids)] | None = None
    logit_bias: dict[str, Any] | None = None  # its numbers are checked where its ids are
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
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
    content: Annotated[str, PlainValidator(_content)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: _Int | None = None
    logprobs: bool | None = None
    top_logprobs: _Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # neutral values of what is not supported
    response_format: _Neutral | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, Field(max_length=0)] = None
    function_call: Literal["none", "auto"] | None = None
    modalities: Annotated[list[str], PlainValidator(_text_alone)] | None = None


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: _Int | None = None
    echo: bool | None = None
    best_of: _Int | None = None
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
