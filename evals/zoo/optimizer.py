"""AdamW, and Muon for the matrices of the layers, as functions of flat trees of float32 arrays.

mlx.optimizers has both. Its Muon adds the weight decay to the gradient in front of the orthogonalisation, which then
hides how large it was, orthogonalises in float32, and one matrix at a time: many small products, which a GPU waits
for. Here matrices of one shape go through as one batch, in bfloat16 where the model computes in it.
"""

from typing import NamedTuple

import mlx.core as mx

__all__ = ["OPTIMIZERS", "Moments", "apply_updates", "clip", "first_moments", "step_scalars"]

OPTIMIZERS = ("adamw", "muon")
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's coefficients, five iterations
_ITERATIONS = 5
_AS_ADAMW = 0.2  # root mean square of AdamW's steps (Moonlight, arXiv:2502.16982): its learning rates carry over


class Moments(NamedTuple):
    """State of the optimiser, each array of its parameter's shape, float32."""

    first: dict[str, mx.array]
    second: dict[str, mx.array]
    """Without the matrices that Muon takes."""


def first_moments(parameters: dict[str, mx.array], optimizer: str) -> Moments:
    """The state before the first step.

    Args:
        parameters: float32, by name.
        optimizer: one of OPTIMIZERS.

    Returns:
        Zeros.
    """
    adam = {name for name in parameters if not _by_muon(name, parameters[name], optimizer)}
    return Moments(
        first={name: mx.zeros_like(array) for name, array in parameters.items()},
        second={name: mx.zeros_like(array) for name, array in parameters.items() if name in adam},
    )


def clip(gradients: dict[str, mx.array], most: float) -> tuple[dict[str, mx.array], mx.array]:
    """Bound the norm of all gradients together; gradients that are not finite become zeros.

    Args:
        gradients: float32, by name.
        most: norm.

    Returns:
        The gradients; their norm before, float32[].
    """
    # sorted: a checkpoint's arrays come in another order, and the sum's bits would follow it
    norm = mx.sqrt(sum((mx.square(gradients[name]).sum() for name in sorted(gradients)), mx.array(0.0)))
    finite = mx.isfinite(norm)
    scale = mx.minimum(1.0, most / (norm + 1e-6))
    return {name: mx.where(finite, array * scale, 0.0) for name, array in gradients.items()}, norm


def apply_updates(
    parameters: dict[str, mx.array],
    gradients: dict[str, mx.array],
    moments: Moments,
    scalars: mx.array,
    *,
    optimizer: str,
    weight_decay: float,
    dtype: mx.Dtype,
) -> tuple[dict[str, mx.array], Moments]:
    """One step of the optimiser.

    Args:
        parameters: float32, by name.
        gradients: float32, by name.
        moments: the state.
        scalars: float32[3] of `step_scalars`.
        optimizer: one of OPTIMIZERS.
        weight_decay: a learning rate's share, of matrices alone.
        dtype: that Muon orthogonalises in.

    Returns:
        Parameters and state after it.
    """
    rate, first_share, second_share = scalars[0], scalars[1], scalars[2]
    first: dict[str, mx.array] = {}
    second: dict[str, mx.array] = {}
    steps: dict[str, mx.array] = {}
    for name, gradient in gradients.items():
        if name in moments.second:
            first[name] = _BETAS[0] * moments.first[name] + (1 - _BETAS[0]) * gradient
            second[name] = _BETAS[1] * moments.second[name] + (1 - _BETAS[1]) * mx.square(gradient)
            steps[name] = (first[name] * first_share) / (mx.sqrt(second[name] * second_share) + _EPSILON)
        else:
            first[name] = _MOMENTUM * moments.first[name] + (1 - _MOMENTUM) * gradient
            steps[name] = _MOMENTUM * first[name] + (1 - _MOMENTUM) * gradient  # Nesterov's
    steps |= _orthogonal({name: steps[name] for name in steps if name not in moments.second}, dtype)
    kept = 1 - rate * weight_decay
    updated = {
        name: (array * kept if array.ndim == 2 else array) - rate * steps[name] for name, array in parameters.items()
    }
    return updated, Moments(first=first, second=second)


def step_scalars(rate: float, step: int) -> mx.array:
    """What changes from step to step.

    Args:
        rate: learning rate.
        step: from 1 up.

    Returns:
        float32[3]: the rate, and what corrects the two moments for their start at zero.
    """
    return mx.array([rate, 1 / (1 - _BETAS[0] ** step), 1 / (1 - _BETAS[1] ** step)], dtype=mx.float32)


def _by_muon(name: str, array: mx.array, optimizer: str) -> bool:
    return optimizer == "muon" and array.ndim == 2 and ".layers." in name


def _orthogonal(matrices: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """The nearest orthogonal matrices about, at AdamW's scale."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in matrices.items():
        by_shape.setdefault(tuple(matrix.shape), []).append(name)
    found: dict[str, mx.array] = {}
    for shape, names in by_shape.items():
        stacked = mx.stack([matrices[name] for name in names])  # [n, rows, columns]
        solved = _newton_schulz(stacked, dtype).astype(mx.float32) * (_AS_ADAMW * max(shape) ** 0.5)
        found |= {name: mx.contiguous(solved[index]) for index, name in enumerate(names)}
    return found


def _newton_schulz(stacked: mx.array, dtype: mx.Dtype) -> mx.array:
    a, b, c = _NEWTON_SCHULZ
    tall = stacked.shape[1] > stacked.shape[2]
    norm = mx.sqrt(mx.square(stacked).sum(axis=(1, 2), keepdims=True))
    x = (stacked / (norm + 1e-7)).astype(dtype)
    x = x.transpose(0, 2, 1) if tall else x  # [n, shorter, longer]
    for _ in range(_ITERATIONS):
        gram = x @ x.transpose(0, 2, 1)  # [n, shorter, shorter]
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.transpose(0, 2, 1) if tall else x
