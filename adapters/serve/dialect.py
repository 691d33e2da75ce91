"""How an endpoint is asked and answers: the one path that all of them take is in generating.py."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import attrs

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.serve.answers import events, whole_answer
from posttrainllm.adapters.serve.formats import ChatFormat, CompletionFormat, Format
from posttrainllm.adapters.serve.ollama import parse_chat, parse_generate, prepare
from posttrainllm.adapters.serve.ollama_answers import OllamaChat, OllamaGenerate, loaded, ollama_lines, ollama_whole
from posttrainllm.adapters.serve.prepare import Work, parse_completion, prepare_chat, prepare_completion
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest, parse
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.submission import Submission

__all__ = ["CHAT", "COMPLETIONS", "OLLAMA_CHAT", "OLLAMA_GENERATE", "Body", "Dialect"]

Body: TypeAlias = ChatRequest | CompletionRequest


@attrs.frozen(kw_only=True)
class Dialect:
    """One endpoint that generates."""

    name: str
    """In the metrics."""
    id_prefix: str
    parse: Callable[[dict[str, Any], ServeSettings], Body | None]
    """From a JSON object; None where there is nothing to generate."""
    prepare: Callable[[Any, ServeSettings, Tokenizer], Work]
    shape_of: type[Format]
    stream: Callable[[Submission, Work, Format], AsyncIterator[str]]
    whole: Callable[[Submission, Work, Format], Coroutine[Any, Any, dict[str, Any]]]
    nothing: Callable[[ServeSettings], dict[str, Any]] | None = None
    """The answer where there is nothing to generate."""
    media_type: str = "text/event-stream"
    any_type: bool = False
    """Whether a body is JSON whatever it calls itself."""
    names: Mapping[str, str] = attrs.Factory(dict)
    """Fields that its clients know by other names than ours."""


CHAT = Dialect(
    name="chat",
    id_prefix="chatcmpl",
    parse=lambda value, _: parse(ChatRequest, value),
    prepare=prepare_chat,
    shape_of=ChatFormat,
    stream=events,
    whole=whole_answer,
)
COMPLETIONS = Dialect(
    name="completions",
    id_prefix="cmpl",
    parse=parse_completion,
    prepare=prepare_completion,
    shape_of=CompletionFormat,
    stream=events,
    whole=whole_answer,
)
OLLAMA_CHAT = Dialect(
    name="ollama_chat",
    id_prefix="ollama-chat",
    parse=parse_chat,
    prepare=prepare,
    shape_of=OllamaChat,
    stream=ollama_lines,
    whole=ollama_whole,
    nothing=lambda settings: loaded(OllamaChat, settings),
    media_type="application/x-ndjson",
    any_type=True,
    names={"repetition_penalty": "repeat_penalty"},
)
OLLAMA_GENERATE = attrs.evolve(
    OLLAMA_CHAT,
    name="ollama_generate",
    id_prefix="ollama-generate",
    parse=parse_generate,
    shape_of=OllamaGenerate,
    nothing=lambda settings: loaded(OllamaGenerate, settings),
    names={**OLLAMA_CHAT.names, "messages": "prompt"},
)
