"""The bodies of requests: names and types. Ranges are checked by SamplingParams, once for every way to ask."""

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from posttrainllm.adapters.params import AcceptRule
from posttrainllm.adapters.serve.errors import ApiError, invalid

__all__ = ["ChatRequest", "CompletionRequest", "Message", "StreamOptions", "TextPart", "parse"]


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
_Entry = TypeVar("_Entry")
List = Annotated[
    list[_Entry], Field(fail_fast=True)
]  # an error is said once; to collect a million takes minutes and gigabytes


_Body = TypeVar("_Body", bound=BaseModel)
_UNIONS = {
    "prompt": "a text, token ids, or a list of either",
    "stop": "a text or a list of texts",
}
_UNSUPPORTED = {
    "response_format": 'none but {"type": "text"}',
    "tool_choice": "no tools: none or auto",
    "functions": "no functions: an empty list",
    "function_call": "no functions: none or auto",
    "modalities": "text alone",
    "suffix": "no suffix: null",
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    """How a stream ends; what else stands there is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class _Neutral(BaseModel):
    """{"type": "text"}: what would be done anyway."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class _Request(_Model):
    """What both endpoints take."""

    model: str | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[Int] | None = None
    logit_bias: dict[str, Any] | None = None  # its numbers are checked one by one, where the ids are
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


class TextPart(_Model):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Model):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: List[Message]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # neutral values of what is not supported
    response_format: _Neutral | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any] | None, Field(max_length=0)] = None
    function_call: Literal["none", "auto"] | None = None
    modalities: List[Literal["text"]] | None = None


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str | List[str] | List[Int] | List[List[Int]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: Literal[""] | None = None


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
    unknown = next((name for name in value if name not in kind.model_fields), None)
    if unknown is not None:
        raise _no_such_field(unknown)
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _told(error.errors(include_url=False)[0]) from None


def _told(error: Any) -> ApiError:
    """One line for the first thing that pydantic found."""
    field, got = str(error["loc"][0]), error["input"]
    # inside a union the rest of the place names its branches
    loc = error["loc"][: error["loc"].index("content") + 1] if "content" in error["loc"] else error["loc"]
    place = field if field in _UNIONS else ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        return _no_such_field(place)
    if error["type"] == "missing":
        return invalid(f"{place}: got nothing, expected a value", param=place, code="missing_required_parameter")
    if field in _UNIONS:
        return invalid(f"{field}: got {_short(got)}, expected {_UNIONS[field]}", param=field)
    if field in _UNSUPPORTED:
        return invalid(
            f"{field}: this server supports {_UNSUPPORTED[field]}", param=field, code="unsupported_parameter"
        )
    if loc[-1] == "content":
        return invalid(f"{place}: got {_short(got)}, expected a text or a list of text parts", param=field)
    expected = error["msg"].removeprefix("Input should be ").replace("'", "")
    return invalid(f"{place}: got {_short(got)}, expected {expected}", param=field)


def _no_such_field(place: str) -> ApiError:
    return invalid(f"{place}: this server has no such field", param=place, code="unsupported_parameter")


def _short(value: Any) -> str:
    text = reprlib.repr(value)  # of a few entries: the whole of a long list takes its time
    return text if len(text) <= 60 else f"{text[:57]}..."
