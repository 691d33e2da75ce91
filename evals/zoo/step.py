"""The compiled functions of training: a gradient, an update, a loss."""

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

from posttrainllm.evals.zoo.model import divergences, losses, unlikelihood, with_parameters
from posttrainllm.evals.zoo.optimizer import Moments, apply_updates, clip

__all__ = ["StepFunctions", "compile_step"]

_Parameters = dict[str, mx.array]


@attrs.frozen(kw_only=True, eq=False)
class StepFunctions:
    """What the loop calls; every value that changes is an array."""

    gradient: Callable[[_Parameters, mx.array], tuple[_Parameters, mx.array]]
    """(parameters, int32[B, T + 1]) to gradients and the mean loss."""
    unlearn: Callable[[_Parameters, mx.array, mx.array], tuple[_Parameters, mx.array]]
    """(parameters, int32[B, T + 1], bool[B, T]) to gradients and the mean cost of finding these tokens likely."""
    add: Callable[[_Parameters, _Parameters], _Parameters]
    """The sum of two gradients."""
    update: Callable[..., tuple[_Parameters, Moments, mx.array]]
    """(parameters, gradients, moments, scalars) to the next ones and the gradient's norm."""
    nats: Callable[[_Parameters, mx.array, mx.array], mx.array]
    """(parameters, int32[B, T + 1], 0 or 1 [B, T]) to the sum of next-token losses."""


def compile_step(
    module: nn.Module,
    teacher: nn.Module | None,
    *,
    dtype: mx.Dtype,
    optimizer: str,
    weight_decay: float,
    accumulate: int,
    distill_weight: float,
    distill_choice: float,
    z_loss: float,
    most_norm: float = 1.0,
) -> StepFunctions:
    """Build the functions of a run.

    Args:
        module: of the preset; its weights are put in at each call.
        teacher: target of a distillation.
        dtype: to compute in.
        optimizer: one of OPTIMIZERS.
        weight_decay: of matrices.
        accumulate: gradients that one update sums.
        distill_weight: share of the divergence in the loss; the rest is the next token's.
        distill_choice: share of the loss of the teacher's likeliest token in what takes the divergence's place.
        z_loss: weight of the square of the logits' normaliser.
        most_norm: of the gradients.

    Returns:
        The functions.
    """

    def imitation(teacher_logits: mx.array, logits: mx.array) -> mx.array:
        found = divergences(teacher_logits, logits)
        if not distill_choice:
            return found
        return (1 - distill_choice) * found + distill_choice * losses(logits, teacher_logits.argmax(axis=-1))

    def loss(parameters: _Parameters, tokens: mx.array) -> mx.array:
        logits = with_parameters(module, parameters, dtype)(tokens[:, :-1])
        value = mx.array(0.0)
        if teacher is not None:
            value = distill_weight * imitation(mx.stop_gradient(teacher(tokens[:, :-1])), logits).mean()
        if teacher is None or distill_weight < 1:
            value = value + (1 if teacher is None else 1 - distill_weight) * losses(logits, tokens[:, 1:]).mean()
        if z_loss:
            value = value + z_loss * mx.square(mx.logsumexp(logits.astype(mx.float32), axis=-1)).mean()
        return value

    def cost_of_repeats(parameters: _Parameters, tokens: mx.array, repeated: mx.array) -> mx.array:
        logits = with_parameters(module, parameters, dtype)(tokens[:, :-1])
        return unlikelihood(logits, tokens[:, 1:], repeated)

    def gradient_of(function: Callable[..., mx.array]) -> Callable[..., tuple[_Parameters, mx.array]]:
        value_and_gradient = mx.value_and_grad(function)

        def gradient(parameters: _Parameters, *batch: mx.array) -> tuple[_Parameters, mx.array]:
            value, gradients = value_and_gradient(parameters, *batch)
            # a product's layout would become the weights', though not those of a checkpoint: other kernels, other bits
            return {name: mx.contiguous(array) for name, array in gradients.items()}, value

        compiled: Callable[..., tuple[_Parameters, mx.array]] = mx.compile(gradient)
        return compiled

    def add(left: _Parameters, right: _Parameters) -> _Parameters:
        return {name: left[name] + right[name] for name in left}

    def update(
        parameters: _Parameters, gradients: _Parameters, first: _Parameters, second: _Parameters, scalars: mx.array
    ) -> tuple[_Parameters, _Parameters, _Parameters, mx.array]:
        mean = {name: array * (1 / accumulate) for name, array in gradients.items()}
        clipped, norm = clip(mean, most_norm)
        made, moments = apply_updates(
            parameters,
            clipped,
            Moments(first=first, second=second),
            scalars,
            optimizer=optimizer,
            weight_decay=weight_decay,
            dtype=dtype,
        )
        return made, moments.first, moments.second, norm

    def nats(parameters: _Parameters, tokens: mx.array, counted: mx.array) -> mx.array:
        return (losses(with_parameters(module, parameters, dtype)(tokens[:, :-1]), tokens[:, 1:]) * counted).sum()

    compiled_update: Any = mx.compile(update)

    def update_moments(
        parameters: _Parameters, gradients: _Parameters, moments: Moments, scalars: mx.array
    ) -> tuple[_Parameters, Moments, mx.array]:
        made, first, second, norm = compiled_update(parameters, gradients, moments.first, moments.second, scalars)
        return made, Moments(first=first, second=second), norm

    return StepFunctions(
        gradient=gradient_of(loss),
        unlearn=gradient_of(cost_of_repeats),
        add=mx.compile(add),
        update=update_moments,
        nats=mx.compile(nats),
    )
