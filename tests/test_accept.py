"""What replaces a refused proposal, without a step around it; test_law.py has the laws of whole steps."""

import mlx.core as mx
import numpy as np
import pytest

from posttrainllm.kernel.accept import residual_scores

LEAST_NOISE, MOST_NOISE = -2.9, 22.9  # beyond what `noise.gumbel` returns
ON_A_GPU = mx.default_device() == mx.gpu
LEAST = 2.0**-126 if ON_A_GPU else 2.0**-149  # a GPU may make 0 of what is smaller than a normal number


def ids(p, q, noise) -> np.ndarray:
    return np.argmax(np.array(residual_scores(*(mx.array(np.float32(values)) for values in (p, q, noise)))), axis=-1)


def test_an_id_without_a_residual_never_wins_against_one_that_has_any():
    """The one at its luckiest and likeliest, the other at its unluckiest, of the least probability that there is."""
    p, q = [[1.0, LEAST, 0.0]], [[1.0, 0.0, 1.0]]
    assert ids(p, q, [[MOST_NOISE, LEAST_NOISE, MOST_NOISE]]) == 1


@pytest.mark.parametrize("q", ["equal", "nan"])
def test_where_nothing_is_left_the_target_draws(q):
    """Chi-square of 7 degrees of freedom over 65,536 draws: above 45 once in 7 million runs."""
    rng = np.random.default_rng(0)
    p = np.float32([0.3, 0.2, 0.2, 0.1, 0.1, 0.06, 0.04, 0.0])
    noise = -np.log(rng.exponential(size=(65_536, 8)))
    counts = np.bincount(ids(p, p if q == "equal" else p * np.nan, noise), minlength=8)
    assert counts[-1] == 0
    expected = p[:-1] * len(noise)
    assert np.sum((counts[:-1] - expected) ** 2 / expected) < 45


def test_what_replaces_a_refusal_is_drawn_from_what_is_left():
    """Chi-square of 1 degree of freedom over 65,536 draws: above 28 once in 8 million runs."""
    rng = np.random.default_rng(1)
    p, q = np.float32([0.5, 0.3, 0.2, 0.0]), np.float32([0.2, 0.2, 0.3, 0.3])
    counts = np.bincount(ids(p, q, -np.log(rng.exponential(size=(65_536, 4)))), minlength=4)
    assert counts[2:].tolist() == [0, 0]
    expected = np.array([0.75, 0.25]) * 65_536
    assert np.sum((counts[:2] - expected) ** 2 / expected) < 28
