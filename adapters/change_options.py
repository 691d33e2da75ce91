"""The options that change the models as they are loaded: one definition for every command that names a draft."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from posttrainllm.adapters.loading.changes import KV_BITS, KV_GROUP_SIZES, ModelChanges

__all__ = ["change_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


def change_options(*, drafted: bool = True) -> Callable[[_Command], _Command]:
    """--adapter-path, --draft-adapter-path, --kv-bits and --kv-group-size, which the command gets as `changes`.

    Args:
        drafted: whether the command names a draft; otherwise --draft-adapter-path is not among them.

    Returns:
        The decorator.
    """

    def gathered(command: _Command) -> _Command:
        @functools.wraps(command)
        def gather(
            *,
            adapter_path: str | None,
            kv_bits: str | None,
            kv_group_size: str,
            draft_adapter_path: str | None = None,
            **others: Any,
        ) -> Any:
            changes = ModelChanges(
                adapter_path=adapter_path,
                draft_adapter_path=draft_adapter_path,
                kv_bits=None if kv_bits is None else int(kv_bits),
                kv_group_size=int(kv_group_size),
            )
            return command(changes=changes, **others)

        return cast(_Command, gather)

    model = "MODEL" if drafted else "TARGET"
    of_the_draft = click.option("--draft-adapter-path", metavar="PATH", help="The same for the draft.")
    options = (
        click.option(
            "--adapter-path",
            metavar="PATH",
            help=f"Directory or hub id of a LoRA or DoRA adapter of {model}, as mlx-lm or PEFT writes it.",
        ),
        *([of_the_draft] if drafted else []),
        click.option(
            "--kv-bits",
            type=click.Choice([str(bits) for bits in KV_BITS]),
            help="Keep keys and values in so many bits, in both models. Default: in the weights' type.",
        ),
        click.option(
            "--kv-group-size",
            type=click.Choice([str(size) for size in KV_GROUP_SIZES]),
            default="64",
            show_default=True,
            help="Of them, how many share a scale.",
        ),
    )

    def decorate(command: _Command) -> _Command:
        command = gathered(command)
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
