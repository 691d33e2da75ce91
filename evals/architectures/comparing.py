"""One model fed twice: through our cache, compiled, and through mlx-lm's own.

Ours gets what decoding gives it: a prompt in chunks, the last one padded; then windows for all rows at once, each row
at its own place, whose tails were wrong and are written over; then rows that are set back by some ids and go on with
others. mlx-lm's caches hold one row, are never set back (some cannot be), and see the same windows on a copy.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from posttrainllm.adapters.loading.module import Model
from posttrainllm.kernel.compiled import compile_forward
from posttrainllm.kernel.state import KVCache

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["CHUNK", "PROMPTS", "REWOUND", "STEPS", "WIDTH", "Comparison", "compare"]

CHUNK = 32
"""Ids of a prompt at a time; with two experts each enough for mlx-lm to sort them, as it does in longer chunks."""
WIDTH = 5
PROMPTS = (37, 20, 6)
"""Tokens of each row's prompt."""
STEPS = 9
"""Windows before the rows are set back, and again behind it."""
REWOUND = 11
"""Ids that a row is set back by, fewer than a row has emitted by then."""
_CAPACITY = 128


@attrs.frozen(kw_only=True)
class Comparison:
    """Logits of a model both ways."""

    error: float
    """Largest difference, as a share of mlx-lm's largest logit."""
    influence: float
    """How much the first id changes the last logits, as the same share: a model that did not look back would agree with
    anything."""
    positions: int
    """Places that were compared."""
    finite: bool


def compare(model: Model, module: "Module", *, seed: int = 0, more_slots: int = 0) -> Comparison:
    """Run the schedule both ways.

    Args:
        model: of our loader.
        module: mlx-lm's, which it wraps.
        seed: of the ids.
        more_slots: what mlx-lm's rotating caches are given beside their own.

    Returns:
        How far the two are apart.
    """
    plan = _Plan.drawn(np.random.default_rng(seed), model.vocab_size)
    ours = _through_our_cache(model, plan)
    theirs = [logits for row in range(len(PROMPTS)) for logits in _through_their_cache(module, plan, row, more_slots)]
    found, expected = (np.concatenate(sorted_parts) for sorted_parts in (_in_order(ours), _in_order(theirs)))
    largest = float(np.abs(expected).max())
    return Comparison(
        error=float(np.abs(found - expected).max()) / largest,
        influence=_influence(module, plan.ids[0, 0]) / largest,
        positions=len(found),
        finite=bool(np.isfinite(found).all() and np.isfinite(expected).all()),
    )


_Part = tuple[int, int, np.ndarray]
"""Row, window, logits [accepted, V]."""


def _in_order(parts: Sequence[_Part]) -> list[np.ndarray]:
    return [logits for _, _, logits in sorted(parts, key=lambda part: part[:2])]


@attrs.frozen(kw_only=True, eq=False)
class _Plan:
    """What every row is fed: its ids before and after it is set back, and how many of each window stand."""

    ids: np.ndarray  # int32 [2, rows, length]
    accepted: np.ndarray  # int [2, STEPS, rows]
    tails: np.ndarray  # int32 [2, STEPS, rows, WIDTH]

    @classmethod
    def drawn(cls, generator: np.random.Generator, vocab_size: int) -> "_Plan":
        rows, length = len(PROMPTS), max(PROMPTS) + 2 * STEPS * WIDTH
        ids = np.stack([generator.integers(0, vocab_size, size=(rows, length), dtype=np.int32)] * 2)
        accepted = generator.integers(1, WIDTH + 1, size=(2, STEPS, rows))
        accepted[0, 0], accepted[0, 1] = WIDTH, 1  # both ends for sure
        ends = np.array(PROMPTS) + accepted[0].sum(axis=0) - REWOUND
        for row, end in enumerate(ends):
            ids[1, row, end:] = generator.integers(0, vocab_size, size=length - end)
        tails = generator.integers(0, vocab_size, size=(2, STEPS, rows, WIDTH), dtype=np.int32)
        return cls(ids=ids, accepted=accepted, tails=tails)

    def windows(self, row: int) -> Iterator[tuple[int, int, np.ndarray, int]]:
        """Part, place, ids [W] and how many stand, window for window."""
        place = PROMPTS[row]
        for part in range(2):
            place -= REWOUND if part else 0
            for step in range(STEPS):
                count = int(self.accepted[part, step, row])
                window = self.tails[part, step, row].copy()
                window[:count] = self.ids[part, row, place : place + count]
                yield part, place, window, count
                place += count


def _influence(module: "Module", ids: np.ndarray) -> float:
    """How much the last logits change, at most, when the first id does."""
    from mlx_lm.models.cache import make_prompt_cache

    others = ids.copy()
    others[0] = others[0] + 1 if others[0] == 0 else others[0] - 1
    last = [module(mx.array(each[None]), cache=make_prompt_cache(module))[0, -1] for each in (ids, others)]
    return float(mx.max(mx.abs(last[0] - last[1])))


def _through_our_cache(model: Model, plan: _Plan) -> list[_Part]:
    forward = compile_forward(model.forward)
    kv = _prefilled(model, forward, plan)
    rows = [list(plan.windows(row)) for row in range(len(PROMPTS))]
    found: list[_Part] = []
    for step, windows in enumerate(zip(*rows, strict=True)):
        tokens = mx.array(np.stack([window for _, _, window, _ in windows]))  # [B, W]
        position = mx.array([place for _, place, _, _ in windows], dtype=mx.int32)
        logits, kv = forward(tokens, kv, position)
        values = np.array(logits.astype(mx.float32))
        found += [(row, step, values[row, :count]) for row, (_, _, _, count) in enumerate(windows)]
    return found


def _prefilled(model: Model, forward: Any, plan: _Plan) -> KVCache:
    """The prompts, each in a cache of its own, then row by row in one."""
    caches = []
    for row, length in enumerate(PROMPTS):
        kv = model.make_kv(1, _CAPACITY)
        for start in range(0, length, CHUNK):
            chunk = np.zeros((1, CHUNK), dtype=np.int32)
            count = min(CHUNK, length - start)
            chunk[0, :count] = plan.ids[0, row, start : start + count]
            kv = forward(mx.array(chunk), kv, mx.array([start], dtype=mx.int32))[1]
        caches.append(kv)
    return tuple(
        (mx.concatenate([pair[0] for pair in pairs]), mx.concatenate([pair[1] for pair in pairs]))
        for pairs in zip(*caches, strict=True)
    )


def _through_their_cache(module: "Module", plan: _Plan, row: int, more_slots: int) -> Iterator[_Part]:
    """One row; what is set back starts again from the prompt."""
    from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

    def feed(ids: np.ndarray, cache: Any) -> mx.array:
        return module(mx.array(ids[None]), cache=cache)[0]  # [W, V]

    cache: Any = None
    for step, (part, place, window, count) in enumerate(plan.windows(row)):
        if cache is None or step == STEPS:
            cache = make_prompt_cache(module)
            for entry in cache:
                if type(entry) is RotatingKVCache:
                    entry.max_size += more_slots
            for start in range(0, place, CHUNK):
                logits = feed(plan.ids[part, row, start : min(start + CHUNK, place)], cache)
                mx.eval(logits)
        logits = feed(window, copy.deepcopy(cache))
        yield row, step, np.array(logits[:count].astype(mx.float32))
        mx.eval(feed(window[:count], cache))
