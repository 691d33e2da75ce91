"""The law of what is emitted, through the whole compiled step, on a vocabulary small enough to enumerate.

Chi-square over the 512 paths of three tokens, 51,200 draws a case. The statistic is turned into a normal deviate by
Wilson and Hilferty; 5.5 is exceeded with probability 2e-8 by a right step, so 3e-7 over all cases of this file.
"""

import mlx.core as mx
import numpy as np
import pytest
from support import make_sampling, make_state, mostly_slow, table_forward

from posttrainllm.kernel import accept, draft, noise
from posttrainllm.kernel.compiled import compile_step
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.draft import Draft

VOCAB, LENGTH, ROWS, ROUNDS = 8, 3, 6400, 8
LIMIT = 5.5


def target_table() -> np.ndarray:
    return np.random.default_rng(11).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5


def draft_table(kind: str) -> np.ndarray:
    generator = np.random.default_rng(12)
    if kind == "random":
        return generator.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
    if kind == "sharp":  # nearly all mass on one id, not the target's best
        return (generator.normal(size=(VOCAB, VOCAB)) + 8 * np.eye(VOCAB)[generator.permutation(VOCAB)]).astype(
            np.float32
        )
    if kind == "flat":
        return np.zeros((VOCAB, VOCAB), dtype=np.float32)
    if kind == "equal":
        return target_table()
    assert kind == "disjoint"
    # the ids the target likes least, as far as softmax in float32 can tell
    order = np.argsort(target_table(), axis=1)
    table = np.full((VOCAB, VOCAB), -40.0, dtype=np.float32)
    np.put_along_axis(table, order[:, :4], 2.0, axis=1)
    return table


def disjoint_target_table() -> np.ndarray:
    table = target_table()
    order = np.argsort(table, axis=1)
    np.put_along_axis(table, order[:, :4], -40.0, axis=1)
    return table


def path_law(table: np.ndarray, temperature: float, keep: np.ndarray | None = None) -> np.ndarray:
    """Probability of every path of three tokens from token 0: float64 [V, V, V]."""
    scaled = np.where(True if keep is None else keep, table.astype(np.float64) / temperature, -np.inf)
    probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    return probs[0][:, None, None] * probs[:, :, None] * probs[None, :, :]


def draw_paths(
    target: np.ndarray,
    proposer: np.ndarray,
    *,
    width: int = 5,
    rounds: int = ROUNDS,
    arithmetic: bool = False,
    **options,
) -> np.ndarray:
    """Counts of the paths that the whole step emits: int [V, V, V]."""
    mode = "filtered" if options.keys() & {"top_k", "top_p", "min_p"} else "sampled"
    adjusted = bool(options.keys() & {"bias", "presence_penalty", "frequency_penalty", "repetition_penalty"})
    config = StepConfig(width=width, vocab_size=VOCAB, mode=mode, adjusted=adjusted, arithmetic=arithmetic)
    proposing = Draft(forward=table_forward(mx.array(proposer)), vocab_size=VOCAB, context=10**6)
    step = compile_step(config, table_forward(mx.array(target)), proposing)
    sampling = make_sampling(ROWS, prompt_length=1, **options)
    counts = np.zeros((VOCAB, VOCAB, VOCAB), dtype=np.int64)
    for index in range(rounds):
        seeds = range(index * ROWS, (index + 1) * ROWS)
        state = make_state([[0]] * ROWS, limit=1 + LENGTH, capacity=LENGTH + 3, seeds=seeds)
        for _ in range(LENGTH):
            state, _ = step(state, sampling)
        paths = np.array(state.tokens)[:, 1 : 1 + LENGTH]
        assert np.all(np.array(state.length) == 1 + LENGTH)
        np.add.at(counts, tuple(paths.T), 1)
    return counts


def deviate(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square with rare paths pooled, as a normal deviate."""
    expected = (law * counts.sum()).ravel()
    observed = counts.ravel().astype(float)
    rare = expected < 8
    if observed[expected == 0].sum() > 0:
        return np.inf
    groups_expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    groups_observed = np.append(observed[~rare], observed[rare].sum())
    if groups_expected[-1] < 8:
        groups_expected, groups_observed = groups_expected[:-1], groups_observed[:-1]
    chi_square = ((groups_observed - groups_expected) ** 2 / groups_expected).sum()
    freedom = groups_expected.size - 1
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("kind", ["random", "sharp", "flat", "equal", "disjoint"])
def test_leviathan_emits_the_targets_law_whatever_the_draft(kind):
    target = disjoint_target_table() if kind == "disjoint" else target_table()
    counts = draw_paths(target, draft_table(kind), temperature=1.0)
    assert deviate(counts, path_law(target, 1.0)) < LIMIT


@pytest.mark.parametrize("kind", mostly_slow({kind: kind for kind in ("random", "equal", "disjoint")}, "random"))
def test_the_law_holds_with_exponentials_in_arithmetic(kind):
    target = disjoint_target_table() if kind == "disjoint" else target_table()
    counts = draw_paths(target, draft_table(kind), temperature=1.0, arithmetic=True)
    assert deviate(counts, path_law(target, 1.0)) < LIMIT


@pytest.mark.parametrize(("width", "temperature"), [(2, 0.7), (3, 1.5)])
def test_the_law_holds_at_other_widths_and_temperatures(width, temperature):
    counts = draw_paths(target_table(), draft_table("random"), width=width, temperature=temperature)
    assert deviate(counts, path_law(target_table(), temperature)) < LIMIT


def test_the_law_holds_under_top_k_of_both_models():
    keep = target_table() >= np.sort(target_table(), axis=1)[:, -3][:, None]
    counts = draw_paths(target_table(), draft_table("random"), temperature=1.0, top_k=3)
    assert deviate(counts, path_law(target_table(), 1.0, keep)) < LIMIT


def test_the_law_of_coupled_is_the_targets_too():
    counts = draw_paths(target_table(), draft_table("random"), temperature=1.0, coupled=True)
    assert deviate(counts, path_law(target_table(), 1.0)) < LIMIT


def accepts_too_much(target_probs, draft_probs, uniforms):
    return uniforms * draft_probs < 1.15 * target_probs


def draws_from_the_target_after_a_refusal(target_probs, draft_probs, gumbel):
    return mx.log(target_probs) + gumbel


def drafts_greedily(warped, sampling, gumbel):
    return mx.argmax(warped, axis=-1).astype(mx.int32)


@pytest.mark.parametrize(
    ("module", "name", "broken", "rounds"),
    [
        (accept, "leviathan_accepts", accepts_too_much, ROUNDS),
        # a quarter of the draws is enough for these
        (accept, "residual_scores", draws_from_the_target_after_a_refusal, ROUNDS // 4),
        (draft, "choose", drafts_greedily, ROUNDS // 4),
        (noise, "DRAFT", noise.TARGET, ROUNDS // 4),
    ],
    ids=[
        "accepts 15 % too often",
        "draws from p after a refusal",
        "greedy draft with the ratio test",
        "draft and target share their noise",
    ],
)
def test_a_broken_rule_fails_the_law_test(monkeypatch, module, name, broken, rounds):
    """The test of the tests. That the purposes differ is tested by itself: the law does not show every mix-up."""
    monkeypatch.setattr(module, name, broken)
    counts = draw_paths(target_table(), draft_table("random"), temperature=1.0, rounds=rounds)
    assert deviate(counts, path_law(target_table(), 1.0)) > LIMIT
