import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_sampling

from posttrainllm.kernel.sampling import choose, warp


def reference_warp(logits, *, temperature, top_k, top_p, min_p):
    """Which ids survive, by sorting one row at a time in float64."""
    scaled = logits.astype(np.float64) / temperature
    alive = np.ones_like(scaled, dtype=bool)
    if top_k:
        alive &= scaled >= np.sort(scaled)[::-1][min(top_k, scaled.size) - 1]
    probs = np.where(alive, np.exp(scaled - scaled.max()), 0)
    probs /= probs.sum()
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        smallest = scaled[order][before < top_p].min()
        alive &= scaled >= smallest
    if min_p:
        full = np.exp(scaled - scaled.max())
        alive &= full >= min_p
    return alive


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 16, 40]),
    top_p=st.sampled_from([0.05, 0.35, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.5, 1.0]),
)
def test_filters_keep_what_a_sorted_reference_keeps(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(size=16).astype(np.float32) * 3
    sampling = make_sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.isfinite(np.array(warp(mx.array(logits)[None, None], sampling, mode="filtered")))[0, 0]
    expected = reference_warp(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # float32 may place an id that sits within rounding of a threshold on its other side
    assert np.sum(kept != expected) == 0 or (np.sum(kept != expected) == 1 and top_p < 1)


def test_the_likeliest_id_survives_every_filter():
    logits = mx.array(np.random.default_rng(0).normal(size=(1, 1, 64)).astype(np.float32))
    sampling = make_sampling(1, temperature=2.0, top_k=1, top_p=1e-6, min_p=1.0)
    warped = np.array(warp(logits, sampling, mode="filtered"))[0, 0]
    assert np.flatnonzero(np.isfinite(warped)).tolist() == [int(mx.argmax(logits))]


def test_ids_that_tie_with_the_last_kept_one_are_kept():
    sampling = make_sampling(1, temperature=1.0, top_k=2)
    warped = np.array(warp(mx.array([[[3.0, 1.0, 1.0, 0.0]]]), sampling, mode="filtered"))[0, 0]
    assert np.isfinite(warped).tolist() == [True, True, True, False]


def test_a_row_without_filters_passes_through_bit_for_bit_beside_one_that_has_them():
    logits = mx.array(np.random.default_rng(1).normal(size=(3, 2, 300)).astype(np.float32))
    mixed = make_sampling(3, temperature=[0.7, 1.3, 0.0], top_k=[0, 5, 5], top_p=[1.0, 0.5, 0.5], min_p=[0.0, 0.1, 0.1])
    with_filters, without = warp(logits, mixed, mode="filtered"), warp(logits, mixed, mode="sampled")
    assert mx.array_equal(with_filters[0], without[0])
    assert mx.array_equal(with_filters[2], without[2])
    assert not mx.array_equal(with_filters[1], without[1])


def test_a_greedy_row_ignores_its_noise_even_when_that_is_huge():
    warped = mx.array([[[1.0, 2.0, 0.0]]])
    noise = mx.array([[[1e30, -1e30, 1e30]]])
    assert choose(warped, make_sampling(1, temperature=0.0), noise).item() == 1
    assert choose(warped, make_sampling(1, temperature=1.0), noise).item() != 1


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_warping_computes_in_float32(dtype):
    warped = warp(mx.array([[[1.0, 2.0]]], dtype=dtype), make_sampling(1, temperature=0.7), mode="sampled")
    assert warped.dtype == mx.float32


def test_drawing_by_gumbel_noise_follows_the_softmax():
    # 40000 draws over 5 ids, chi-square with 4 degrees of freedom; above 34 with probability 8e-7
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5], dtype=np.float32)
    from posttrainllm.kernel import noise

    rows = mx.stack([noise.root_key(seed) for seed in range(40)])
    positions = mx.broadcast_to(mx.arange(1000)[None], (40, 1000))
    gumbel = noise.gumbel(noise.position_keys(rows, positions, noise.TARGET), 5, arithmetic=False)
    drawn = choose(mx.broadcast_to(mx.array(logits), gumbel.shape), make_sampling(40, temperature=1.0), gumbel)
    counts = np.bincount(np.array(drawn).ravel(), minlength=5)
    expected = np.exp(logits) / np.exp(logits).sum() * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 34
