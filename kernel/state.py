"""The three records of a decoding step, and their flat trees.

`mx.compile` takes trees of tuples, not attrs instances, so each record converts itself at that one boundary. The
records freeze their fields, not the contents of the arrays: nothing in kernel/ assigns to an array's elements.
"""

from typing import Any, TypeAlias

import attrs
import mlx.core as mx

__all__ = ["DecodeState", "KVCache", "Sampling", "StepOutput", "assert_dtypes"]

KVCache: TypeAlias = tuple[tuple[mx.array, mx.array], ...]
"""Keys and values of every layer, each [B, H, C, D]; an empty tuple where there is no model."""

_Tree: TypeAlias = tuple[Any, ...]


@attrs.frozen(eq=False)
class _Record:
    """Conversion between a record and the tuple of its fields, in the order they are declared."""

    def to_tree(self) -> _Tree:
        return attrs.astuple(self, recurse=False)

    @classmethod
    def from_tree(cls, tree: _Tree) -> Any:
        return cls(*tree)


@attrs.frozen(eq=False)
class DecodeState(_Record):
    """Everything a step reads and writes, for B rows over a context of C slots.

    Invariant: both caches are valid for positions [0, length - 1); the last committed token has not been fed yet.
    Entries behind that are stale: masked, finite, and overwritten before they are read.
    """

    tokens: mx.array
    """int32 [B, C]: committed ids, prompt and output; what lies behind `length` means nothing."""
    length: mx.array
    """int32 [B]: number of committed ids."""
    limit: mx.array
    """int32 [B]: the length at which the row stops, C - 1 at most; a row with length >= limit is idle."""
    target_kv: KVCache
    draft_kv: KVCache
    key: mx.array
    """uint32 [B, 2]: root key of the row's request, from `noise.root_key`."""


@attrs.frozen(eq=False)
class Sampling(_Record):
    """How each row is sampled. Arrays, so that a new request never recompiles the step."""

    temperature: mx.array
    """float32 [B]: 0 is greedy."""
    top_k: mx.array
    """int32 [B]: keep the k likeliest ids; 0 keeps all."""
    top_p: mx.array
    """float32 [B]: keep the likeliest ids up to this mass, in (0, 1]; 1 keeps all."""
    min_p: mx.array
    """float32 [B]: keep ids at least this likely, as a share of the likeliest one, in [0, 1]; 0 keeps all."""
    draft_k: mx.array
    """int32 [B]: how many tokens the draft may propose, clipped to the K of the step; 0 does not speculate."""
    coupled: mx.array
    """bool [B]: accept by shared noise (True) or by the ratio of probabilities (False)."""
    prompt_length: mx.array
    """int32 [B]: how many of the committed ids are the prompt; presence and frequency count those behind it."""
    presence_penalty: mx.array
    """float32 [B]: subtracted from the logits of ids that were generated; 0 is off."""
    frequency_penalty: mx.array
    """float32 [B]: subtracted once for each time that an id was generated; 0 is off."""
    repetition_penalty: mx.array
    """float32 [B]: positive logits of ids in prompt or output are divided by it, others by its inverse; 1 is off."""
    bias: mx.array
    """float32 [B, V]: added to the logits; [B, 0] where no row has a bias. V: the ids that may be emitted."""


@attrs.frozen(eq=False)
class StepOutput(_Record):
    """What one step emitted, padded to the window W."""

    tokens: mx.array
    """int32 [B, W]: emitted ids, -1 behind the last."""
    emitted: mx.array
    """int32 [B]: how many ids were emitted; 0 for an idle row."""
    proposed: mx.array
    """int32 [B]: drafted ids that could have been emitted before the row's limit."""
    accepted: mx.array
    """int32 [B]: drafted ids that were emitted."""
    finite: mx.array
    """bool [B]: False when the target's logits were not finite; such a row emits nothing and keeps its length."""
    proposals: mx.array
    """int32 [B, W-1]: the drafted ids, and id 0 behind them where the step draws fewer."""
    margin: mx.array
    """float32 [B, W]: target logit of the best id minus that of the second best, at each window position; [B, 0]
    unless the step was configured with diagnostics."""
    logprob: mx.array
    """float32 [B, W]: log probability of each emitted id under the target's raw logits, before bias, penalties and
    temperature; [B, 0] unless the step was configured with logprobs."""
    top_ids: mx.array
    """int32 [B, W, 20]: the likeliest ids at each position, fewer where V is; by falling logit, then by the lower id;
    [B, 0, 0] without logprobs."""
    top_logprobs: mx.array
    """float32 [B, W, 20]: their log probabilities; [B, 0, 0] without logprobs."""


def assert_dtypes(state: DecodeState, sampling: Sampling) -> None:
    """Hold the arrays against the declared types: another one would retrace the step silently.

    Args:
        state: of B rows.
        sampling: of B rows.
    """
    for record, dtypes in ((state, _STATE_DTYPES), (sampling, _SAMPLING_DTYPES)):
        for name, dtype in dtypes.items():
            array = getattr(record, name)
            assert array.dtype == dtype, f"{name}: got {array.dtype}, expected {dtype}"


_STATE_DTYPES = {"tokens": mx.int32, "length": mx.int32, "limit": mx.int32, "key": mx.uint32}
_SAMPLING_DTYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "bias"), mx.float32),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), mx.float32),
    **dict.fromkeys(("top_k", "draft_k", "prompt_length"), mx.int32),
    "coupled": mx.bool_,
}
