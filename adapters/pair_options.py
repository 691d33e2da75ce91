"""The options that name what decodes, as one record, and how the commands of a terminal load it."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs

from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.gate.heed import unless_broken
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.match.auto import load_chosen, say
from posttrainllm.adapters.options import draft_options, model_options
from posttrainllm.adapters.status_line import status_line, writer

__all__ = ["PairOptions", "pair_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class PairOptions:
    """What the options say."""

    model: str | None
    draft_model: str | None
    no_draft: bool
    draft_k: DraftLength
    dtype: str
    forward: str
    changes: ModelChanges

    @property
    def plain(self) -> bool:
        """Whether no draft is asked for."""
        return self.no_draft or (self.model is not None and self.draft_model is None)

    def load(self, *, quiet: bool, shown: bool) -> tuple[Pair, DraftLength]:
        """Load it, without the draft where the gate has found it broken here.

        Args:
            quiet: whether not to say which draft `--draft-model auto` takes.
            shown: whether a terminal shows what is being done.

        Returns:
            The pair, and K.

        Raises:
            PosttrainllmError: see `load_chosen`.
        """
        with status_line(enabled=shown) as status:
            pair, draft_k = load_chosen(
                self.model,
                self.draft_model,
                speculate=not self.no_draft,
                dtype=self.dtype,
                forward=self.forward,
                changes=self.changes,
                draft_k=self.draft_k,
                say=say,
                tell=None if quiet else say,
                progress=writer(status),
            )
            return unless_broken(pair, draft_k.on(pair.runtime.device)), draft_k


def pair_options() -> Callable[[_Command], _Command]:
    """Those of `model_options` and `draft_options`, which the command gets as `named`.

    Returns:
        The decorator.
    """

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def gather(**options: Any) -> Any:
            named = {field.name: options.pop(field.name) for field in attrs.fields(PairOptions)}
            return command(named=PairOptions(**named), **options)

        return cast(_Command, model_options()(draft_options()(gather)))

    return decorate
