"""A draft whose proposals stand as often as asked: random weights never agree by themselves.

The draft runs as it is; then the logit of one id is raised above all others. That id is the target's own next one where
a coin says so, thrown once for every position before anything is measured, and another id elsewhere. The ids wanted are
an array beside the draft's cache, so a new prompt retraces nothing. A rate that comes out of this is simulated and says
nothing about any draft.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.loading.module import Model
from posttrainllm.kernel.forward import BoundedForward, Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["Script", "SimulatedModule", "expected_accepted", "scripted", "wanted_ids"]

_ABOVE_ALL = 1e4  # logits are far below it, float16 is above it
_NOTHING = -1  # no id: the draft proposes what it likes
_SEED = 6
_WINDOW = 64  # positions behind a text that a window may reach


class Script:
    """What the draft proposes after each position of each prompt.

    Args:
        rate: chance that a proposal is the target's own next id, given that those before it were.
        vocab_size: ids that may be emitted.
    """

    def __init__(self, rate: float, vocab_size: int) -> None:
        self._rate, self._vocab_size = rate, vocab_size
        self._wanted: dict[tuple[int, ...], npt.NDArray[np.int32]] = {}
        self._current: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def learn(self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> None:
        """Take over what the target decodes, and throw the coins; the same ones for whoever learns the same prompts.

        Args:
            prompts: ids of each.
            texts: what the target emits behind each.
        """
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            coins = np.random.default_rng([_SEED, index]).random(len(text)) < self._rate
            self._wanted[tuple(prompt)] = wanted_ids(len(prompt), text, coins.tolist(), self._vocab_size)

    def turn_to(self, prompt: Sequence[int]) -> None:
        """The next cache that is made is for this prompt; one that was not learned is drafted freely."""
        self._current = self._wanted.get(tuple(prompt), np.zeros(0, dtype=np.int32))

    @property
    def length(self) -> int:
        """Positions of the prompt at hand and its text; 0 for one that was not learned."""
        return len(self._current)

    def current(self, capacity: int) -> npt.NDArray[np.int32]:
        """int32 [capacity]: the id wanted after each position of the prompt at hand, -1 for none."""
        found = np.full(capacity, _NOTHING, dtype=np.int32)
        found[: len(self._current)] = self._current[:capacity]
        return found


def wanted_ids(
    prompt_length: int, text: Sequence[int], coins: Sequence[bool], vocab_size: int
) -> npt.NDArray[np.int32]:
    """What to propose after each position.

    Args:
        prompt_length: positions of the prompt, 1 or more.
        text: what the target emits behind it.
        coins: for each of those ids, whether the draft gets it right.
        vocab_size: ids that may be emitted, 2 or more.

    Returns:
        int32 [prompt_length + len(text) - 1]: by the position fed, -1 within the prompt.
    """
    right = np.array(text, dtype=np.int32)
    proposals = np.where(np.array(coins, dtype=bool), right, (right + 1) % vocab_size)
    inside = np.full(prompt_length - 1, _NOTHING, dtype=np.int32)
    return np.concatenate([inside, proposals.astype(np.int32)])


def expected_accepted(rate: float, draft_k: int) -> float:
    """Mean number of proposals that stand a step: (a - a**(K + 1)) / (1 - a)."""
    return sum(rate**index for index in range(1, draft_k + 1))


@attrs.frozen(eq=False, kw_only=True)
class _ScriptedModel(Model):
    """A model whose cache carries the script of the prompt that it is made for, as a layer of its own."""

    script: Script

    def make_kv(self, rows: int, capacity: int) -> KVCache:
        """The model's own layers, then int32 [rows, 1, capacity, 1] and an array of nothing."""
        wanted = np.tile(self.script.current(capacity).reshape(1, 1, -1, 1), (rows, 1, 1, 1))
        nothing = mx.zeros((rows, 1, 1, 1), dtype=mx.int32)
        return (*super().make_kv(rows, capacity), (mx.array(wanted), nothing))


def scripted(model: Model, script: Script) -> Model:
    """The same model, following a script.

    Args:
        model: a draft.
        script: asked each time that a cache is made.

    Returns:
        The model; its forward is a pure function of the same arguments.
    """
    fields = {field.name: getattr(model, field.name) for field in attrs.fields(type(model)) if field.init}
    return _ScriptedModel(**(fields | {"forward": _bent(model.forward), "script": script}))


@attrs.frozen(eq=False, kw_only=True)
class _Bent:
    """A forward whose cache ends in the ids wanted."""

    forward: Forward

    def __call__(self, tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        *layers, (wanted, nothing) = kv
        logits, written = self.forward(tokens, tuple(layers), position)
        rows, width = tokens.shape
        columns = mx.minimum(position[:, None] + mx.arange(width), wanted.shape[2] - 1)  # [B, W]
        ids = mx.take_along_axis(wanted.reshape(rows, -1), columns, axis=1)  # [B, 1, C, 1] -> [B, C] -> [B, W]
        return _raise(logits, ids), (*written, (wanted, nothing))


@attrs.frozen(eq=False, kw_only=True)
class _BoundedBent(_Bent):
    """The same of a forward that can attend to the first slots alone."""

    forward: BoundedForward

    def within(self, live: int) -> Forward:
        """See `BoundedForward`."""
        return _Bent(forward=self.forward.within(live))


def _bent(forward: Forward) -> Forward:
    return _BoundedBent(forward=forward) if isinstance(forward, BoundedForward) else _Bent(forward=forward)


def _raise(logits: mx.array, ids: mx.array) -> mx.array:
    """[..., V] with the logits of the ids [...] above all others; -1 raises none."""
    chosen = mx.arange(logits.shape[-1]) == ids[..., None]
    return mx.where(chosen, _ABOVE_ALL, logits).astype(logits.dtype)


class SimulatedModule:
    """The same of an mlx-lm module, for mlx-lm's loops.

    Args:
        module: a draft.
        script: the prompt at hand is read from it with the first token of each prompt.
    """

    def __init__(self, module: Any, script: Script) -> None:
        self._module, self._script = module, script
        self._added = mx.zeros((0, 1))
        if hasattr(module, "make_cache"):
            self.make_cache = module.make_cache

    @property
    def layers(self) -> Any:
        """As mlx-lm counts caches."""
        return self._module.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        """Logits [1, W, V] of the ids [1, W]."""
        position, end = int(cache[0].offset), int(cache[0].offset) + tokens.shape[1]
        logits: mx.array = self._module(tokens, cache=cache)
        if position == 0:
            # a row a position, outside the clock, so that a step pays one addition
            wanted = mx.array(self._script.current(self._script.length + _WINDOW))
            self._added = _raise(mx.zeros((wanted.shape[0], logits.shape[-1]), dtype=logits.dtype), wanted)
            mx.eval(self._added)
        return logits + self._added[position:end] if end <= self._added.shape[0] else logits
