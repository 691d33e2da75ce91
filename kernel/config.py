"""What never changes in a compiled step."""

from typing import Literal, TypeAlias

import attrs

__all__ = ["Mode", "Rules", "StepConfig"]

Mode: TypeAlias = Literal["greedy", "sampled", "filtered"]
Rules: TypeAlias = Literal["both", "coupled", "leviathan"]


@attrs.frozen(kw_only=True)
class StepConfig:
    """Static shape of a step; each value is a trace of its own.

    Mode and rules leave work out of the graph and never change a row's bits: a greedy row emits the same ids in all
    modes, an unfiltered row in the last two, a row of either rule the same under its own and under "both".
    """

    width: int = attrs.field(validator=attrs.validators.ge(1))
    """W: tokens a row in the target's forward; a speculative step proposes up to K = W - 1."""
    vocab_size: int = attrs.field(validator=attrs.validators.ge(1))
    """Ids that may be emitted: [0, vocab_size). Logits behind it are padding and are cut off."""
    mode: Mode = attrs.field(default="greedy", validator=attrs.validators.in_(("greedy", "sampled", "filtered")))
    """"greedy": every row is at temperature 0. "sampled": noise, no filters. "filtered": noise, top-k, top-p, min-p."""
    rules: Rules = attrs.field(default="both", validator=attrs.validators.in_(("both", "coupled", "leviathan")))
    """Accept rules that rows at a temperature may have: one alone needs about half the noise."""
    narrow_draft: bool = False
    """Whether the draft feeds one token a forward after the first: faster where a row costs time. Where bits depend on
    the width of a forward, the draft's cache then depends on what was accepted, and so may its proposals, but never
    what a greedy or coupled row emits, nor the law of another."""
    arithmetic: bool = False
    """Whether p, q and the noise are made of `arithmetic.exp2` and `arithmetic.log`: faster where MLX's are a call an
    element, and the last bits differ. What a greedy row emits never depends on it, nor does the law of another."""
    live: int | None = None
    """Slots at the beginning that hold all windows of the step; None: any. This leaves work out of the graph, too."""
    diagnostics: bool = False
    """Whether to compute `StepOutput.margin`."""
    adjusted: bool = False
    """Whether bias and penalties are in the graph. Like the mode, this never changes a row that does not use them."""
    logprobs: bool = False
    """Whether to compute `StepOutput.logprob` and the likeliest alternatives."""
    draft_k: int | None = attrs.field(default=None)
    """How many ids the draft draws, 0 to W - 1: its other forwards are not in the graph, and the window is filled up
    with id 0. None draws W - 1. At 0 the step is the plain one, and the draft's cache falls behind."""

    @draft_k.validator
    def _check_draft_k(self, _: object, value: int | None) -> None:
        assert value is None or 0 <= value < self.width, f"draft_k: got {value}, expected 0 to {self.width - 1}"

    @property
    def proposals(self) -> int:
        """K: how many ids a draft draws."""
        return self.width - 1 if self.draft_k is None else self.draft_k
