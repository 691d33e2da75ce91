"""Decoding speed on the embedded pair, ours beside mlx-lm's: same weights, dtype, BLAS, prompts and clock.

The prompt and the first step stay outside the clock, the tokens after them are counted.
"""

from collections.abc import Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from posttrainllm.adapters.loading.pair import Pair, load_pair
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.evals.accept_rate import HELD_OUT, read_prompts
from posttrainllm.evals.bench.contenders import Contender, contenders_for, synchronize
from posttrainllm.evals.bench.measure import references as references_of
from posttrainllm.evals.bench.measure import warm_up
from posttrainllm.evals.throughput import choose_prompts

_K = 4
_PROMPT_TOKENS = 64
_NEW_TOKENS = 128
_LENGTH = _PROMPT_TOKENS + _NEW_TOKENS
_NAMES = ("ours plain", "ours speculative", "mlx-lm plain", "mlx-lm speculative")


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The embedded pair in the dtype that is default here."""
    return load_pair()


@pytest.fixture(scope="session")
def prompts(pytestconfig: pytest.Config, pair: Pair) -> list[list[int]]:
    """Held-out prompts, all different: one for the warm-up, then one a repeat."""
    prompts = pytestconfig.getoption("--repeats") + 1
    return choose_prompts(pair.tokenizer, read_prompts(HELD_OUT), _PROMPT_TOKENS, prompts)


@pytest.fixture(scope="session")
def references(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What plain decoding at the verification width emits; speculation has to emit the same ids."""
    return references_of(pair, _K, prompts, _NEW_TOKENS, capacity_for(_LENGTH, _K + 1))


@pytest.fixture(scope="session")
def contenders(pair: Pair, prompts: list[list[int]]) -> dict[str, Contender]:
    """All of them in one process, each warmed up by one whole generation."""
    found = contenders_for(pair, [_K], capacity=capacity_for(_LENGTH, _K + 1))
    warm_up(found, prompts[0], _NEW_TOKENS)
    return dict(zip(_NAMES, found, strict=True))


def test_decode(
    benchmark: BenchmarkFixture,
    pair: Pair,
    prompts: list[list[int]],
    references: list[list[int]],
    contenders: dict[str, Contender],
    repeat: int,
    contender: str,
) -> None:
    """One contender, one prompt. It fails when speculation changes the output, never for being slow."""
    subject, reference = contenders[contender], references[repeat + 1]
    subject.begin(prompts[repeat + 1], _NEW_TOKENS)
    clocked = _NEW_TOKENS - len(subject.ids)
    benchmark.pedantic(subject.finish, rounds=1, iterations=1)  # type: ignore[no-untyped-call]  # not annotated there
    synchronize()
    assert len(subject.ids) == _NEW_TOKENS
    if contender == "ours speculative":
        assert subject.ids == reference
    benchmark.extra_info.update(
        clocked=clocked,
        proposed=sum(proposed for proposed, _ in subject.steps),
        accepted=sum(accepted for _, accepted in subject.steps),
        reference_ids=subject.ids == reference,
        dtype=pair.target.dtype,
        k=_K,
        temperature=0,
        prompt_tokens=_PROMPT_TOKENS,
        new_tokens=_NEW_TOKENS,
    )
