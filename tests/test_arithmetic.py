"""exp2 and logarithms in arithmetic, and the probabilities that are made of it."""

import platform

import mlx.core as mx
import numpy as np
import pytest
from support import make_sampling, make_state, table_forward, tiny_pair

from posttrainllm.adapters.engine import Engine
from posttrainllm.kernel import explain, pure_step
from posttrainllm.kernel.arithmetic import LOG2_E, exp2, log, minus_log1p_minus
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.draft import Draft
from posttrainllm.kernel.laws import joined, laws

ON_A_GPU = pytest.mark.skipif(
    mx.default_device() == mx.gpu, reason="a GPU takes its own functions, and its compiler fuses products and sums"
)
ARITHMETIC = [pytest.param(True, marks=ON_A_GPU), False]


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


@pytest.mark.parametrize("compiled", [True, False])
def test_the_logarithm_is_exact_to_a_few_units_in_the_last_place(compiled):
    """Next to 1, too, where the logarithm is small."""
    x = np.exp(np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1e-3, 1e-3, 10_001)])).astype(np.float32)
    found = np.array((mx.compile(log) if compiled else log)(mx.array(x))).astype(np.float64)
    expected = np.log(x.astype(np.float64))
    assert np.all(found[expected == 0] == 0)
    assert np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 1e-30)) < 2e-7


@pytest.mark.parametrize("compiled", [True, False])
def test_minus_log1p_minus_is_exact_where_1_minus_x_is_rounded(compiled):
    x = np.concatenate([2.0 ** -np.linspace(1, 33, 100_001), np.linspace(0.5, 1 - 2.0**-24, 10_001)]).astype(np.float32)
    found = np.array((mx.compile(minus_log1p_minus) if compiled else minus_log1p_minus)(mx.array(x)))
    expected = -np.log1p(-x.astype(np.float64))
    allowed = 3e-7 + 2.0**-25 / ((1 - x.astype(np.float64)) * expected)  # the second is the rounding of 1 - x
    assert np.max(np.abs(found / expected - 1)[x < 0.5]) < 3e-7
    assert np.max(np.abs(found / expected - 1) / allowed) < 1
    assert minus_log1p_minus(mx.array(0.0)).item() == 0


def reference(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def laws_of(target, draft, *, arithmetic):
    both = joined(target, mx.split(draft, draft.shape[1], axis=1), arithmetic=arithmetic)
    return laws(both, arithmetic=arithmetic)


def at(both, index: int, rows: int):
    """p and q of one position of every row."""
    return [np.array(probs)[:, 0] for probs in both.at(mx.full((rows, 1), index, dtype=mx.int32))]


@pytest.mark.parametrize("count", [1, 4, 9])
def test_logits_are_joined_to_the_same_array_by_choice_and_by_copy(count):
    target = mx.random.normal((2, count, 33), key=mx.random.key(0))
    drafts = [mx.full((2, 1, 33), float(index)) for index in range(count)]
    copied = joined(target, drafts, arithmetic=True)
    assert mx.array_equal(copied, mx.concatenate([target, *drafts], axis=1))
    assert mx.array_equal(mx.compile(lambda *each: joined(*each, arithmetic=False))(target, drafts), copied)


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_probabilities_are_those_of_the_logits(arithmetic, scale):
    """To 4e-6 for a sum of 4096 floats, MLX's as ours, and 1.2e-7 a unit of x for the rounding of x * log2(e)."""
    logits = np.random.default_rng(0).normal(0, scale, (2, 2, 3, 4096)).astype(np.float32)  # p and q, B, K, V
    logits[:, 1, :, 100:] = -np.inf  # filtered out
    both, expected = laws_of(*map(mx.array, logits), arithmetic=arithmetic), reference(logits)
    allowed = 4e-6 - 1.2e-7 * np.log(np.maximum(expected, 1e-300))
    for index in range(3):
        for found, right, most in zip(at(both, index, 2), expected[:, :, index], allowed[:, :, index], strict=True):
            held = right > 1e-36
            assert np.max(np.abs(found[held] / right[held] - 1) / most[held]) < 1
            assert np.all(found[~held] < 1e-35)
            assert np.all(found[1, 100:] == 0)


@pytest.mark.parametrize("arithmetic", [True, False])
def test_one_id_has_the_probability_that_the_whole_position_gives_it(arithmetic):
    """Bit for bit: what a proposal is judged by is what the residual subtracts."""
    rng = np.random.default_rng(1)
    both = laws_of(*mx.array(rng.normal(0, 3, (2, 2, 4, 500)).astype(np.float32)), arithmetic=arithmetic)
    ids = rng.integers(0, 500, (2, 4)).astype(np.int32)
    for index in range(4):
        for found, whole in zip(both.of(mx.array(ids)), at(both, index, 2), strict=True):
            assert np.array_equal(np.array(found)[:, index], whole[[0, 1], ids[:, index]])


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_a_position_has_the_same_bits_among_others_compiled_or_not(arithmetic):
    """`explain` computes operation by operation what a step compiled, and a server's rows are many."""
    target, draft = mx.array(np.random.default_rng(2).normal(0, 3, (2, 3, 5, 1000)).astype(np.float32))
    index = mx.array([[2]] * 3, dtype=mx.int32)
    whole = mx.compile(lambda x, y: laws_of(x[:, :-1], y[:, :-1], arithmetic=arithmetic).at(index))(target, draft)
    for row in range(3):
        alone = laws_of(target[row : row + 1, 2:3], draft[row : row + 1, 2:3], arithmetic=arithmetic)
        for among, found in zip(whole, at(alone, 0, 1), strict=True):
            assert np.array_equal(np.array(among)[row, 0], found[0])


@pytest.mark.parametrize("arithmetic", [True, False])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_position_without_a_finite_logit_has_no_probabilities(arithmetic, value):
    both = laws_of(mx.full((1, 1, 8), float(value)), mx.zeros((1, 1, 8)), arithmetic=arithmetic)
    p, q = at(both, 0, 1)
    assert np.all(np.isnan(p))
    assert np.all(q == 1 / 8)


@pytest.mark.parametrize("arithmetic", [True, False])
def test_an_explanation_takes_the_exponentials_of_the_step(monkeypatch, arithmetic):
    """Its p and q would differ in the last bits from those that decided."""
    seen = []

    def watched(logits, *, arithmetic):
        seen.append(arithmetic)
        return laws(logits, arithmetic=arithmetic)

    for module in (pure_step, explain):
        monkeypatch.setattr(module, "laws", watched)
    table = mx.array(np.random.default_rng(3).normal(size=(8, 8)).astype(np.float32))
    config = StepConfig(width=3, vocab_size=8, mode="sampled", arithmetic=arithmetic)
    models = table_forward(table), Draft(forward=table_forward(table * 2), vocab_size=8, context=100)
    state, sampling = make_state([[1, 2]], limit=9, capacity=12), make_sampling(1, temperature=1.0)
    _, output = pure_step.speculative_step(config, *models, state, sampling)
    window = mx.concatenate([mx.array([[2]], dtype=mx.int32), output.proposals], axis=1)
    explain.explain_step(config, *models, state, sampling, window)
    assert seen == [arithmetic, arithmetic]


def test_steps_on_an_x86_cpu_take_exponentials_in_arithmetic(runtime):
    on_x86 = runtime.device == "cpu" and platform.machine() == "x86_64"
    assert runtime.scalar_exp == on_x86
    config = Engine(tiny_pair(draft="noisy"), capacity=16, width=3).compiled.config_for("sampled")
    assert config.arithmetic == on_x86
