"""The `leviathan` rule against the target's exact law, by KL divergence.

Every drawn id x is turned into a number in [0, 1): the target's mass of the ids before x, plus a uniform share of the
mass of x itself. If x follows the target's law p given its history, that number is uniform, whatever p is and whatever
order the ids are put in, and independent of all before it: so draws at different contexts can be counted together. A
partition of the ids can only lower the divergence; the two orders here keep what faults cause. By p / q, q the draft's
law: a rule that accepts too often or too rarely gives too much or too little to what the draft overrates. By q: a draft
that draws otherwise than it says gives too much to what it likes.

The numbers are counted in M = 9 cells of probability 1 / M each. Twice the number of draws N times the KL divergence of
the frequencies from 1 / M is then chi-square with M - 1 degrees of freedom (the G-test), and

    epsilon = (1 + (M + 1) / (6 N)) (quantile of chi-square at 1 - alpha / T) / (2 N)

is exceeded by a right rule with probability alpha / T; T tests (two orders, each with every place in a step and with
all together) give alpha in all. Which places a step reaches is decided before the id there is drawn, so each place
alone has the law too. The seeds are fixed: on one machine the answer is always the same, and alpha is over the choice
of seeds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.gate.findings import FALSE_ALARM, Law
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.scoring import Ids, Scorer
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.rows import RowRequest, RowStep, sampling_of
from posttrainllm.kernel.sampling import warp

__all__ = ["CELLS", "ORDERS", "chi_square_quantile", "compare", "positions_in_law"]

Positions: TypeAlias = npt.NDArray[np.float64]
CELLS = 9
ORDERS = ("p / q", "q")
_LEAST_A_CELL = 10  # below so many expected draws a cell the statistic is not chi-square yet


def compare(places: Ids, positions: Mapping[str, Positions], width: int) -> tuple[Law, ...]:
    """Count and compare.

    Args:
        places: [N], the place of each draw in its step, from 1 to W.
        positions: for each order, [N] from `positions_in_law`.
        width: W.

    Returns:
        For each order all draws together, then each place that has enough of them.
    """
    level = FALSE_ALARM / (len(positions) * (width + 1))
    laws = []
    for order, values in positions.items():
        laws.append(_law(order, None, values, level))
        for place in range(1, width + 1):
            chosen = values[places == place]
            if len(chosen) >= CELLS * _LEAST_A_CELL:
                laws.append(_law(order, place, chosen, level))
    return tuple(laws)


def _law(order: str, place: int | None, positions: Positions, level: float) -> Law:
    cells = np.minimum((positions * CELLS).astype(int), CELLS - 1)
    count = max(len(cells), 1)  # a broken path may draw nothing: that is told by the requests that ended early
    shares = np.bincount(cells, minlength=CELLS) / count
    divergence = float(sum(share * math.log(share * CELLS) for share in shares if share > 0))
    correction = 1 + (CELLS + 1) / (6 * count)  # Williams 1976: brings the G-statistic of few draws to chi-square
    epsilon = correction * chi_square_quantile(level) / (2 * count)
    return Law(order=order, place=place, draws=len(cells), kl=max(divergence, 0.0), epsilon=epsilon)


def chi_square_quantile(level: float) -> float:
    """What chi-square with CELLS - 1 = 8 degrees of freedom exceeds with a given probability.

    Args:
        level: in (0, 1).

    Returns:
        The value, to 1e-9.
    """
    low, high = 0.0, 1000.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        half = middle / 2
        # for an even number of degrees of freedom the tail is a Poisson sum
        tail = math.exp(-half) * sum(half**term / math.factorial(term) for term in range((CELLS - 1) // 2))
        low, high = (middle, high) if tail > level else (low, middle)
    return high


def positions_in_law(
    pair: Pair,
    shape: Shape,
    requests: Sequence[RowRequest],
    runs: Sequence[Sequence[RowStep]],
    *,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Ids, dict[str, Positions]]:
    """Where each drawn id lies in the target's law at its place: uniform on [0, 1) if the rule is right.

    Args:
        pair: with its draft.
        shape: of the run.
        requests: all with the same sampling values.
        runs: the steps of each.
        advance: called after each forward.

    Returns:
        For every drawn id its place in its step, from 1, and in each order its position in the law: arrays [N].
    """
    assert pair.draft is not None
    compiled = pair.runtime.compiled
    scorers = [
        Scorer(model, capacity=shape.capacity, compiled=compiled, advance=advance)
        for model in (pair.target, pair.draft)
    ]
    sampling = sampling_of([requests[0]] * shape.rows, pair.vocab_size)
    share = np.random.default_rng(0)
    places: list[int] = []
    positions: dict[str, list[float]] = {order: [] for order in ORDERS}
    for first in range(0, len(requests), shape.rows):
        batch = list(zip(requests, runs, strict=True))[first : first + shape.rows]
        ids = _histories(batch, shape)
        length = ids.shape[1] - 1
        found = {order: np.zeros((shape.rows, length)) for order in ORDERS}
        forced = [scorer.forced(ids[:, :length], shape.width) for scorer in scorers]
        for window, (target, draft) in enumerate(zip(*forced, strict=True)):
            columns = slice(window * shape.width, (window + 1) * shape.width)
            by_target, by_draft = (
                warp(_fit(logits, pair.vocab_size), sampling, mode=requests[0].mode) for logits in (target, draft)
            )
            drawn = mx.array(ids[:, columns.start + 1 : columns.stop + 1])
            shares = mx.array(share.random(drawn.shape, dtype=np.float32))
            for order, of_window in _positions(by_target, by_draft, drawn, shares).items():
                found[order][:, columns] = np.array(of_window)
        for row, (request, steps) in enumerate(batch):
            place = [index for step in steps for index in range(1, len(step.tokens) + 1)]
            places.extend(place)
            for order in ORDERS:
                positions[order].extend(found[order][row, len(request.prompt) - 1 :][: len(place)])
    return np.array(places, dtype=np.int32), {order: np.array(values) for order, values in positions.items()}


def _histories(batch: Sequence[tuple[RowRequest, Sequence[RowStep]]], shape: Shape) -> Ids:
    """Prompts and what was drawn behind them, padded: [B, N + 1], N a multiple of W; the last id is never fed."""
    texts = [[*request.prompt, *(index for step in steps for index in step.tokens)] for request, steps in batch]
    fed = max(map(len, texts)) - 1
    ids = np.zeros((shape.rows, fed + -fed % shape.width + 1), dtype=np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    return ids


def _positions(warped: mx.array, draft_warped: mx.array, drawn: mx.array, shares: mx.array) -> dict[str, mx.array]:
    """Mass of the ids before the drawn one, and its share of its own: [B, W, V] to [B, W] in each order."""
    probs = mx.softmax(warped, axis=-1)
    target_logprobs = warped - mx.logsumexp(warped, axis=-1, keepdims=True)
    draft_logprobs = draft_warped - mx.logsumexp(draft_warped, axis=-1, keepdims=True)
    # a draft without a law decides nothing: any order will do there
    draft_logprobs = mx.where(mx.isnan(draft_logprobs), 0, draft_logprobs)
    keys = {"p / q": mx.where(probs > 0, target_logprobs - draft_logprobs, -mx.inf), "q": draft_logprobs}
    positions = {}
    for order, key in keys.items():
        own = mx.take_along_axis(key, drawn[..., None], axis=-1)  # [B, W, 1]
        before = mx.sum(mx.where(key < own, probs, 0), axis=-1)
        tied = mx.sum(mx.where(key == own, probs, 0), axis=-1)
        positions[order] = before + shares * tied
    return positions


def _fit(logits: mx.array, vocab_size: int) -> mx.array:
    """Cut to the emitted vocabulary, or fill up with ids that are never drawn."""
    logits = logits[..., :vocab_size]
    missing = vocab_size - logits.shape[-1]
    return mx.pad(logits, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf) if missing else logits
