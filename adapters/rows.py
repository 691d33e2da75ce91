"""A request and a step's result as the engine's rows see them, on the host."""

from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from posttrainllm.kernel.config import Mode, StepConfig
from posttrainllm.kernel.state import Sampling, StepOutput

__all__ = ["RowPlace", "RowRequest", "RowStep", "read_rows", "sampling_of", "smallest_mode"]


@attrs.frozen(kw_only=True)
class RowRequest:
    """One request as a row of the engine sees it; values are checked by whoever made it."""

    prompt: Sequence[int]
    limit: int
    """Length, prompt included, at which the row stops."""
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_k: int = 0
    coupled: bool = False

    @property
    def mode(self) -> Mode:
        """The smallest step that serves it."""
        if self.temperature == 0:
            return "greedy"
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return "filtered" if filtered else "sampled"


@attrs.frozen(kw_only=True)
class RowPlace:
    """Where a row stands before a step."""

    length: int
    """Committed ids, prompt included."""
    last: int
    """The last of them, which has not been fed yet."""

    def after(self, step: "RowStep") -> "RowPlace":
        """Where it stands after the step."""
        if not step.tokens:
            return self
        return RowPlace(length=self.length + len(step.tokens), last=step.tokens[-1])


@attrs.frozen(kw_only=True)
class RowStep:
    """What one step did to one row, on the host."""

    tokens: tuple[int, ...]
    proposed: int
    accepted: int
    finite: bool
    margins: tuple[float, ...]
    """Top-2 logit margins of the emitted ids; empty unless the engine has diagnostics."""
    length: int = 0
    """Committed ids before the step, prompt included."""
    window: tuple[int, ...] = ()
    """The W ids that the target was fed: the last committed one, then the proposals or, without a draft, id 0."""
    key: tuple[int, ...] = ()
    """The row's root key, two 32-bit words, as the step saw it."""
    mode: Mode = "greedy"
    narrow_draft: bool = False


def smallest_mode(requests: Sequence[RowRequest | None]) -> Mode:
    """The step with the least work that serves all rows; None is an idle row."""
    modes = {request.mode for request in requests if request is not None}
    if "filtered" in modes:
        return "filtered"
    return "sampled" if "sampled" in modes else "greedy"


def sampling_of(requests: Sequence[RowRequest | None]) -> Sampling:
    """The kernel's arrays for B rows; an idle row is greedy."""
    idle = RowRequest(prompt=(), limit=0)
    rows = [request or idle for request in requests]
    return Sampling(
        temperature=mx.array([row.temperature for row in rows], dtype=mx.float32),
        top_k=mx.array([row.top_k for row in rows], dtype=mx.int32),
        top_p=mx.array([row.top_p for row in rows], dtype=mx.float32),
        min_p=mx.array([row.min_p for row in rows], dtype=mx.float32),
        draft_k=mx.array([row.draft_k for row in rows], dtype=mx.int32),
        coupled=mx.array([row.coupled for row in rows], dtype=mx.bool_),
    )


def read_rows(
    output: StepOutput, keys: mx.array, places: Mapping[int, RowPlace], config: StepConfig
) -> dict[int, RowStep]:
    """Take a step's result over to the host; this waits for it.

    Args:
        output: of B rows.
        keys: uint32 [B, 2], the root keys that the step saw.
        places: where the rows to read stood before it.
        config: the step's.

    Returns:
        What the step did to each of those rows.
    """
    tokens, emitted = np.array(output.tokens), np.array(output.emitted)
    proposed, accepted = np.array(output.proposed), np.array(output.accepted)
    finite, margin = np.array(output.finite), np.array(output.margin)
    proposals, roots = np.array(output.proposals), np.array(keys)
    return {
        row: RowStep(
            tokens=tuple(tokens[row, : emitted[row]].tolist()),
            proposed=int(proposed[row]),
            accepted=int(accepted[row]),
            finite=bool(finite[row]),
            margins=tuple(margin[row, : emitted[row]].tolist()),
            length=place.length,
            window=(place.last, *proposals[row].tolist()),
            key=tuple(roots[row].tolist()),
            mode=config.mode,
            narrow_draft=config.narrow_draft,
        )
        for row, place in places.items()
    }
