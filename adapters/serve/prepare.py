"""From a body that has the right fields to checked work: prompts as ids, and the options of every choice."""

from collections.abc import Sequence
from typing import Any

import attrs

from posttrainllm.adapters.checks import check_ids
from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.options import check_template_args
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.serve.errors import invalid
from posttrainllm.adapters.serve.fields import MOST_CHOICES
from posttrainllm.adapters.serve.request_options import options_of
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest, parse
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.kernel.errors import CapacityError, CheckpointError

__all__ = ["Choice", "Work", "count_choices", "parse_completion", "prepare_chat", "prepare_completion"]


@attrs.frozen(kw_only=True)
class Choice:
    """One choice of a request."""

    prompt: tuple[int, ...]
    seed: int
    limit: int
    """Length, prompt included, at which it ends."""
    echo: str = ""
    """Text that stands in front of the reply."""


@attrs.frozen(kw_only=True)
class Work:
    """A request that can be carried out."""

    choices: tuple[Choice, ...]
    params: SamplingParams
    """Of every choice, but for the seed."""
    prompts: int
    """How many there are; each has as many choices, one behind the other."""
    prompt_tokens: int
    """Of every prompt, once."""
    speculate: bool
    stream: bool
    include_usage: bool
    echo: bool = False


def count_choices(body: ChatRequest | CompletionRequest) -> int:
    """Rows that a request takes.

    Args:
        body: its fields have the right types.

    Returns:
        Prompts times choices.

    Raises:
        ApiError: 400: none, or more than any request may ask for.
    """
    prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    if prompts > MOST_CHOICES:
        raise invalid(f"prompt: got {prompts} prompts, expected at most {MOST_CHOICES}", param="prompt")
    count = 1 if body.n is None else body.n
    if not 1 <= count * prompts <= MOST_CHOICES:
        beside = "" if prompts == 1 else f" with {prompts} prompts"
        raise invalid(f"n: got {count}, expected 1 to {MOST_CHOICES // prompts}{beside}", param="n")
    return count * prompts


def parse_completion(value: dict[str, Any], settings: ServeSettings) -> CompletionRequest:
    """The body of POST /v1/completions; too many ids are not looked at one by one.

    Args:
        value: the JSON object.
        settings: the server's.

    Returns:
        The request.

    Raises:
        ApiError: 400, naming the field.
        CapacityError: a prompt has more ids than fit.
    """
    prompt = value.get("prompt")
    entries = [prompt] if not isinstance(prompt, list) else [prompt, *prompt[:MOST_CHOICES]]
    for entry in entries:
        if isinstance(entry, list) and entry and type(entry[0]) in (int, float):
            _check_length("prompt", entry, settings)
    return parse(CompletionRequest, value)


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
        UsageError, CapacityError: an option is out of range, or the prompt does not fit.
    """
    if body.tools and body.tool_choice != "none":
        raise invalid("tools: this server supports no tools", param="tools", code="unsupported_parameter")
    options = options_of(body, settings)
    return _work(body, settings, [(_conversation(body, settings, tokenizer), "")], options)


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
        UsageError, CapacityError: an option is out of range, or a prompt does not fit.
    """
    if body.best_of not in (None, body.n or 1):
        raise invalid(f"best_of: got {body.best_of}, expected n: this server returns every choice", param="best_of")
    options = options_of(body, settings)
    encoded = [_prompt(prompt, settings, tokenizer, with_text=bool(body.echo)) for prompt in body.prompt]
    return _work(body, settings, encoded, options)


def _prompt(
    prompt: str | list[int], settings: ServeSettings, tokenizer: Tokenizer, *, with_text: bool
) -> tuple[list[int], str]:
    """Ids and, for echo, the text of one prompt."""
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt: got an empty text, expected one or more characters", param="prompt")
        _check_text("prompt", len(prompt), settings)
        ids = tokenizer.encode(prompt)
        _check_length("prompt", ids, settings)
        return ids, prompt if with_text else ""
    check_ids("prompt", prompt, settings.prompt_vocab_size)
    _check_length("prompt", prompt, settings)
    return prompt, tokenizer.decode(prompt) if with_text else ""


def _conversation(body: ChatRequest, settings: ServeSettings, tokenizer: Tokenizer) -> list[int]:
    if not body.messages:
        raise invalid("messages: got an empty list, expected one message or more", param="messages")
    messages = [{"role": message.role, "content": message.content or ""} for message in body.messages]
    _check_text("messages", sum(len(message["content"]) for message in messages), settings)
    arguments = body.chat_template_kwargs or {}
    try:
        check_template_args("chat_template_kwargs", arguments)
        ids = tokenizer.encode_chat(messages, arguments)
    except CheckpointError as error:
        why = str(error).rpartition("cannot be used: ")[2]  # what stands before it is a path of this machine
        raise invalid(f"messages: the chat template refuses them: {why}", param="messages") from None
    _check_length("messages", ids, settings)
    return ids


def _check_length(field: str, ids: Sequence[Any], settings: ServeSettings) -> None:
    """Refuse a prompt of nothing, and one that leaves no room for a reply."""
    if not ids:
        raise invalid(f"{field}: got no token, expected one or more", param=field)
    if len(ids) >= settings.context:
        raise CapacityError(f"{field}: got {len(ids)} tokens, expected fewer than the context of {settings.context}")


def _check_text(field: str, characters: int, settings: ServeSettings) -> None:
    """Refuse what cannot fit before seconds are spent on encoding it."""
    if characters > settings.longest_text:
        raise CapacityError(
            f"{field}: got {characters} characters, expected at most {settings.longest_text}, "
            f"more than which the context of {settings.context} tokens never holds"
        )


def _work(
    body: ChatRequest | CompletionRequest,
    settings: ServeSettings,
    prompts: Sequence[tuple[list[int], str]],
    options: dict[str, Any],
) -> Work:
    count = count_choices(body) // len(prompts)
    params = SamplingParams.from_options({**options, "seed": body.seed})
    choices = []
    for ids, echo in prompts:
        for index in range(count):
            seed = (params.seed + index) % 2**64
            limit = min(len(ids) + params.max_tokens, settings.context)
            choices.append(Choice(prompt=tuple(ids), seed=seed, limit=limit, echo=echo))
    return Work(
        choices=tuple(choices),
        params=params,
        prompts=len(prompts),
        prompt_tokens=sum(len(ids) for ids, _ in prompts),
        speculate=body.speculative is not False,
        stream=bool(body.stream),
        include_usage=bool(body.stream and body.stream_options and body.stream_options.include_usage),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
    )
