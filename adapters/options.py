"""The command-line options that several commands share."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from posttrainllm.kernel.errors import UsageError

__all__ = ["chat_options", "check_k", "pair_options", "sampling_options", "template_args"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _together(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def pair_options(*, draft_k: bool = True) -> Callable[[_Command], _Command]:
    """MODEL, --draft-model, --no-draft, --draft-k and --dtype.

    Args:
        draft_k: whether there is one K.

    Returns:
        The decorator.
    """
    options: list[Callable[[Any], Any]] = [
        click.argument("model", required=False),
        click.option(
            "--draft-model",
            metavar="PATH",
            help="Directory or hub id of the draft. Default: the embedded one without MODEL.",
        ),
    ]
    if draft_k:
        options += [
            click.option(
                "--no-draft", is_flag=True, help="Decode plainly, at width 1 unless --plain-width says otherwise."
            ),
            click.option(
                "--draft-k", type=int, default=4, show_default=True, help="Tokens the draft proposes a step, 1 to 32."
            ),
        ]
    options.append(
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
            default="auto",
            show_default=True,
            help="Type of the weights. auto: the checkpoint's, or float32 where that is faster on a CPU.",
        )
    )
    return _together(*options)


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
        click.option(
            "--accept-rule",
            type=click.Choice(["leviathan", "coupled"]),
            default="leviathan",
            show_default=True,
            help="How proposals are judged at T>0: by the ratio of probabilities, or by shared noise, which gives the "
            "ids that plain sampling with the same seed gives.",
        ),
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


def template_args(text: str | None) -> dict[str, Any]:
    """Read --chat-template-args.

    Args:
        text: the option's value.

    Returns:
        The object; empty without the option.

    Raises:
        UsageError: it is no JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-args: got {text[:60]!r}, expected a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"--chat-template-args: got {text[:60]!r}, expected a JSON object")
    return value


def check_k(draft_k: int) -> int:
    """Refuse a K out of range; returns it."""
    from posttrainllm.adapters.params import MAX_DRAFT_K, check_width

    return check_width("draft-k", draft_k, 1, MAX_DRAFT_K)
