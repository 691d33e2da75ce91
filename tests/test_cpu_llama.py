"""The CPU's own exp; its forward is tested with the others, in test_llama_forwards.py."""

import mlx.core as mx
import numpy as np
import pytest

from posttrainllm.adapters.loading.cpu_llama import exp


@pytest.mark.parametrize("compiled", [True, False])
def test_exp_is_exact_to_a_few_units_in_the_last_place(compiled):
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    found = np.array((mx.compile(exp) if compiled else exp)(mx.array(x))).astype(np.float64)
    assert np.max(np.abs(found / np.exp(x.astype(np.float64)) - 1)) < 2e-7


def test_exp_of_what_float32_cannot_hold_stays_finite_and_nan_stays_nan():
    found = np.array(exp(mx.array([-mx.inf, -1e30, -88.0, 89.0, 1e30, mx.inf, mx.nan])))
    assert np.all((found[:3] > 0) & (found[:3] < 2e-38))
    assert np.all((found[3:6] > 1e38) & np.isfinite(found[3:6]))
    assert np.isnan(found[6])
