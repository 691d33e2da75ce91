"""From a body that has the right fields to checked work: prompts as ids, and the options of every choice."""

from collections.abc import Sequence
from typing import Any

import attrs

from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.options import check_template_args
from posttrainllm.adapters.params import MAX_LOGPROBS, SamplingParams
from posttrainllm.adapters.serve.checks import biases_of, check_ids, check_length, check_text
from posttrainllm.adapters.serve.errors import ApiError, invalid
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["Choice", "Work", "prepare_chat", "prepare_completion", "unknown_model"]

_MOST_CHOICES = 128
_MOST_STOPS = 64
_MOST_STOP_IDS = 1024
_LONGEST_STOP = 256  # text is held back against each of them at every token
_COMPLETION_TOKENS = 16  # as OpenAI's API has it where a request says nothing
_TEMPERATURE = 1.0  # the same
_SAME_NAME = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")


@attrs.frozen(kw_only=True)
class Choice:
    """One choice of a request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    """Length, prompt included, at which it ends."""
    echo: str = ""
    """Text that stands in front of the reply."""


@attrs.frozen(kw_only=True)
class Work:
    """A request that can be carried out."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    """Of every prompt, once."""
    speculate: bool
    stream: bool
    include_usage: bool
    echo: bool = False


def prepare_chat(body: ChatRequest, settings: ServeSettings, tokenizer: Tokenizer) -> Work:
    """Apply the chat template and check the options.

    Args:
        body: of POST /v1/chat/completions.
        settings: the server's.
        tokenizer: the target's.

    Returns:
        The work.

    Raises:
        ApiError: 400 or 404, naming the field.
        UsageError: an option is out of range.
    """
    if body.tools and body.tool_choice != "none":
        raise invalid(
            "tools: this server supports no tools: an empty list", param="tools", code="unsupported_parameter"
        )
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs: got it without logprobs, expected logprobs: true", param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            got = body.top_logprobs
            raise invalid(f"top_logprobs: got {got}, expected 0 to {MAX_LOGPROBS}", param="top_logprobs")
    if body.max_completion_tokens is not None:
        if body.max_completion_tokens < 1:
            got = body.max_completion_tokens
            raise invalid(f"max_completion_tokens: got {got}, expected 1 or more", param="max_completion_tokens")
        body = body.model_copy(update={"max_tokens": body.max_completion_tokens})
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, settings, logprobs=logprobs, max_tokens=settings.max_tokens)
    ids = _conversation(body, settings, tokenizer)
    return _work(body, settings, [(ids, "")], options)


def prepare_completion(body: CompletionRequest, settings: ServeSettings, tokenizer: Tokenizer) -> Work:
    """Encode the prompts and check the options.

    Args:
        body: of POST /v1/completions.
        settings: the server's.
        tokenizer: the target's.

    Returns:
        The work.

    Raises:
        ApiError: 400 or 404, naming the field.
        UsageError: an option is out of range.
    """
    if body.best_of not in (None, body.n or 1):
        raise invalid(f"best_of: got {body.best_of}, expected n: this server returns every choice", param="best_of")
    options = _options(body, settings, logprobs=body.logprobs, max_tokens=_COMPLETION_TOKENS)
    prompts: Sequence[Any] = body.prompt if _are_several(body.prompt) else [body.prompt]
    if not prompts:
        raise invalid("prompt: got an empty list, expected a text, token ids, or a list of either", param="prompt")
    encoded = [_prompt(prompt, settings, tokenizer, with_text=bool(body.echo)) for prompt in prompts]
    return _work(body, settings, encoded, options)


def unknown_model(name: str, settings: ServeSettings) -> ApiError:
    """404: another model than the one that is served."""
    message = f"model: got {name[:200]!r}, expected {settings.name!r}, the one that is served"
    return ApiError(404, message, param="model", code="model_not_found")


def _are_several(prompt: Any) -> bool:
    return isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))


def _prompt(
    prompt: str | list[int], settings: ServeSettings, tokenizer: Tokenizer, *, with_text: bool
) -> tuple[list[int], str]:
    """Ids and, for echo, the text of one prompt."""
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt: got an empty text, expected one or more characters", param="prompt")
        check_text("prompt", len(prompt), settings)
        ids = tokenizer.encode(prompt)
        check_length("prompt", ids, settings)
        return ids, prompt if with_text else ""
    check_length("prompt", prompt, settings)
    check_ids("prompt", prompt, settings.prompt_vocab_size)
    return prompt, tokenizer.decode(prompt) if with_text else ""


def _conversation(body: ChatRequest, settings: ServeSettings, tokenizer: Tokenizer) -> list[int]:
    if not body.messages:
        raise invalid("messages: got an empty list, expected one message or more", param="messages")
    messages = []
    for message in body.messages:
        content = message.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        messages.append({"role": message.role, "content": text})
    check_text("messages", sum(len(message["content"]) for message in messages), settings)
    arguments = body.chat_template_kwargs or {}
    try:
        check_template_args("chat_template_kwargs", arguments)
        ids = tokenizer.encode_chat(messages, arguments)
    except CheckpointError as error:
        why = str(error).rpartition("cannot be used: ")[2]  # what stands before it is a path of this machine
        raise invalid(f"messages: the chat template refuses them: {why}", param="messages") from None
    check_length("messages", ids, settings)
    return ids


def _options(
    body: ChatRequest | CompletionRequest, settings: ServeSettings, *, logprobs: int | None, max_tokens: int
) -> dict[str, Any]:
    """The options of SamplingParams that the body asks for, but the seed."""
    if body.model is not None and body.model not in (settings.name, *settings.other_names):
        raise unknown_model(body.model, settings)
    options: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    options["temperature"] = _TEMPERATURE if body.temperature is None else body.temperature
    options["max_tokens"] = max_tokens if body.max_tokens is None else body.max_tokens
    options["accept_rule"] = body.accept_rule or settings.accept_rule
    options["logprobs"] = logprobs
    if body.top_k is not None:
        options["top_k"] = 0 if body.top_k == -1 else body.top_k  # vLLM's name for all
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
        raise invalid(f"stop: expected at most {_MOST_STOPS} texts of {_LONGEST_STOP} characters", param="stop")
    options["stop"] = tuple(stops)
    options["stop_token_ids"] = tuple(body.stop_token_ids or ())
    if len(options["stop_token_ids"]) > _MOST_STOP_IDS:
        got = len(options["stop_token_ids"])
        raise invalid(f"stop_token_ids: got {got} ids, expected at most {_MOST_STOP_IDS}", param="stop_token_ids")
    options["logit_bias"] = biases_of(body.logit_bias or {})
    for field in ("stop_token_ids", "logit_bias"):
        check_ids(field, options[field], settings.vocab_size)
    return options


def _work(
    body: ChatRequest | CompletionRequest,
    settings: ServeSettings,
    prompts: Sequence[tuple[list[int], str]],
    options: dict[str, Any],
) -> Work:
    count = 1 if body.n is None else body.n
    if not 1 <= count * len(prompts) <= _MOST_CHOICES:
        raise invalid(f"n: got {count}, expected 1 to {_MOST_CHOICES // len(prompts) or 1}", param="n")
    choices = []
    for ids, echo in prompts:
        for index in range(count):
            seed = {} if body.seed is None else {"seed": _seed(body.seed, index)}
            params = SamplingParams.from_options({**options, **seed})
            limit = min(len(ids) + min(params.max_tokens, settings.max_tokens), settings.context)
            choices.append(Choice(prompt=tuple(ids), params=params, limit=limit, echo=echo))
    return Work(
        choices=tuple(choices),
        prompt_tokens=sum(len(ids) for ids, _ in prompts),
        speculate=body.speculative is not False,
        stream=bool(body.stream),
        include_usage=bool(body.stream and body.stream_options and body.stream_options.include_usage),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
    )


def _seed(seed: int, index: int) -> int:
    """Of one choice: the first has the request's, each further one the next; a seed out of range is left for others."""
    return seed if index == 0 else (seed + index) % 2**64
