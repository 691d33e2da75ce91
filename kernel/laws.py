"""The probabilities p and q that judge proposals, of target and draft together.

They are kept as weights and their sums: what judges reads one id of every position, and all ids of one, so the division
is left to it. Both models' positions lie in one array, since on a CPU every operation costs, however small.
"""

from collections.abc import Sequence

import attrs
import mlx.core as mx

from posttrainllm.kernel.arithmetic import LOG2_E, exp2
from posttrainllm.kernel.constants import indices, one_row_as_scalar

__all__ = ["Laws", "laws"]


@attrs.frozen(eq=False, kw_only=True)
class Laws:
    """The target's law of the next id at K positions, and the draft's."""

    weights: mx.array
    """float32 [B, 2 K, V]: in proportion to the probabilities; the target's positions, then the draft's."""
    total: mx.array | None
    """float32 [B, 2 K, 1]: the sums of the weights; None where they are 1."""

    def of(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """The probabilities of one id a position.

        Args:
            ids: int32 [B, K].

        Returns:
            p and q, float32 [B, K] each.
        """
        both = mx.concatenate([ids, ids], axis=1)[..., None]  # [B, K] -> [B, 2 K, 1]
        probs = mx.take_along_axis(self.weights, both, axis=-1)  # [B, 2 K, V] -> [B, 2 K, 1]
        probs = (probs if self.total is None else probs / self.total)[..., 0]  # [B, 2 K, 1] -> [B, 2 K]
        K = ids.shape[1]
        return probs[:, :K], probs[:, K:]

    def at(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The probabilities of all ids at one position a row.

        Args:
            index: int32 [B], 0 to K - 1.

        Returns:
            p and q, float32 [B, V] each.
        """
        B, K = self.weights.shape[0], self.weights.shape[1] // 2
        rows, places = indices(B), (index, index + K)
        probs = [self.weights[rows, place] for place in places]  # [B, 2 K, V] -> [B, V]
        if self.total is not None:
            totals = [self.total[rows, place] for place in places]  # [B, 2 K, 1] -> [B, 1]
            probs = [weights / one_row_as_scalar(total) for weights, total in zip(probs, totals, strict=True)]
        return probs[0], probs[1]


def laws(target_logits: mx.array, draft_logits: Sequence[mx.array], *, arithmetic: bool) -> Laws:
    """The laws that logits stand for.

    Args:
        target_logits: float32 [B, K, V], warped; -inf where an id has no chance.
        draft_logits: the draft's at the same positions, K times float32 [B, 1, V].
        arithmetic: False takes MLX's softmax; True `exp2`, whose probabilities below 2**-126 of the largest are 0.

    Returns:
        The laws; not a number at a position that has no finite logit.
    """
    logits = mx.concatenate([target_logits, *draft_logits], axis=1)  # [B, K, V], K x [B, 1, V] -> [B, 2 K, V]
    if not arithmetic:
        return Laws(weights=mx.softmax(logits, axis=-1), total=None)
    # flat, or the subtraction's broadcast and the power are one kernel, which is not vectorised
    below = (logits - mx.max(logits, axis=-1, keepdims=True)).reshape(-1)
    weights = exp2(below, LOG2_E).reshape(logits.shape)
    return Laws(weights=weights, total=mx.sum(weights, axis=-1, keepdims=True))
