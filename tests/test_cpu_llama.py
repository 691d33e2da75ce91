"""The CPU's own exp2; its forward is tested with the others, in test_llama_forwards.py."""

import math

import mlx.core as mx
import numpy as np
import pytest

from posttrainllm.adapters.loading.cpu_llama import exp2


@pytest.mark.parametrize("compiled", [True, False])
def test_exp2_is_exact_to_a_few_units_in_the_last_place(compiled):
    x = np.concatenate([np.linspace(-126, 126, 200_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    found = np.array((mx.compile(exp2) if compiled else exp2)(mx.array(x))).astype(np.float64)
    assert np.max(np.abs(found / np.exp2(x.astype(np.float64)) - 1)) < 2e-7


def test_a_scale_is_taken_before_rounding():
    """As an exponential: what the rounding of scale * x costs is absolute, so it shows where the value is large."""
    x = np.linspace(-80, 80, 100_001).astype(np.float32)
    found = np.array(exp2(mx.array(x), 1 / math.log(2))).astype(np.float64)
    error = np.abs(found / np.exp(x.astype(np.float64)) - 1)
    assert np.max(error / np.maximum(np.abs(x), 1)) < 2.5e-7


def test_exp2_of_what_float32_cannot_hold_is_0_or_finite():
    found = np.array(exp2(mx.array([-mx.inf, -1e30, -127.0, mx.nan, 127.0, 1e30, mx.inf])))
    assert np.all(found[:4] == 0)
    assert np.all(found[4:] == 2.0**126)
