import functools
import math

import mlx.core as mx
import numpy as np
import pytest

from posttrainllm.kernel import noise
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.errors import UsageError


def keys_of(seeds, positions, purpose):
    roots = mx.stack([noise.root_key(seed) for seed in seeds])
    grid = mx.broadcast_to(mx.array(list(positions), dtype=mx.int32)[None], (len(seeds), len(positions)))
    return noise.position_keys(roots, grid, purpose)


def test_no_two_of_seed_position_and_purpose_share_a_key():
    # 64 neighbouring seeds x 256 positions x 3 purposes; by chance two 64-bit keys of 49152 agree once in 1.5e10 runs
    keys = [
        np.array(keys_of(range(64), range(256), purpose)).reshape(-1, 2)
        for purpose in (noise.TARGET, noise.DRAFT, noise.ACCEPT)
    ]
    everything = np.concatenate(keys)
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_the_purposes_are_distinct_constants():
    assert len({noise.TARGET, noise.DRAFT, noise.ACCEPT}) == 3


@pytest.mark.parametrize("arithmetic", [True, False])
def test_noise_does_not_depend_on_the_other_rows_or_positions_drawn_with_it(arithmetic):
    together = noise.gumbel(keys_of([5, 6, 7], range(4), noise.TARGET), 32, arithmetic=arithmetic)
    alone = noise.gumbel(keys_of([6], [2], noise.TARGET), 32, arithmetic=arithmetic)
    assert mx.array_equal(together[1, 2], alone[0, 0])


def test_uniforms_are_uniform():
    # Kolmogorov-Smirnov over 65536 values; sqrt(n) D > 2.8 happens with probability 2 exp(-2 * 2.8**2) = 3e-7
    values = np.sort(np.array(noise.uniform(keys_of(range(256), range(256), noise.ACCEPT))).ravel())
    grid = (np.arange(values.size) + 0.5) / values.size
    assert math.sqrt(values.size) * np.max(np.abs(values - grid)) < 2.8
    assert values[0] >= 0
    assert values[-1] < 1


@pytest.mark.parametrize("shift", [(1, 0), (0, 1)], ids=["neighbouring seeds", "neighbouring positions"])
def test_neighbours_are_uncorrelated(shift):
    # the correlation of 65280 independent pairs is normal with sd 1/sqrt(n): five sd happen with probability 6e-7
    values = np.array(noise.uniform(keys_of(range(256), range(256), noise.TARGET)))
    first = values[: 256 - shift[0], : 256 - shift[1]].ravel()
    second = values[shift[0] :, shift[1] :].ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(first.size) < 5


def test_purposes_are_uncorrelated():
    # three pairs of 65536 values; five sd happen with probability 2e-6 in all
    values = [
        np.array(noise.uniform(keys_of(range(256), range(256), purpose))).ravel()
        for purpose in (noise.TARGET, noise.DRAFT, noise.ACCEPT)
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(values[first], values[second])[0, 1]) * 256 < 5


@pytest.mark.parametrize("arithmetic", [True, False])
def test_gumbel_noise_has_the_law_of_gumbel(arithmetic):
    # mean is Euler's constant, variance pi**2/6; five sd of the mean of 262144 values, probability 6e-7
    values = np.array(noise.gumbel(keys_of(range(64), range(64), noise.TARGET), 64, arithmetic=arithmetic)).ravel()
    assert abs(values.mean() - np.euler_gamma) < 5 * math.pi / math.sqrt(6 * values.size)
    assert abs(values.var() - math.pi**2 / 6) < 0.05


@pytest.mark.parametrize("width", [64, 65])
def test_gumbel_noise_is_made_of_what_mlx_draws_for_an_even_width(width):
    """The generator's own words: what is left out of `mx.random.uniform` changes no value."""
    key = noise.root_key(3)
    uniform = mx.random.uniform(shape=(width + width % 2,), key=key)[:width]
    expected = noise.gumbel_from_uniform(uniform, arithmetic=False)
    assert mx.array_equal(noise.gumbel(key[None, None], width, arithmetic=False)[0, 0], expected)


@pytest.mark.parametrize("arithmetic", [True, False])
def test_gumbel_noise_is_finite_at_the_ends_of_the_uniform(arithmetic):
    ends = noise.gumbel_from_uniform(mx.array([0.0, 2**-32, 0.5, 1 - 2**-24], dtype=mx.float32), arithmetic=arithmetic)
    assert np.all(np.isfinite(np.array(ends)))
    assert ends[0].item() == pytest.approx(33 * math.log(2), abs=1e-3)


@pytest.mark.parametrize("arithmetic", [True, False])
def test_gumbel_noise_resolves_its_upper_tail(arithmetic):
    tail = noise.gumbel_from_uniform(mx.array([2**-20, 2**-26, 2**-31], dtype=mx.float32), arithmetic=arithmetic)
    expected = [-math.log(-math.log1p(-(v + 2**-33))) for v in (2**-20, 2**-26, 2**-31)]
    np.testing.assert_allclose(np.array(tail), expected, rtol=1e-5)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(UsageError, match="seed: got"):
        noise.root_key(seed)


def test_seeds_differ_in_their_high_bits_too():
    assert not mx.array_equal(noise.root_key(5), noise.root_key(5 + 2**32))


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_gumbel_noise_is_accurate_over_the_whole_range(compiled, arithmetic):
    """Near v = 0, too, where 1 - v is rounded to a few steps of float32: those values decide every argmax."""
    small = 2.0 ** -np.linspace(0.5, 31, 5001)
    values = np.concatenate([[0.0], small, 1 - small[small > 2.0**-24], [1 - 2.0**-24]]).astype(np.float32)
    make = functools.partial(noise.gumbel_from_uniform, arithmetic=arithmetic)
    make = mx.compile(make) if compiled else make
    found = np.array(make(mx.array(values))).astype(np.float64)
    shifted = (values + np.float32(2.0**-33)).astype(np.float64)
    expected = -np.log(-np.log1p(-shifted))
    assert np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 1)) < 1e-6


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("rules", ["both", "leviathan", "coupled"])
def test_a_step_draws_with_the_noise_of_its_positions_whatever_rules_it_knows(rules, arithmetic):
    config = StepConfig(width=4, vocab_size=32, mode="sampled", rules=rules, arithmetic=arithmetic)
    coupled = {"both": [True, False], "leviathan": [False] * 2, "coupled": [True] * 2}[rules]
    root, length = mx.stack([noise.root_key(1), noise.root_key(2)]), mx.array([7, 90], dtype=mx.int32)
    draws = noise.step_noise(config, root, length, mx.array(coupled))
    for row, first in enumerate([7, 90]):
        alone = {
            purpose: noise.position_keys(root[row : row + 1], mx.arange(first, first + 4)[None], purpose)
            for purpose in (noise.TARGET, noise.DRAFT, noise.ACCEPT)
        }
        gumbel = {purpose: noise.gumbel(keys, 32, arithmetic=arithmetic)[0] for purpose, keys in alone.items()}
        assert mx.array_equal(draws.draft[row], gumbel[noise.TARGET if coupled[row] else noise.DRAFT][:3])
        assert mx.array_equal(draws.target[row], gumbel[noise.TARGET])
        if not coupled[row]:
            assert mx.array_equal(draws.uniforms[row], noise.uniform(alone[noise.ACCEPT])[0, :3])
        for index in range(4):
            there = draws.target_at(mx.array([[index], [index]], dtype=mx.int32))
            assert mx.array_equal(there[row, 0], gumbel[noise.TARGET][index])
