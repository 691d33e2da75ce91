"""GET /openapi.json: what this server can be asked, made from the types that requests are checked with."""

from collections.abc import Callable
from typing import Any

import attrs
from pydantic import TypeAdapter

from posttrainllm.adapters.serve import answer_types, ollama_types, state_types
from posttrainllm.adapters.serve.fields import EMITTED_IDS, PROMPT_IDS, Json
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest
from posttrainllm.adapters.serve.settings import ServeSettings

__all__ = ["openapi"]

_SCHEMAS = "#/components/schemas/{model}"
_JSON, _EVENTS, _LINES = "application/json", "text/event-stream", "application/x-ndjson"
_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (ChatRequest, CompletionRequest)},
    **{
        name: getattr(module, name)
        for module in (answer_types, ollama_types, state_types)
        for name in module.__all__
        if name[0].isupper()
    },
}
_ERRORS = {
    400: "The request cannot work: no JSON object, an unknown or bad field, a prompt that does not fit.",
    401: "No key, or another one.",
    404: "Another model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "The line is full.",
    500: "This request or the engine failed.",
    503: "The server is shutting down.",
    504: "The answer took too long.",
}
_GENERATING = (400, 404, 408, 413, 429, 500, 503, 504)


@attrs.frozen(kw_only=True)
class _Operation:
    method: str
    path: str
    summary: str
    answer: str | None = None
    """Schema of a JSON answer."""
    body: str | None = None
    stream: tuple[str, str] | None = None
    """Media type of a stream, and the schema of one event or line; "[DONE]" behind events is none of it."""
    errors: tuple[int, ...] = ()
    ollama: bool = False
    open: bool = False
    """Whether it needs no key."""


_OPERATIONS = (
    _Operation(method="get", path="/", summary="A line that says whether it works.", open=True),
    _Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Continue a conversation.",
        body="ChatRequest",
        answer="ChatCompletion",
        stream=(_EVENTS, "ChatCompletionChunk"),
        errors=_GENERATING,
    ),
    _Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a text.",
        body="CompletionRequest",
        answer="Completion",
        stream=(_EVENTS, "Completion"),
        errors=_GENERATING,
    ),
    _Operation(method="get", path="/v1/models", summary="The model.", answer="ModelList"),
    _Operation(method="get", path="/v1/models/{name}", summary="The model.", answer="ModelCard", errors=(404,)),
    _Operation(
        method="post",
        path="/api/chat",
        summary="Ollama's chat.",
        body="OllamaChatRequest",
        answer="OllamaChatAnswer",
        stream=(_LINES, "OllamaChatAnswer"),
        errors=_GENERATING,
        ollama=True,
    ),
    _Operation(
        method="post",
        path="/api/generate",
        summary="Ollama's completions.",
        body="OllamaGenerateRequest",
        answer="OllamaGenerateAnswer",
        stream=(_LINES, "OllamaGenerateAnswer"),
        errors=_GENERATING,
        ollama=True,
    ),
    _Operation(
        method="post",
        path="/api/show",
        summary="The model.",
        body="OllamaShowRequest",
        answer="OllamaShow",
        errors=(400, 404, 408, 413),
        ollama=True,
    ),
    _Operation(method="get", path="/api/ps", summary="The model in memory.", answer="OllamaPs", ollama=True),
    _Operation(method="get", path="/api/tags", summary="The model.", answer="OllamaTags", ollama=True),
    _Operation(method="get", path="/api/version", summary="The version.", answer="OllamaVersion", ollama=True),
    _Operation(method="get", path="/health", summary="Whether it works.", answer="Health", open=True),
    _Operation(method="get", path="/metrics", summary="Counts and state, for Prometheus."),
    _Operation(method="get", path="/openapi.json", summary="This document."),
)


def openapi(settings: ServeSettings, version: str) -> Json:
    """The document, in OpenAPI 3.1.

    Args:
        settings: the server's: the name of its model, its vocabulary, whether it wants a key.
        version: of the package.

    Returns:
        Plain values, for JSON.
    """
    keyed = settings.api_key is not None
    paths: dict[str, Json] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(
            operation, keyed=keyed and not operation.open
        )
    schemes: Json = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keyed else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "posttrainllm serve", "version": version},
        "paths": paths,
        "components": {"schemas": _schemas(settings), **schemes},
    }


def _schemas(settings: ServeSettings) -> dict[str, Json]:
    found: dict[str, Json] = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(kind)) for name, kind in _TYPES.items()], ref_template=_SCHEMAS
    )[1]["$defs"]
    requests = {"ChatRequest", "CompletionRequest", "Message", "StreamOptions", "_Neutral"}
    for name in found.keys() - requests:
        found[name]["additionalProperties"] = False
    for name in ("ChatRequest", "CompletionRequest"):
        found[name]["properties"]["model"] = {"enum": [settings.name, None]}
        found[name]["additionalProperties"] = {"type": "null"}  # null is the default of what is not there, too
    found |= ollama_types.ollama_bodies(found["ChatRequest"], found["Message"], settings.name)
    largest = {EMITTED_IDS: settings.vocab_size - 1, PROMPT_IDS: settings.prompt_vocab_size - 1}
    return {name: _rewritten(schema, lambda value: largest.get(value, value)) for name, schema in found.items()}


def _rewritten(value: Any, change: Callable[[Any], Any]) -> Any:
    """A schema with numbers in place of their names, and without the titles that only repeat a name."""
    if isinstance(value, dict):
        return {
            key: _rewritten(entry, change)
            for key, entry in value.items()
            if not (key == "title" and isinstance(entry, str)) and not (key == "default" and entry is None)
        }
    if isinstance(value, list):
        return [_rewritten(entry, change) for entry in value]
    return change(value) if isinstance(value, str) else value


def _described(operation: _Operation, *, keyed: bool) -> Json:
    identified = {"x-request-id": {"description": "Also in the log.", "schema": {"type": "string"}}}
    generates = {"headers": identified} if operation.stream is not None else {}
    responses: Json = {"200": {"description": "The answer.", **generates, "content": _content_of(operation)}}
    if operation.path in ("/", "/health"):
        responses["503"] = {
            "description": "The engine has failed, or the server stops.",
            "content": _content_of(operation),
        }
    error = {_JSON: {"schema": _ref("OllamaError" if operation.ollama else "Error")}}
    for status in (*operation.errors, *((401,) if keyed else ())):
        headers = dict(identified)
        if status == 429:
            headers["retry-after"] = {"description": "In seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
        responses[str(status)] = {"description": _ERRORS[status], "headers": headers, "content": error}
    described: Json = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(operation.body)}}}
    if "{name}" in operation.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if keyed:
        described["security"] = [{"key": []}]
    return described


def _content_of(operation: _Operation) -> Json:
    if operation.answer is None:
        kind = _JSON if operation.path == "/openapi.json" else "text/plain"
        return {kind: {"schema": {"type": "object" if kind == _JSON else "string"}}}
    content: Json = {_JSON: {"schema": _ref(operation.answer)}}
    if operation.stream is not None:
        media_type, part = operation.stream
        content[media_type] = {"x-item-schema": _ref(part)}  # 3.1 has no word for it, 3.2 says itemSchema
    return content


def _ref(name: str) -> Json:
    return {"$ref": _SCHEMAS.format(model=name)}
