"""The shapes of answers in OpenAI's API, for /openapi.json: what formats.py, logprobs.py and totals.py write as JSON.

A test holds every kind of answer of a running server against them, field by field.
"""

from typing import Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

__all__ = [
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatLogprobs",
    "ChatTokenLogprob",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "Error",
    "ErrorDetails",
    "PromptDetails",
    "ReplyMessage",
    "Speculative",
    "Timings",
    "TokenLogprob",
    "Usage",
]

_Reason: TypeAlias = Literal["stop", "length"]
_Policy: TypeAlias = Literal["fixed", "auto"]
_Rule: TypeAlias = Literal["leviathan", "coupled"]


class PromptDetails(TypedDict):
    """What of the prompts was not computed again."""

    cached_tokens: int


class Usage(TypedDict):
    """Counts of a request."""

    prompt_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens: int
    total_tokens: int
    draft_proposed: int
    draft_accepted: int
    accept_rate: float | None


class Speculative(TypedDict):
    """Whether it was drafted for, how, and what the gate says."""

    enabled: bool
    reason: str | None
    draft_k: int | None
    policy: _Policy | None
    accept_rule: _Rule | None
    verdict: str | None


class Timings(TypedDict):
    """Seconds, and rates."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    decode_tokens_per_s: float | None
    steps: int
    tokens_per_step: float | None


class TokenLogprob(TypedDict):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """The same with its likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Of a completion choice: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ReplyMessage(TypedDict):
    """A reply."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One of `n`."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: _Reason


class Delta(TypedDict):
    """A part of a reply."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """A part of one of `n`."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: _Reason | None


class CompletionChoice(TypedDict):
    """One choice, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _Reason | None


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Answer):
    """A whole answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    speculative: Speculative
    timings: Timings


class ChatCompletionChunk(_Answer):
    """One event of its stream; the counts are in the last."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]
    speculative: NotRequired[Speculative]
    timings: NotRequired[Timings]


class Completion(_Answer):
    """A whole answer of POST /v1/completions, and one event of its stream, where the counts are in the last."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage]
    speculative: NotRequired[Speculative]
    timings: NotRequired[Timings]


class ErrorDetails(TypedDict):
    """What is wrong, in one line, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """What is answered in place of an answer."""

    error: ErrorDetails
