"""Decoding speed on the embedded pair, ours beside mlx-lm's: same weights, dtype, BLAS, prompts and clock.

Every contender is cut in the same place: the prompt and the first step stay outside the clock, the tokens after them
are counted. mlx-lm launches one forward ahead, so up to one in 127 of its plain ones starts before the clock does.
"""

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Protocol

import attrs
import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from pytest_benchmark.fixture import BenchmarkFixture

from posttrainllm.adapters.engine import Engine, capacity_for
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.module import load_module
from posttrainllm.adapters.loading.pair import Pair, embedded_path, load_pair
from posttrainllm.adapters.rows import RowRequest

_K = 4
_PROMPT_TOKENS = 64
_NEW_TOKENS = 128


class _Contender(Protocol):
    """One way to decode, used again for every prompt."""

    ids: list[int]
    proposed: int
    accepted: int

    def begin(self, prompt: Sequence[int]) -> None:
        """Feed the prompt and take the first step."""

    def finish(self) -> None:
        """Decode what is left of `_NEW_TOKENS`."""


class _Ours:
    """Our engine, plain or speculative."""

    def __init__(self, pair: Pair, width: int) -> None:
        self._pair, self._width = pair, width
        self._draft_k = 0 if pair.draft is None else width - 1

    def begin(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.proposed = self.accepted = 0
        limit = len(prompt) + _NEW_TOKENS
        # an engine of its own (on the pair's compiled functions) launches its first step alone: none is under way when
        # the clock starts
        self._engine = Engine(self._pair, capacity=capacity_for(limit, self._width), width=self._width)
        self._engine.insert(0, RowRequest(prompt=prompt, limit=limit, draft_k=self._draft_k))
        while not self.ids:
            self._step()

    def finish(self) -> None:
        while len(self.ids) < _NEW_TOKENS:
            self._step()

    def _step(self) -> None:
        step = self._engine.step()[0]
        self.ids += step.tokens
        self.proposed += step.proposed
        self.accepted += step.accepted


class _MlxLm:
    """`generate_step`, or `speculative_generate_step` when there is a draft; both are greedy by default."""

    def __init__(self, target: Module, draft: Module | None = None) -> None:
        self._target, self._draft = target, draft

    def begin(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.proposed = self.accepted = 0
        self._tokens = self._generate(mx.array(list(prompt), dtype=mx.uint32))
        for from_draft in self._tokens:
            if not from_draft:  # the target's own token ends a step
                break

    def finish(self) -> None:
        for _ in self._tokens:
            pass

    def _generate(self, prompt: mx.array) -> Iterator[bool]:
        """Collect ids and yield whether each came from the draft."""
        if self._draft is None:
            for token, _ in generate_step(prompt, self._target, max_tokens=_NEW_TOKENS):
                self.ids.append(int(token))
                yield False
            return
        new_step = True
        for token, _, from_draft in speculative_generate_step(
            prompt, self._target, self._draft, num_draft_tokens=_K, max_tokens=_NEW_TOKENS
        ):
            self.proposed += new_step * min(_K, _NEW_TOKENS - len(self.ids))
            self.accepted += from_draft
            self.ids.append(int(token))
            new_step = not from_draft
            yield from_draft


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The embedded pair in the dtype that is default here."""
    return load_pair()


@pytest.fixture(scope="session")
def prompts(pytestconfig: pytest.Config, pair: Pair) -> list[list[int]]:
    """Held-out prompts, all different: one for the warm-up, then one a repeat."""
    lines = files("posttrainllm.evals").joinpath("prompts/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [pair.tokenizer.encode(json.loads(line)["text"])[:_PROMPT_TOKENS] for line in lines]
    found = [list(prompt) for prompt in dict.fromkeys(map(tuple, ids)) if len(prompt) == _PROMPT_TOKENS]
    wanted = pytestconfig.getoption("--repeats") + 1
    if len(found) < wanted:
        raise pytest.UsageError(f"--repeats: got {wanted - 1}, expected at most {len(found) - 1}, a prompt for each")
    return [found[index * len(found) // wanted] for index in range(wanted)]  # the file is sorted by package


@pytest.fixture(scope="session")
def references(pair: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """What plain decoding at the verification width emits; speculation has to emit the same ids."""
    reference, ids = _Ours(attrs.evolve(pair, draft=None), _K + 1), []
    for prompt in prompts:
        reference.begin(prompt)
        reference.finish()
        ids.append(reference.ids)
    return ids


@pytest.fixture(scope="session")
def contenders(pair: Pair, prompts: list[list[int]]) -> dict[str, _Contender]:
    """All of them in one process, each warmed up by one whole generation."""
    assert pair.draft is not None
    target = load_module(read_checkpoint(embedded_path("target-16m")), pair.target.dtype)
    draft = load_module(read_checkpoint(embedded_path("draft-3m")), pair.draft.dtype)
    contenders: dict[str, _Contender] = {
        "ours plain": _Ours(attrs.evolve(pair, draft=None), 1),
        "ours speculative": _Ours(pair, _K + 1),
        "mlx-lm plain": _MlxLm(target),
        "mlx-lm speculative": _MlxLm(target, draft),
    }
    for contender in contenders.values():
        contender.begin(prompts[0])
        contender.finish()
    return contenders


def test_decode(
    benchmark: BenchmarkFixture,
    pair: Pair,
    prompts: list[list[int]],
    references: list[list[int]],
    contenders: dict[str, _Contender],
    repeat: int,
    contender: str,
) -> None:
    """One contender, one prompt. It fails when speculation changes the output, never for being slow."""
    subject, reference = contenders[contender], references[repeat + 1]
    subject.begin(prompts[repeat + 1])
    clocked = _NEW_TOKENS - len(subject.ids)
    benchmark.pedantic(subject.finish, rounds=1, iterations=1)  # type: ignore[no-untyped-call]  # not annotated there
    for stream in (mx.default_stream(mx.default_device()), generation_stream):
        mx.synchronize(stream)  # what was launched ahead and never read must not run into the next round
    assert len(subject.ids) == _NEW_TOKENS
    if contender == "ours speculative":
        assert subject.ids == reference
    benchmark.extra_info.update(
        clocked=clocked,
        proposed=subject.proposed,
        accepted=subject.accepted,
        reference_ids=subject.ids == reference,
        dtype=pair.target.dtype,
        k=_K,
        temperature=0,
        prompt_tokens=_PROMPT_TOKENS,
        new_tokens=_NEW_TOKENS,
    )
