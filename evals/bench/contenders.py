"""Ways to decode that are measured side by side, on the same weights.

All are cut in the same place: the prompt and the first step stay outside the clock, the tokens after them are counted.
mlx-lm launches one forward ahead, so one of its plain ones may start before the clock does.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.evals.bench.simulated import Script, SimulatedModule, scripted
from posttrainllm.kernel.errors import NonFiniteError

__all__ = ["SAME_PROCESS", "Contender", "Engines", "MlxLm", "Ours", "contenders_for", "synchronize"]

Engines: TypeAlias = Literal["posttrainllm", "mlx-lm", "mlx-lm as installed", "transformers"]
SAME_PROCESS: tuple[Engines, ...] = ("posttrainllm", "mlx-lm")
"""Those of this process: the faster plain one of them is what a ratio is held against."""


class Contender(Protocol):
    """One way to decode, used again for every prompt."""

    name: str
    engine: Engines
    draft_k: int
    """K; 0 where nothing is proposed."""
    ids: list[int]
    """What the prompt at hand has got so far."""
    steps: list[tuple[int, int]]
    """(proposed, accepted) of every step of it."""

    def begin(self, prompt: Sequence[int], count: int) -> None:
        """Feed a prompt that is to get `count` tokens, and take the first step."""

    def finish(self) -> None:
        """Decode what is left of them."""


class Ours:
    """Our engine: speculative with a draft, else plain at any width.

    Args:
        pair: the models.
        width: W of the target's forward.
        capacity: C, the same for all prompts.
        script: what the draft follows; None for a draft of its own mind.
    """

    engine: Engines = "posttrainllm"

    def __init__(self, pair: Pair, *, width: int, capacity: int, script: Script | None = None) -> None:
        if script is not None and pair.draft is not None:
            pair = attrs.evolve(pair, draft=scripted(pair.draft, script))
        self.pair, self._width, self._capacity, self.script = pair, width, capacity, script
        self.draft_k = 0 if pair.draft is None else width - 1
        self.name = f"speculative, K={self.draft_k}" if self.draft_k else f"plain, width {width}"
        self.ids: list[int] = []
        self.steps: list[tuple[int, int]] = []

    def begin(self, prompt: Sequence[int], count: int) -> None:
        """See `Contender`."""
        self.ids, self.steps, self._count = [], [], count
        # an engine of its own (on the pair's compiled functions) launches its first step alone: none is under way when
        # the clock starts
        if self.script is not None:
            self.script.turn_to(prompt)
        self._engine = Engine(self.pair, capacity=self._capacity, width=self._width)
        self._engine.insert(0, RowRequest(prompt=prompt, limit=len(prompt) + count, draft_k=self.draft_k))
        while not self.ids:
            self._step()

    def finish(self) -> None:
        """See `Contender`."""
        while len(self.ids) < self._count:
            self._step()

    def _step(self) -> None:
        step = self._engine.step()[0]
        if not step.finite:
            raise NonFiniteError(
                f"{self.name}: step {self._engine.steps - 1}: the target's logits are not finite, nothing is measured"
            )
        self.ids += step.tokens
        self.steps.append((step.proposed, step.accepted))


class MlxLm:
    """mlx-lm's `generate_step`, or its `speculative_generate_step` when there is a draft; both greedy.

    Args:
        target: an mlx-lm module.
        draft: another one, or None.
        draft_k: K, with a draft.
        script: what the draft follows; None for a draft of its own mind.
    """

    engine: Engines = "mlx-lm"

    def __init__(
        self, target: Module, draft: Module | None = None, *, draft_k: int = 0, script: Script | None = None
    ) -> None:
        self._target, self.draft_k, self.script = target, draft_k, script
        self._draft: Any = SimulatedModule(draft, script) if draft is not None and script is not None else draft
        self.name = "mlx-lm plain" if draft is None else f"mlx-lm speculative, K={draft_k}"
        self.ids: list[int] = []
        self.steps: list[tuple[int, int]] = []

    def begin(self, prompt: Sequence[int], count: int) -> None:
        """See `Contender`."""
        self.ids, self.steps, self._count = [], [], count
        if self.script is not None:
            self.script.turn_to(prompt)
        self._tokens = self._generate(mx.array(list(prompt), dtype=mx.uint32))
        for from_draft in self._tokens:
            if not from_draft:  # the target's own token ends a step
                break

    def finish(self) -> None:
        """See `Contender`."""
        for _ in self._tokens:
            pass

    def _generate(self, prompt: mx.array) -> Iterator[bool]:
        """Collect ids and yield whether each came from the draft."""
        if self._draft is None:
            for token, _ in generate_step(prompt, self._target, max_tokens=self._count):
                self.ids.append(int(token))
                self.steps.append((0, 0))
                yield False
            return
        accepted, proposed = 0, min(self.draft_k, self._count)
        for token, _, from_draft in speculative_generate_step(
            prompt, self._target, self._draft, num_draft_tokens=self.draft_k, max_tokens=self._count
        ):
            self.ids.append(int(token))
            accepted += from_draft
            if not from_draft or len(self.ids) == self._count:
                self.steps.append((proposed, accepted))
                accepted, proposed = 0, min(self.draft_k, self._count - len(self.ids))
            yield from_draft


def contenders_for(
    pair: Pair,
    draft_ks: Sequence[int],
    *,
    capacity: int,
    mlx_lm: bool = True,
    scripts: Mapping[Engines, Mapping[int, Script]] = MappingProxyType({}),
) -> list[Contender]:
    """Everything that is measured on a pair in this process.

    Args:
        pair: the models; without a draft only the plain ones take part.
        draft_ks: the K to measure.
        capacity: C of our engines.
        mlx_lm: whether mlx-lm's loops take part.
        scripts: what the draft follows, by engine and K; a draft without one proposes what it likes.

    Returns:
        Ours, plain at width 1 first, then mlx-lm's, plain first.
    """
    drafted = list(draft_ks) if pair.draft is not None else []
    ours, theirs = scripts.get("posttrainllm", {}), scripts.get("mlx-lm", {})
    found: list[Contender] = [Ours(pair.plain("the row is plain"), width=1, capacity=capacity)]
    found += [Ours(pair, width=k + 1, capacity=capacity, script=ours.get(k)) for k in drafted]
    if mlx_lm and pair.target.module is not None:
        found.append(MlxLm(pair.target.module))
        if pair.draft is not None and pair.draft.module is not None:
            module = pair.draft.module
            found += [MlxLm(pair.target.module, module, draft_k=k, script=theirs.get(k)) for k in drafted]
    return found


def synchronize() -> None:
    """Wait for what was launched ahead and never read: it must not run into the next measurement."""
    for stream in (mx.default_stream(mx.default_device()), generation_stream):
        mx.synchronize(stream)
