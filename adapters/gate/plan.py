"""What a gate run decodes: requests and shapes, all fixed before it starts."""

from collections.abc import Mapping, Sequence

import attrs

from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.probes import least_capacity
from posttrainllm.adapters.gate.prompts import Prompt
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.kernel.config import Mode
from posttrainllm.kernel.errors import CapacityError, UsageError

__all__ = ["TEMPERATURE", "Plan", "plan"]

TEMPERATURE = 1.0
"""Of everything drawn."""
_ROWS = 16  # on a CPU more cost more: their products take several threads, which wait for each other
_COUPLED = (16, 32)  # prompts, ids of each
_DRAWN = {"cpu": 16, "gpu": 64}  # requests; on a CPU these take 7 s with the embedded pair
_DRAWN_TOKENS = 128


@attrs.frozen(kw_only=True)
class Plan:
    """What a run decodes: requests and shapes, all fixed before it starts."""

    prompts: tuple[Prompt, ...]
    requests: tuple[RowRequest, ...]
    """One a prompt, greedy."""
    coupled: tuple[RowRequest, ...]
    drawn: tuple[RowRequest, ...]
    """With the `leviathan` rule; prompts repeat with other seeds where there are few."""
    shape: Shape
    max_tokens: int


def plan(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    draft_k: int,
    max_tokens: int,
    cut: bool,
    drawn: int | None = None,
    rows: int | None = None,
    capacity: int | None = None,
    curves: Mapping[Mode, Curve] | None = None,
) -> Plan:
    """Encode the prompts and choose the shapes.

    Args:
        pair: with a draft.
        prompts: one or more.
        draft_k: K.
        max_tokens: ids to generate a prompt.
        cut: whether a prompt that leaves no room for them is cut to its first ids; else it is refused.
        drawn: requests for the law of `leviathan`, of 128 ids each; None is 16 on a CPU and 64 on a GPU.
        rows: B; None is 16, or a row a prompt where there are fewer.
        capacity: C, whose C - 1 slots bound a row as the context does; None is what the longest prompt needs.
        curves: what steps cost, where K is chosen by that from step to step.

    Returns:
        The plan: one capacity and one number of rows for all.

    Raises:
        UsageError: there is no draft.
        CapacityError: a prompt is empty or does not fit, or the capacity is too small for the probes.
    """
    if pair.draft is None:
        raise UsageError("got no draft model, expected --draft-model: without one there is nothing to gate")
    context = pair.target.context
    if capacity is not None:
        least = least_capacity(draft_k + 1)
        if capacity < least:
            raise CapacityError(f"capacity: got {capacity}, expected {least} or more: the gate's probes need as many")
        context = min(context, capacity - 1)
    if max_tokens >= context:
        raise CapacityError(f"--max-tokens: got {max_tokens}, expected fewer than the context of {context}")
    texts = []
    for prompt in prompts:
        ids = pair.tokenizer.encode(prompt.text)
        if not ids:
            raise CapacityError(f"prompt {prompt.id}: got no token, expected 1 or more")
        if len(ids) + max_tokens > context and not cut:
            raise CapacityError(
                f"prompt {prompt.id}: got {len(ids)} tokens, "
                f"expected at most {context - max_tokens}: {max_tokens} more are to fit the context of {context}"
            )
        texts.append(tuple(ids[: context - max_tokens]))
    longest = max(map(len, texts)) + max_tokens
    shape = Shape(
        rows=rows or min(_ROWS, len(texts)),
        capacity=capacity or capacity_for(longest, draft_k + 1),
        draft_k=draft_k,
        curves=curves,
    )
    most = min(context, shape.capacity - 1)

    def requests(count: int, tokens: int) -> list[RowRequest]:
        chosen = [(seed, texts[seed % len(texts)]) for seed in range(count)]
        return [
            RowRequest(prompt=ids, limit=min(len(ids) + tokens, most), seed=seed, draft_k=draft_k)
            for seed, ids in chosen
        ]

    def sampled(greedy: list[RowRequest], *, coupled: bool) -> tuple[RowRequest, ...]:
        return tuple(attrs.evolve(request, temperature=TEMPERATURE, coupled=coupled) for request in greedy)

    return Plan(
        prompts=tuple(prompts),
        requests=tuple(requests(len(texts), max_tokens)),
        coupled=sampled(requests(min(_COUPLED[0], len(texts)), min(_COUPLED[1], max_tokens)), coupled=True),
        drawn=sampled(requests(drawn or _DRAWN[pair.runtime.device], _DRAWN_TOKENS), coupled=False),
        shape=shape,
        max_tokens=max_tokens,
    )
