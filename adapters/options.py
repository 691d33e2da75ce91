"""The command-line options that several commands share."""

import json
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from posttrainllm.adapters.change_options import change_options
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.loading.pair import DTYPES, FORWARDS
from posttrainllm.adapters.params import MAX_DRAFT_K, AcceptRule, check_width, is_text
from posttrainllm.kernel.errors import UsageError

__all__ = [
    "RESERVED_TEMPLATE_ARGS",
    "accept_rule_option",
    "chat_options",
    "check_draft_k",
    "check_system",
    "check_template_args",
    "draft_options",
    "model_options",
    "parse_template_args",
    "sampling_options",
]

# parameters of transformers' apply_chat_template that are ours to set, or that change what it returns
RESERVED_TEMPLATE_ARGS = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages", "padding"),
    *("return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation"),
    *("conversations", "documents", "max_length", "sanitize_control_tokens", "tools"),
}
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _together(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def model_options(*, envvar: str | None = None) -> Callable[[_Command], _Command]:
    """MODEL, --draft-model, --dtype, --forward and those of `change_options`.

    Args:
        envvar: variable that MODEL is taken from where it is not given; None for none.

    Returns:
        The decorator.
    """
    return _together(
        click.argument("model", required=False, envvar=envvar),
        click.option(
            "--draft-model",
            metavar="PATH",
            help="Directory, .tinygpt or GGUF file or hub id of the draft; auto (sample, chat, serve): the one here "
            "that pays best. Default: the embedded one without MODEL.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default="auto",
            show_default=True,
            help="Type of the weights. auto: the checkpoint's, or float32 where that is faster on a CPU.",
        ),
        click.option(
            "--forward",
            type=click.Choice(FORWARDS),
            default="auto",
            show_default=True,
            help="What computes the models. auto: our own forward for Llama-shaped ones; module: mlx-lm's for all.",
        ),
        change_options(),
    )


def draft_options() -> Callable[[_Command], _Command]:
    """--no-draft and --draft-k."""
    return _together(
        click.option("--no-draft", is_flag=True, help="Decode plainly, without a draft."),
        click.option(
            "--draft-k",
            type=DraftLength.parse,
            default=DraftLength(most=4, given=False),
            show_default="4",
            metavar="K",
            help="Tokens the draft proposes a step, 1 to 32. auto: as many as pay, step by step, none where none do; "
            "auto:N: up to N.",
        ),
    )


def sampling_options(*, max_tokens: int) -> Callable[[_Command], _Command]:
    """--max-tokens, --temperature, --top-p, --top-k, --min-p, --seed and --accept-rule.

    Args:
        max_tokens: the default.

    Returns:
        The decorator.
    """
    return _together(
        click.option(
            "--max-tokens",
            type=int,
            default=max_tokens,
            show_default=True,
            help="Most tokens to generate, cut to the context.",
        ),
        click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
        click.option(
            "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest ids up to this mass."
        ),
        click.option("--top-k", type=int, default=0, show_default=True, help="Keep this many ids; 0 keeps all."),
        click.option(
            "--min-p",
            type=float,
            default=0.0,
            show_default=True,
            help="Drop ids under this share of the likeliest.",
        ),
        click.option("--seed", type=int, help="Same seed, same text. Default: fresh entropy."),
        accept_rule_option(),
    )


def accept_rule_option() -> Callable[[_Command], _Command]:
    """--accept-rule."""
    return click.option(
        "--accept-rule",
        type=click.Choice(get_args(AcceptRule)),
        default="leviathan",
        show_default=True,
        help="How proposals are judged at T>0: by the ratio of probabilities, or by shared noise, which gives the "
        "ids that plain sampling with the same seed gives.",
    )


def chat_options() -> Callable[[_Command], _Command]:
    """--system and --chat-template-args."""
    return _together(
        click.option("--system", metavar="TEXT", help="The conversation's system message."),
        click.option(
            "--chat-template-args",
            metavar="JSON",
            help="An object that the chat template gets besides, for example '{\"enable_thinking\": false}'.",
        ),
    )


def parse_template_args(text: str | None) -> dict[str, Any]:
    """Read --chat-template-args.

    Args:
        text: the option's value.

    Returns:
        The object; empty without the option.

    Raises:
        UsageError: it is no JSON object, or names what the template is given anyway.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-args: got {text[:60]!r}, expected a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"--chat-template-args: got {text[:60]!r}, expected a JSON object")
    check_template_args("--chat-template-args", value)
    return value


def check_template_args(name: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments that the chat template is given anyway.

    Args:
        name: of the option, for the message.
        arguments: by name.

    Raises:
        UsageError: one is ours to set.
    """
    taken = sorted(RESERVED_TEMPLATE_ARGS & arguments.keys())
    if taken:
        raise UsageError(f"{name}: got {taken[0]!r}, expected arguments other than {sorted(RESERVED_TEMPLATE_ARGS)}")


def check_system(text: str | None) -> None:
    """Refuse a system message that is no text.

    Args:
        text: of --system.

    Raises:
        UsageError: it is empty, or holds bytes that are no UTF-8.
    """
    if text is not None and not is_text(text):
        raise UsageError("--system: got an empty text or bytes that are no UTF-8, expected text")


def check_draft_k(draft_k: int) -> int:
    """Refuse a K out of range.

    Args:
        draft_k: of --draft-k.

    Returns:
        The same.

    Raises:
        UsageError: with got and expected.
    """
    return check_width("draft-k", draft_k, 1, MAX_DRAFT_K)
