"""What never changes in a compiled step."""

from typing import Literal, TypeAlias

import attrs

__all__ = ["Mode", "StepConfig"]

Mode: TypeAlias = Literal["greedy", "sampled", "filtered"]


@attrs.frozen(kw_only=True)
class StepConfig:
    """Static shape of a step; each value is a trace of its own.

    The mode leaves work out of the graph and never changes a row's bits: a greedy row emits the same ids in all three,
    an unfiltered row in the last two.
    """

    width: int = attrs.field(validator=attrs.validators.ge(1))
    """W: tokens a row in the target's forward; a speculative step proposes K = W - 1."""
    vocab_size: int = attrs.field(validator=attrs.validators.ge(1))
    """Ids that may be emitted: [0, vocab_size). Logits behind it are padding and are cut off."""
    mode: Mode = attrs.field(default="greedy", validator=attrs.validators.in_(("greedy", "sampled", "filtered")))
    """"greedy": every row is at temperature 0. "sampled": noise, no filters. "filtered": noise, top-k, top-p, min-p."""
    narrow_draft: bool = False
    """Whether the draft feeds one token a forward after the first: faster where a row costs time. The bits of its cache
    then depend on what was accepted, and so may its proposals, but never what a greedy or coupled row emits."""
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
