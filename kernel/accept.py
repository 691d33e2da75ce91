"""The two accept rules: which proposals of a window stand, and which id follows them.

`coupled`: the draft and the target see the same Gumbel noise at a position; a proposal stands while it is the id the
target itself would have drawn, and what is emitted is always the target's own draw (Daliri, Musco and Suresh 2024,
arXiv:2408.07978). Greedy decoding is the same rule at temperature 0.

`leviathan`: a proposal stands with probability min(1, p / q), p the target's and q the draft's probability of it; at
the first refusal the id is drawn from max(p - q, 0), normalised (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1).
"""

import mlx.core as mx

from posttrainllm.kernel.constants import indices

__all__ = ["coupled_accepts", "leviathan_accepts", "prefix_length", "residual_scores"]

_BEHIND = 256.0  # more than the noise and the logarithm of a float32 differ by: (22.9 + 0) - (-2.9 - 103.3)


def coupled_accepts(proposals: mx.array, target_choice: mx.array) -> mx.array:
    """A proposal stands when the target drew the same id.

    Args:
        proposals: int32 [B, K].
        target_choice: int32 [B, W], the target's own draw at each position, W = K + 1.

    Returns:
        bool [B, K].
    """
    return proposals == target_choice[:, :-1]


def leviathan_accepts(target_probs: mx.array, draft_probs: mx.array, uniforms: mx.array) -> mx.array:
    """A proposal stands with probability min(1, p / q).

    Args:
        target_probs: float32 [B, K], p of each proposal.
        draft_probs: float32 [B, K], q of each, which it was drawn with.
        uniforms: float32 [B, K], in [0, 1), independent of what drew the proposals.

    Returns:
        bool [B, K].
    """
    return uniforms * draft_probs < target_probs  # u < p / q without the division


def prefix_length(accepts: mx.array, num_proposed: mx.array) -> mx.array:
    """How many proposals stand before the first that does not.

    Args:
        accepts: bool [B, K].
        num_proposed: int32 [B], proposals behind this many do not exist.

    Returns:
        int32 [B].
    """
    exists = indices(accepts.shape[1])[None] < num_proposed[:, None]  # [B, K]
    stands = (accepts & exists).astype(mx.int32)
    length = mx.zeros_like(num_proposed)
    # a sum of running products from the inside out: one fused operation where cumprod and sum are two
    for index in reversed(range(accepts.shape[1])):
        length = stands[:, index] * (1 + length)
    return length


def residual_scores(target_probs: mx.array, draft_probs: mx.array, noise: mx.array) -> mx.array:
    """Scores whose argmax is the id that replaces a refused proposal: a draw from max(p - q, 0), normalised.

    Where that mass is 0 (p and q equal to the last bit, refused by rounding) it is a draw from p, since an argmax over
    a row of -inf would be id 0: every id of p is in the race, those without a residual behind all others. Where q is
    not a number, so that nothing of it can stand, it is a draw from p, too.

    Args:
        target_probs: float32 [B, ..., V], p at the refused position.
        draft_probs: float32 [B, ..., V], q at the refused position.
        noise: float32 [B, ..., V], Gumbel noise that neither drew the proposal nor judged it.

    Returns:
        float32 [B, ..., V].
    """
    residual = target_probs - draft_probs
    mass = mx.where(residual > 0, residual, target_probs)
    behind = mx.where(residual <= 0, _BEHIND, 0.0)
    return mx.where(mass > 0, (mx.log(mass) + noise) - behind, -mx.inf)
