"""Ollama's requests as those of this server: its names, its defaults, and what it ignores.

Fields that change nothing here, and options that nobody knows, are ignored as Ollama does it; what would be active and
is not supported is refused.
"""

import reprlib
from typing import Any

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.serve.errors import ApiError, invalid
from posttrainllm.adapters.serve.fields import whole
from posttrainllm.adapters.serve.prepare import Work, prepare_chat, prepare_completion
from posttrainllm.adapters.serve.request_options import options_of, unknown_model
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest, parse
from posttrainllm.adapters.serve.settings import ServeSettings

__all__ = [
    "DEFAULTS",
    "NEUTRAL",
    "OURS",
    "REFUSED",
    "SAME_NAME",
    "parse_chat",
    "parse_generate",
    "prepare",
    "served_name",
]

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's own
SAME_NAME = ("min_p", "presence_penalty", "frequency_penalty", "stop")
OURS = ("speculative", "accept_rule", "ignore_eos", "stop_token_ids")
NEUTRAL = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}
REFUSED = {
    "format": "structured output",
    "tools": "tools",
    "images": "images",
    "suffix": "suffix",
    "template": "template of a request's own",
    "context": "context of ids",
    "think": "thinking",
    "logprobs": "log probabilities here",
}


def parse_chat(value: dict[str, Any], settings: ServeSettings) -> ChatRequest | None:
    """The body of POST /api/chat.

    Args:
        value: the JSON object.
        settings: the server's.

    Returns:
        The request; None where nothing is to be said, which asks Ollama to load a model.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    common = _common(value, settings)
    messages = [] if value.get("messages") is None else value["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _wrong("messages", messages, "a list of objects")
    for message in messages:
        for field in ("images", "tool_calls"):
            if message.get(field):
                raise _unsupported(f"messages: this server supports no {field}", "messages")
    if not messages:
        _check_nothing(common, settings)
        return None
    spoken = [{"role": message.get("role"), "content": message.get("content")} for message in messages]
    return parse(ChatRequest, {**common, "messages": spoken})


def parse_generate(value: dict[str, Any], settings: ServeSettings) -> ChatRequest | CompletionRequest | None:
    """The body of POST /api/generate: a prompt in the chat template, or with `raw` as it stands.

    Args:
        value: the JSON object.
        settings: the server's.

    Returns:
        The request; None where nothing is to be said, which asks Ollama to load a model.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    common = _common(value, settings)
    prompt, system, raw = (value.get(name) for name in ("prompt", "system", "raw"))
    for name, text in (("prompt", prompt), ("system", system)):
        if text is not None and not isinstance(text, str):
            raise _wrong(name, text, "a text")
    if not isinstance(raw, bool | None):
        raise _wrong("raw", raw, "true or false")
    if not prompt:
        _check_nothing(common, settings)
        return None
    if raw:
        if system:
            raise invalid("system: got it with raw, expected one of them", param="system")
        return parse(CompletionRequest, {"max_tokens": settings.max_tokens, **common, "prompt": prompt})
    before = [{"role": "system", "content": system}] if system else []
    return parse(ChatRequest, {**common, "messages": [*before, {"role": "user", "content": prompt}]})


def prepare(body: ChatRequest | CompletionRequest, settings: ServeSettings, tokenizer: Tokenizer) -> Work:
    """Encode and check either kind of request.

    Args:
        body: its fields have the right types.
        settings: the server's.
        tokenizer: the target's.

    Returns:
        The work.

    Raises:
        ApiError: 400 or 404, naming the field.
        UsageError, CapacityError: an option is out of range, or the prompt does not fit.
    """
    if isinstance(body, ChatRequest):
        return prepare_chat(body, settings, tokenizer)
    return prepare_completion(body, settings, tokenizer)


def served_name(value: dict[str, Any], settings: ServeSettings) -> str:
    """The model that a body names, which may have Ollama's tag behind it.

    Args:
        value: the JSON object.
        settings: the server's.

    Returns:
        A name that is served.

    Raises:
        ApiError: 400 for none, 404 for another.
    """
    name = value.get("name") if value.get("model") is None else value["model"]  # the older field
    if not isinstance(name, str):
        raise invalid("model: got nothing, expected a name", param="model")
    for known in (settings.name, *settings.other_names):
        if name in (known, f"{known}:latest"):
            return known
    raise unknown_model(name, settings)


def _check_nothing(common: dict[str, Any], settings: ServeSettings) -> None:
    """A request for nothing; its options are held to the same bounds."""
    body = parse(CompletionRequest, {**common, "prompt": "x"})
    SamplingParams.from_options({**options_of(body, settings), "seed": body.seed})


def _common(value: dict[str, Any], settings: ServeSettings) -> dict[str, Any]:
    """The fields that both endpoints share, by our names."""
    for field, what in REFUSED.items():
        if value.get(field):
            raise _unsupported(f"{field}: this server supports no {what} in Ollama's API", field)
    stream = value.get("stream")
    if not isinstance(stream, bool | None):
        raise _wrong("stream", stream, "true or false")
    options = value.get("options")
    options = {} if options is None or options == [] else options
    if not isinstance(options, dict):
        raise _wrong("options", options, "an object")
    options = {name: entry for name, entry in options.items() if entry is not None}
    for name, neutral in NEUTRAL.items():
        if isinstance(options.get(name), bool) or options.get(name, neutral) != neutral:
            raise _unsupported(f"{name}: this server supports no other value than {neutral}", name)
    model = served_name(value, settings)
    return {"model": model, "stream": stream is not False, **DEFAULTS, **_sampling(options)}


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    found = {name: options[name] for name in (*DEFAULTS, *SAME_NAME, *OURS) if name in options}
    counts = {name: whole(options.get(name)) for name in ("num_predict", "seed", "repeat_last_n")}
    for name, count in counts.items():
        if count is not None and (type(count) is not int):
            raise _wrong(name, count, "a whole number")
    if (counts["num_predict"] or 0) > 0:  # anything else is no limit
        found["max_tokens"] = counts["num_predict"]
    if counts["seed"] is not None and counts["seed"] >= 0:  # a negative one is drawn afresh
        found["seed"] = counts["seed"]
    if isinstance(whole(found.get("top_k")), int) and found["top_k"] < 0:
        found["top_k"] = 0
    if "repeat_penalty" in options and counts["repeat_last_n"] != 0:
        found["repetition_penalty"] = options["repeat_penalty"]
    return found


def _wrong(name: str, got: Any, expected: str) -> ApiError:
    shown = str(got).lower() if isinstance(got, bool) else reprlib.repr(got)
    return invalid(f"{name}: got {shown}, expected {expected}", param=name)


def _unsupported(message: str, param: str) -> ApiError:
    return invalid(message, param=param, code="unsupported_parameter")
