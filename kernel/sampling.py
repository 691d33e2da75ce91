"""Logits to warped logits, and warped logits to a token.

The order is that of Hugging Face and vLLM: temperature, then top-k, top-p, min-p. Every filter is a threshold on the
scaled logits, so ids that tie with the last one kept are kept too, and a row whose filters are off passes through
unchanged bit for bit whatever its neighbours ask for.
"""

import mlx.core as mx

from posttrainllm.kernel.config import Mode
from posttrainllm.kernel.constants import indices, one_row_as_scalar
from posttrainllm.kernel.state import Sampling

__all__ = ["choose", "filtered", "ids_of_best", "scaled", "warp"]


def warp(logits: mx.array, sampling: Sampling, *, mode: Mode) -> mx.array:
    """Apply temperature and the filters.

    Args:
        logits: [B, N, V], any float dtype.
        sampling: one value a row.
        mode: what of this is in the graph; see `StepConfig`.

    Returns:
        float32 [B, N, V]: scaled logits, -inf where filtered out. A row at temperature 0 is neither scaled nor
        filtered: its argmax is the same either way.
    """
    return scaled(filtered(logits, sampling, mode=mode), sampling, mode=mode)


def filtered(logits: mx.array, sampling: Sampling, *, mode: Mode) -> mx.array:
    """All of `warp` in mode "filtered", where a sort makes it dear, and nothing in the others.

    Args:
        logits: [B, N, V], any float dtype.
        sampling: one value a row.
        mode: see `StepConfig`.

    Returns:
        float32 [B, N, V].
    """
    logits = logits.astype(mx.float32)
    if mode != "filtered":
        return logits
    logits = _at_temperature(logits, sampling)
    threshold = mx.where(_sampled(sampling), _threshold(logits, sampling), -mx.inf)
    # in this order a NaN stays, as it does in the other modes: a filter makes no law of what has none
    return mx.where(logits < threshold, -mx.inf, logits)


def scaled(logits: mx.array, sampling: Sampling, *, mode: Mode) -> mx.array:
    """What `filtered` left to do: the temperature in mode "sampled", cheaper divided by again than kept.

    Args:
        logits: float32 [B, N, V], as `filtered` returns them.
        sampling: one value a row.
        mode: see `StepConfig`.

    Returns:
        float32 [B, N, V].
    """
    return _at_temperature(logits, sampling) if mode == "sampled" else logits


def choose(warped: mx.array, sampling: Sampling, noise: mx.array | None) -> mx.array:
    """Draw one id a position by the Gumbel-max trick; the argmax where the temperature is 0.

    Args:
        warped: float32 [B, N, V]; without noise it need not be warped.
        sampling: one temperature a row.
        noise: float32 [B, N, V], finite; None where every row is greedy.

    Returns:
        int32 [B, N].
    """
    if noise is not None:
        # where, never 0 * noise: the greedy bits must not depend on the noise at all
        warped = mx.where(_sampled(sampling), warped + noise, warped)
    return ids_of_best(warped)


def ids_of_best(scores: mx.array) -> mx.array:
    """The id of the highest score, the lowest of equal ones.

    Args:
        scores: float32 [B, N, V].

    Returns:
        int32 [B, N].
    """
    return mx.view(mx.argmax(scores, axis=-1), mx.int32)  # the same bits, where a cast would be an operation


def _at_temperature(logits: mx.array, sampling: Sampling) -> mx.array:
    return logits / mx.where(_sampled(sampling), one_row_as_scalar(sampling.temperature[:, None, None]), 1.0)


def _sampled(sampling: Sampling) -> mx.array:
    """Which rows are not greedy, bool [B, 1, 1]."""
    return one_row_as_scalar((sampling.temperature > 0)[:, None, None])


def _threshold(logits: mx.array, sampling: Sampling) -> mx.array:
    """The smallest scaled logit that every filter keeps: float32 [B, N, 1], -inf where all filters are off."""
    vocab = logits.shape[-1]
    descending = -mx.sort(-logits, axis=-1)  # [B, N, V]
    top_k = sampling.top_k[:, None, None]
    last = mx.where(top_k > 0, mx.minimum(top_k, vocab), vocab) - 1
    last = mx.broadcast_to(last, (*logits.shape[:-1], 1))  # [B, N, 1]
    kth = mx.take_along_axis(descending, last, axis=-1)
    kth = mx.where(top_k > 0, kth, -mx.inf)

    # top-p counts the mass of what top-k left
    probs = mx.softmax(mx.where(descending >= kth, descending, -mx.inf), axis=-1)
    before = mx.cumsum(probs, axis=-1) - probs
    top_p = sampling.top_p[:, None, None]
    kept = (before < top_p) | (indices(vocab) == 0)  # the likeliest id always, whatever float32 makes of top_p
    nucleus = mx.min(mx.where(kept, descending, mx.inf), axis=-1, keepdims=True)
    nucleus = mx.where(top_p < 1, nucleus, -mx.inf)

    min_p = sampling.min_p[:, None, None]
    floor = descending[..., :1] + mx.log(mx.maximum(min_p, 1e-30))
    floor = mx.where(min_p > 0, floor, -mx.inf)
    return mx.maximum(mx.maximum(kth, nucleus), floor)
