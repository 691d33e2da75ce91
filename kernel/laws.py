"""The probabilities p and q that judge proposals, of target and draft together.

They are kept as weights and their sums: what judges reads one id of every position, and all ids of one, so the division
is left to it. Both models' positions lie in one array, since on a CPU every operation costs, however small.
"""

from collections.abc import Sequence

import attrs
import mlx.core as mx

from posttrainllm.kernel.arithmetic import LOG2_E, exp2
from posttrainllm.kernel.constants import indices, one_row_as_scalar

__all__ = ["Laws", "joined", "laws"]


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
        batch, K = ids.shape
        by_model = self.weights.reshape(batch, 2, K, -1)  # [B, 2 K, V] -> [B, 2, K, V]
        probs = mx.take_along_axis(by_model, ids[:, None, :, None], axis=-1)[..., 0]  # [B, 2, K]
        if self.total is not None:
            probs = probs / self.total.reshape(batch, 2, K)  # [B, 2 K, 1] -> [B, 2, K]
        return probs[:, 0], probs[:, 1]

    def at(self, index: mx.array) -> tuple[mx.array, mx.array]:
        """The probabilities of all ids at one position a row.

        Args:
            index: int32 [B, 1], 0 to K - 1.

        Returns:
            p and q, float32 [B, 1, V] each.
        """
        batch, K = self.weights.shape[0], self.weights.shape[1] // 2
        rows, places = indices(batch)[:, None], index + K * indices(2)  # [B, 1], [B, 2]
        probs = self.weights[rows, places]  # [B, 2 K, V] -> [B, 2, V]
        p, q = probs[:, :1], probs[:, 1:]
        if self.total is None:
            return p, q
        totals = self.total[rows, places]  # [B, 2 K, 1] -> [B, 2, 1]
        return p / one_row_as_scalar(totals[:, :1]), q / one_row_as_scalar(totals[:, 1:])


def joined(target_logits: mx.array, draft_logits: Sequence[mx.array], *, arithmetic: bool) -> mx.array:
    """The logits of both models in one array.

    Args:
        target_logits: float32 [B, K, V].
        draft_logits: the draft's at the same positions, K times float32 [B, 1, V].
        arithmetic: True copies, which on a CPU is quick; False chooses, which is fused with what follows, where a GPU
            makes a concatenation of a copy each.

    Returns:
        float32 [B, 2 K, V]: the target's positions, then the draft's.
    """
    if arithmetic:
        return mx.concatenate([target_logits, *draft_logits], axis=1)
    each = [*mx.split(target_logits, target_logits.shape[1], axis=1), *draft_logits]  # 2 K times [B, 1, V]
    place = indices(len(each))[:, None]  # [2 K, 1]
    logits = mx.broadcast_to(each[-1], (each[-1].shape[0], len(each), each[-1].shape[2]))
    for index, one in enumerate(each[:-1]):
        logits = mx.where(place == index, one, logits)
    return logits


def laws(logits: mx.array, *, arithmetic: bool) -> Laws:
    """The laws that logits stand for.

    Args:
        logits: float32 [B, 2 K, V], as `joined` returns them, warped; -inf where an id has no chance.
        arithmetic: False takes MLX's softmax; True `exp2`, whose probabilities below 2**-126 of the largest are 0.

    Returns:
        The laws; not a number at a position with a logit of NaN or +inf, or with none that is finite.
    """
    if not arithmetic:
        return Laws(weights=mx.softmax(logits, axis=-1), total=None)
    # flat, or the subtraction's broadcast and the power are one kernel, which is not vectorised
    below = (logits - mx.max(logits, axis=-1, keepdims=True)).reshape(-1)
    weights = exp2(below, LOG2_E).reshape(logits.shape)
    return Laws(weights=weights, total=mx.sum(weights, axis=-1, keepdims=True))
