"""A request and a step's result as the engine's rows see them, on the host."""

from collections.abc import Sequence

import attrs
import mlx.core as mx

from posttrainllm.kernel.config import Mode
from posttrainllm.kernel.state import Sampling

__all__ = ["RowRequest", "RowStep", "sampling_of", "smallest_mode"]


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
class RowStep:
    """What one step did to one row, on the host."""

    tokens: tuple[int, ...]
    proposed: int
    accepted: int
    finite: bool
    margins: tuple[float, ...]
    """Top-2 logit margins of the emitted ids; empty unless the engine has diagnostics."""


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
