"""Probabilities as weights and their total: what judges a proposal reads few of them.

The division is left to whoever reads: one id a position, or all ids of one position.
"""

import attrs
import mlx.core as mx

from posttrainllm.kernel.arithmetic import LOG2_E, exp2

__all__ = ["Softmax", "softmax"]


@attrs.frozen(eq=False, kw_only=True)
class Softmax:
    """The law of the next id at N positions of B rows."""

    weights: mx.array
    """float32 [B, N, V]: in proportion to the probabilities."""
    total: mx.array | None
    """float32 [B, N, 1]: the sum of the weights; None where it is 1."""

    def of(self, ids: mx.array) -> mx.array:
        """The probability of one id a position.

        Args:
            ids: int32 [B, N].

        Returns:
            float32 [B, N].
        """
        weights = mx.take_along_axis(self.weights, ids[..., None], axis=-1)  # [B, N, V] -> [B, N, 1]
        return (weights if self.total is None else weights / self.total)[..., 0]  # [B, N, 1] -> [B, N]

    def at(self, index: mx.array) -> mx.array:
        """The probabilities of one position a row.

        Args:
            index: int32 [B], below N.

        Returns:
            float32 [B, V].
        """
        index = index[:, None, None]  # [B, 1, 1]
        weights = mx.take_along_axis(self.weights, index, axis=1)[:, 0]  # [B, N, V] -> [B, V]
        if self.total is None:
            return weights
        return weights / mx.take_along_axis(self.total, index, axis=1)[:, 0]  # [B, N, 1] -> [B, 1]


def softmax(logits: mx.array, *, arithmetic: bool) -> Softmax:
    """The law that logits stand for.

    Args:
        logits: float32 [B, N, V], -inf where an id has no chance.
        arithmetic: False takes MLX's softmax; True `exp2`, whose probabilities below 2**-126 of the largest are 0.

    Returns:
        The law; not a number where a position has no finite logit.
    """
    if not arithmetic:
        return Softmax(weights=mx.softmax(logits, axis=-1), total=None)
    # flat, or the subtraction's broadcast and the power are one kernel, which is not vectorised
    below = (logits - mx.max(logits, axis=-1, keepdims=True)).reshape(-1)
    weights = exp2(below, LOG2_E).reshape(logits.shape)
    return Softmax(weights=weights, total=mx.sum(weights, axis=-1, keepdims=True))
