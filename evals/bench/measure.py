"""The clock: every contender on every prompt, one after the other, so that whatever slows the machine slows all."""

import time
from collections.abc import Callable, Sequence

import attrs

from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.evals.bench.contenders import Contender, Ours, synchronize

__all__ = ["Round", "measure", "references", "warm_up"]


@attrs.frozen(kw_only=True)
class Round:
    """One contender on one prompt."""

    contender: str
    draft_k: int
    tokens_per_s: float
    """Of the tokens behind the first step's."""
    steps: tuple[tuple[int, int], ...]
    """(proposed, accepted) of every step."""
    tokens: int
    equal: bool
    """Whether the ids are the reference's."""


def references(
    pair: Pair, draft_k: int, prompts: Sequence[Sequence[int]], count: int, capacity: int
) -> list[list[int]]:
    """What plain decoding emits at the width of the verification; speculation has to emit the same.

    Args:
        pair: the models.
        draft_k: K; 0 for width 1.
        prompts: ids of each.
        count: tokens to generate.
        capacity: C of the contenders.

    Returns:
        The ids for each prompt.
    """
    plain = Ours(attrs.evolve(pair, draft=None), width=draft_k + 1, capacity=capacity)
    found = []
    for prompt in prompts:
        plain.begin(prompt, count)
        plain.finish()
        found.append(plain.ids)
    return found


def warm_up(contenders: Sequence[Contender], prompt: Sequence[int], count: int) -> None:
    """One whole generation each, so that nothing is compiled under the clock."""
    for contender in contenders:
        contender.begin(prompt, count)
        contender.finish()


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    count: int,
    expected: Callable[[Contender, int], list[int] | None],
    progress: Callable[[], None] = lambda: None,
) -> list[list[Round]]:
    """Decode every prompt with every contender.

    Args:
        contenders: warmed up.
        prompts: ids of each, all different.
        count: tokens to generate, the first step's included.
        expected: the ids that a contender has to emit for a prompt, None where it is its own reference.
        progress: called after each round.

    Returns:
        For every prompt the rounds, in the order of the contenders.
    """
    repeats = []
    for index, prompt in enumerate(prompts):
        rounds = []
        for contender in contenders:
            contender.begin(prompt, count)
            first = len(contender.ids)
            started = time.perf_counter()
            contender.finish()
            elapsed = time.perf_counter() - started
            synchronize()
            reference = expected(contender, index)
            rounds.append(
                Round(
                    contender=contender.name,
                    draft_k=contender.draft_k,
                    tokens_per_s=(count - first) / elapsed,
                    steps=tuple(contender.steps),
                    tokens=len(contender.ids),
                    equal=reference is None or contender.ids == reference,
                )
            )
            progress()
        repeats.append(rounds)
    return repeats
