"""The clock: every contender on every prompt, one after the other, so that whatever slows the machine slows all."""

import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.evals.bench.contenders import Contender, Engines, Ours, synchronize

__all__ = ["Round", "measure", "outputs", "references", "warm_up"]


@attrs.frozen(kw_only=True)
class Round:
    """One contender on one prompt."""

    contender: str
    engine: Engines
    draft_k: int
    tokens_per_s: float
    """Of the tokens behind the first step's."""
    steps: tuple[tuple[int, int], ...]
    """(proposed, accepted) of every step."""
    tokens: int
    equal: bool | None
    """Whether the ids are the reference's; None where there is none."""


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
    return outputs(Ours(pair.plain("a reference"), width=draft_k + 1, capacity=capacity), prompts, count)


def outputs(contender: Contender, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What a contender emits.

    Args:
        contender: any.
        prompts: ids of each.
        count: tokens to generate.

    Returns:
        The ids for each prompt.
    """
    found = []
    for prompt in prompts:
        contender.begin(prompt, count)
        contender.finish()
        found.append(contender.ids)
    return found


def warm_up(contenders: Sequence[Contender], prompt: Sequence[int], count: int) -> None:
    """One whole generation each, so that nothing is compiled under the clock."""
    for contender in contenders:
        outputs(contender, [prompt], count)


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    count: int,
    expected: Mapping[str, Sequence[list[int]]],
    progress: Callable[[], None] = lambda: None,
) -> list[list[Round]]:
    """Decode every prompt with every contender.

    Args:
        contenders: warmed up.
        prompts: ids of each, all different.
        count: tokens to generate, the first step's included.
        expected: the ids that a contender has to emit for each prompt, by its name; those without have no reference.
        progress: called after each round.

    Returns:
        For every prompt the rounds, in the order of the contenders.
    """
    repeats = []
    for index, prompt in enumerate(prompts):
        rounds: list[Round | None] = [None] * len(contenders)
        for turn in range(len(contenders)):
            column = (turn + index) % len(contenders)  # each prompt starts with another one
            contender = contenders[column]
            contender.begin(prompt, count)
            first = len(contender.ids)
            started = time.perf_counter()
            contender.finish()
            elapsed = time.perf_counter() - started
            synchronize()
            rounds[column] = Round(
                contender=contender.name,
                engine=contender.engine,
                draft_k=contender.draft_k,
                tokens_per_s=(count - first) / elapsed,
                steps=tuple(contender.steps),
                tokens=len(contender.ids),
                equal=contender.ids == expected[contender.name][index] if contender.name in expected else None,
            )
            progress()
        repeats.append([one for one in rounds if one is not None])
    return repeats
