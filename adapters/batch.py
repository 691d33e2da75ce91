"""Many requests through the rows of one engine."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from posttrainllm.kernel.errors import NonFiniteError

if TYPE_CHECKING:  # they import MLX, and the BLAS must come first
    from posttrainllm.adapters.engine import Engine
    from posttrainllm.adapters.rows import RowRequest, RowStep

__all__ = ["decode"]


def decode(
    engine: "Engine",
    requests: Sequence["RowRequest"],
    *,
    advance: Callable[[int], None] = lambda _: None,
    ends_at_non_finite: bool = False,
) -> list[list["RowStep"]]:
    """Decode requests to their limits, as many at a time as the engine has rows; nothing ends one early.

    Args:
        engine: with every row idle; they are idle again afterwards.
        requests: any number of them.
        advance: called after each step with the number of ids that it emitted, and after each prefill with 0.
        ends_at_non_finite: whether logits that are not finite end their request, as a step that emits nothing does.

    Returns:
        The steps of each request, in the order of the requests. A request whose row emits nothing although it is not
        at its limit ends there: its ids are fewer than asked for.

    Raises:
        CapacityError: a request does not fit the engine.
        NonFiniteError: the target's logits were not finite, and that ends no request.
    """
    done: list[list[RowStep]] = [[] for _ in requests]
    waiting = list(range(len(requests)))[::-1]
    active: dict[int, int] = {}  # row -> index of its request
    left = [request.limit - len(request.prompt) for request in requests]
    while waiting or active:
        for row in range(engine.rows):
            if row not in active and waiting:
                active[row] = waiting.pop()
                engine.insert(row, requests[active[row]])
                advance(0)
        emitted = 0
        for row, step in engine.step().items():
            index = active[row]
            if not (step.finite or ends_at_non_finite):
                raise NonFiniteError(f"request {index + 1} of {len(requests)}: the target's logits are not finite")
            done[index].append(step)
            left[index] -= len(step.tokens)
            emitted += len(step.tokens)
            if left[index] <= 0 or not step.tokens:
                engine.release(row)
                del active[row]
        advance(emitted)
    return done
