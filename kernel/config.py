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
    """W: tokens a row in the target's forward; a speculative step proposes K = W - 1."""
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
    live: int | None = None
    """Slots at the beginning that hold all windows of the step; None: any. This leaves work out of the graph, too."""
    diagnostics: bool = False
    """Whether to compute `StepOutput.margin`."""
    adjusted: bool = False
    """Whether bias and penalties are in the graph. Like the mode, this never changes a row that does not use them."""
    logprobs: bool = False
    """Whether to compute `StepOutput.logprob` and the likeliest alternatives."""

    @property
    def filters(self) -> bool:
        """Whether the filters are in the graph."""
        return self.mode == "filtered"
