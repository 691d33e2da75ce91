"""exp2 in arithmetic, and the probabilities that are made of it."""

import mlx.core as mx
import numpy as np
import pytest

from posttrainllm.kernel.arithmetic import LOG2_E, exp2
from posttrainllm.kernel.softmax import softmax


@pytest.mark.parametrize("compiled", [True, False])
def test_exp2_is_exact_to_a_few_units_in_the_last_place(compiled):
    x = np.concatenate([np.linspace(-126, 126, 200_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    found = np.array((mx.compile(exp2) if compiled else exp2)(mx.array(x))).astype(np.float64)
    assert np.max(np.abs(found / np.exp2(x.astype(np.float64)) - 1)) < 2e-7


def test_a_scale_is_taken_before_rounding():
    """As an exponential: what the rounding of scale * x costs is absolute, so it shows where the value is large."""
    x = np.linspace(-80, 80, 100_001).astype(np.float32)
    found = np.array(exp2(mx.array(x), LOG2_E)).astype(np.float64)
    error = np.abs(found / np.exp(x.astype(np.float64)) - 1)
    assert np.max(error / np.maximum(np.abs(x), 1)) < 2.5e-7


def test_exp2_of_what_float32_cannot_hold_is_0_or_finite():
    found = np.array(exp2(mx.array([-mx.inf, -1e30, -127.0, mx.nan, 127.0, 1e30, mx.inf])))
    assert np.all(found[:4] == 0)
    assert np.all(found[4:] == 2.0**126)


def reference(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_probabilities_are_those_of_the_logits(arithmetic, scale):
    """3e-7 for the powers and the sum, and 1e-7 a unit of the exponent for the rounding of x * log2(e)."""
    logits = np.random.default_rng(0).normal(0, scale, (2, 3, 4096)).astype(np.float32)
    logits[1, :, 100:] = -np.inf  # filtered out
    law, expected = softmax(mx.array(logits), arithmetic=arithmetic), reference(logits)
    allowed = 1e-6 + 1.2e-7 * np.where(expected > 0, -np.log(np.maximum(expected, 1e-300)), 0)
    for index in range(3):
        found = np.array(law.at(mx.array([index, index], dtype=mx.int32)))
        held = expected[:, index] > 1e-36
        assert np.max((np.abs(found / np.where(held, expected[:, index], 1) - 1) / allowed[:, index])[held]) < 1
        assert np.all(found[~held] < 1e-35)
        assert np.all(found[1, 100:] == 0)


@pytest.mark.parametrize("arithmetic", [True, False])
def test_one_id_has_the_probability_that_the_whole_position_gives_it(arithmetic):
    """Bit for bit: what a proposal is judged by is what the residual subtracts."""
    rng = np.random.default_rng(1)
    law = softmax(mx.array(rng.normal(0, 3, (2, 4, 500)).astype(np.float32)), arithmetic=arithmetic)
    ids = rng.integers(0, 500, (2, 4)).astype(np.int32)
    of = np.array(law.of(mx.array(ids)))
    for index in range(4):
        whole = np.array(law.at(mx.array([index, index], dtype=mx.int32)))
        assert np.array_equal(of[:, index], whole[[0, 1], ids[:, index]])


@pytest.mark.parametrize("arithmetic", [True, False])
def test_a_position_has_the_same_bits_among_others_compiled_or_not(arithmetic):
    """`explain` computes operation by operation what a step compiled, and a server's rows are many."""
    logits = mx.array(np.random.default_rng(2).normal(0, 3, (3, 5, 1000)).astype(np.float32))
    index = mx.array([2, 2, 2], dtype=mx.int32)
    whole = np.array(mx.compile(lambda x: softmax(x[:, :-1], arithmetic=arithmetic).at(index))(logits))
    for row in range(3):
        alone = softmax(logits[row : row + 1, 2:3], arithmetic=arithmetic).at(mx.array([0], dtype=mx.int32))
        assert np.array_equal(whole[row], np.array(alone)[0])


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_position_without_a_finite_logit_has_no_probabilities(arithmetic, value):
    law = softmax(mx.full((1, 1, 8), float(value)), arithmetic=arithmetic)
    assert np.all(np.isnan(np.array(law.at(mx.array([0], dtype=mx.int32)))))
