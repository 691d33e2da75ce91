"""The shapes of Ollama's requests and answers, for /openapi.json: what ollama.py reads, and what is answered."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from posttrainllm.adapters.serve.answer_types import Speculative, Usage
from posttrainllm.adapters.serve.fields import Json
from posttrainllm.adapters.serve.ollama import DEFAULTS, NEUTRAL, OURS, REFUSED, SAME_NAME

__all__ = [
    "OllamaChatAnswer",
    "OllamaDetails",
    "OllamaError",
    "OllamaGenerateAnswer",
    "OllamaMessage",
    "OllamaModel",
    "OllamaPs",
    "OllamaRunning",
    "OllamaShow",
    "OllamaTags",
    "OllamaVersion",
    "ollama_bodies",
]


class OllamaError(TypedDict):
    """What is answered in place of an answer."""

    error: str


class OllamaMessage(TypedDict):
    """A reply, or a part of it."""

    role: Literal["assistant"]
    content: str


class _OllamaAnswer(TypedDict):
    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    eval_count: NotRequired[int]
    usage: NotRequired[Usage]
    speculative: NotRequired[Speculative]


class OllamaChatAnswer(_OllamaAnswer):
    """An answer of POST /api/chat, and one line of its stream, where the counts are in the last."""

    message: OllamaMessage


class OllamaGenerateAnswer(_OllamaAnswer):
    """An answer of POST /api/generate, and one line of its stream."""

    response: str


class OllamaDetails(TypedDict):
    """Of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(TypedDict):
    """The models that are served: one."""

    models: list[OllamaModel]


class OllamaRunning(TypedDict):
    """A model in memory."""

    name: str
    model: str
    digest: str
    details: OllamaDetails
    size: int
    size_vram: int
    expires_at: str
    context_length: int


class OllamaPs(TypedDict):
    """The models in memory: one."""

    models: list[OllamaRunning]


class OllamaShow(TypedDict):
    """The model that is served."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """The package's version."""

    version: str


_NOTHING: list[Any] = [None, False, 0, "", [], {}]
_NULL: Json = {"type": "null"}


def ollama_bodies(chat: Json, message: Json, name: str) -> dict[str, Json]:
    """The bodies of Ollama's endpoints. Whatever else stands in one is ignored.

    Args:
        chat: the JSON Schema of our own chat request, whose fields the options become.
        message: that of one of its messages.
        name: of the model.

    Returns:
        Schemas by name.
    """
    model: Json = {"enum": [name, f"{name}:latest"]}
    named: Json = {
        "type": "object",
        "properties": {
            "model": {"enum": [*model["enum"], None]},
            "name": {"description": "Of old, and ignored beside model."},
        },
        "anyOf": [
            {"properties": {"model": model}, "required": ["model"]},
            {"properties": {"name": model, "model": _NULL}, "required": ["name"]},
        ],
    }
    refused = {field: {"enum": _NOTHING, "description": f"No {what} here."} for field, what in REFUSED.items()}
    ours = {field: chat["properties"][field] for field in (*DEFAULTS, *SAME_NAME, *OURS)}
    options: Json = {
        "type": "object",
        "properties": {
            **ours,
            "top_k": _nullable({"type": "integer", "maximum": 2**31 - 1}),
            "num_predict": _nullable({"type": "integer"}),
            "seed": _nullable({"type": "integer", "maximum": 2**64 - 1}),
            "repeat_last_n": _nullable({"type": "integer"}),
            "repeat_penalty": chat["properties"]["repetition_penalty"],
            **{field: {"enum": [neutral, None]} for field, neutral in NEUTRAL.items()},
        },
    }
    common: dict[str, Json] = {
        **refused,
        "stream": {"type": ["boolean", "null"], "default": True},
        "options": {"anyOf": [options, {"type": "array", "maxItems": 0}, _NULL]},
    }
    nothing = {field: {"enum": _NOTHING} for field in ("images", "tool_calls")}
    spoken: Json = {
        "type": "object",
        "properties": {**{field: message["properties"][field] for field in ("role", "content")}, **nothing},
        "required": ["role"],
    }
    text: Json = {"type": ["string", "null"]}
    asked: dict[str, Json] = {"prompt": text, "system": text, "raw": {"type": ["boolean", "null"]}}
    return {
        "OllamaChatRequest": _with(named, **common, messages=_nullable({"type": "array", "items": spoken})),
        "OllamaGenerateRequest": _with(named, **common, **asked),
        "OllamaShowRequest": named,
    }


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _with(schema: Json, **properties: Json) -> Json:
    return {**schema, "properties": {**schema["properties"], **properties}}
