"""Log probabilities: the target's own, the same with and without a draft, of what is emitted and of the prompt."""

import json

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import PROMPTS, bare_tokenizer, tiny_config, tiny_module, tiny_pair, without_draft

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.facade import generate, stream
from posttrainllm.adapters.prompt_logprobs import prompt_logprobs
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.runtime import start
from posttrainllm.kernel.errors import CapacityError, NonFiniteError
from posttrainllm.kernel.logprobs import token_logprobs

IDS = [4, 5, 6, 7]
TOLERANCE = 1e-4 if start().device == "cpu" else 0.02  # products on a GPU round to tf32


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(draft="noisy")


@pytest.fixture(scope="module")
def plain(pair):
    return without_draft(pair)


@pytest.fixture(scope="module")
def module():
    """The tiny target as mlx-lm's own module, which needs no cache."""
    return tiny_module(tiny_config(vocab=512, context=512), seed=1)


def log_softmax(logits) -> np.ndarray:
    logits = np.array(logits.astype(mx.float32)).astype(np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))


def by_module(module, ids, vocab_size=512) -> np.ndarray:
    """Log probability of every id behind each position of a text, by one forward with no cache: float64 [N, V]."""
    return log_softmax(module(mx.array([list(ids)]))[0, :, :vocab_size])


def held(entry, expected, count):
    """One reported position against the log probabilities of all ids."""
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=TOLERANCE)
    assert len(entry.top) == count
    for (index, value), best in zip(entry.top, np.sort(expected)[::-1], strict=False):
        assert value == pytest.approx(expected[index], abs=TOLERANCE)
        assert value == pytest.approx(best, abs=TOLERANCE)
    assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
    assert len({index for index, _ in entry.top}) == count


def close(one, other):
    """The same ids and alternatives, within the tolerance."""
    assert one.token_id == other.token_id
    assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
    for (index, value), (other_index, other_value) in zip(one.top, other.top, strict=True):
        assert value == pytest.approx(other_value, abs=TOLERANCE)
        assert index == other_index or abs(value - other_value) < TOLERANCE


# the arithmetic


@pytest.mark.parametrize("vocab", [1, 7, 20, 21, 300])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_likeliest_ids_come_by_falling_logit_and_equal_ones_by_the_lower_id(vocab, compiled):
    generator = np.random.default_rng(vocab)
    logits = np.round(generator.normal(size=(3, 4, vocab)) * 2).astype(np.float32)  # full of ties
    logits[0, 0] = -(logits[0, 0] ** 2)  # none above 0
    logits[0, 1] = np.where(generator.random(vocab) < 0.5, 0.0, -0.0)
    logits[2] = generator.normal(size=(4, vocab))
    tokens = generator.integers(0, vocab, size=(3, 4))
    run = mx.compile(token_logprobs) if compiled else token_logprobs
    own, ids, values = map(np.array, run(mx.array(logits), mx.array(tokens, dtype=mx.int32)))
    expected = log_softmax(mx.array(logits))
    count = min(20, vocab)
    assert ids.shape == values.shape == (3, 4, count)
    for row in range(3):
        for place in range(4):
            order = np.lexsort((np.arange(vocab), -logits[row, place]))[:count]
            assert ids[row, place].tolist() == order.tolist()
            np.testing.assert_allclose(values[row, place], expected[row, place][order], atol=1e-5)
            assert own[row, place] == pytest.approx(expected[row, place, tokens[row, place]], abs=1e-5)


def test_an_id_outside_the_vocabulary_has_no_probability():
    own, _, _ = token_logprobs(mx.zeros((1, 3, 8)), mx.array([[-1, 8, 3]], dtype=mx.int32))
    assert own[0].tolist() == [-np.inf, -np.inf, pytest.approx(-np.log(8))]


# of what is emitted


@pytest.mark.parametrize("width", [1, 5])
def test_greedy_logprobs_with_a_draft_equal_plain_ones_and_are_never_all_zero(embedded_pair, width):
    """Case: logprobs are 0.0 or wrong under speculation."""
    options = {"max_tokens": 48, "logprobs": 5, "ignore_eos": True}
    for prompt in PROMPTS:
        drafted = generate(pair=embedded_pair, prompt=prompt, **options)
        reference = generate(pair=without_draft(embedded_pair), prompt=prompt, plain_width=width, **options)
        assert drafted.usage.draft_accepted > 0
        assert len(drafted.logprobs) == len(reference.logprobs) == 48
        if drafted.token_ids != reference.token_ids:
            assert width == 1  # a near-tie between widths; the reference is of the same width
            continue
        for one, other in zip(drafted.logprobs, reference.logprobs, strict=True):
            close(one, other)
            assert one.token_id == one.top[0][0]
        assert sum(entry.logprob < -0.01 for entry in drafted.logprobs) > 5


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 4}], ids=["greedy", "leviathan"])
@pytest.mark.parametrize("count", [0, 5, 20])
def test_logprobs_are_the_log_softmax_of_a_forward_without_a_cache(pair, plain, module, options, count):
    for given in (pair, plain):
        result = generate(pair=given, prompt=IDS, max_tokens=40, logprobs=count, **options)
        expected = by_module(module, [*IDS, *result.token_ids])[len(IDS) - 1 : -1]
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        for entry, law in zip(result.logprobs, expected, strict=True):
            held(entry, law, count)


def test_bias_penalties_and_temperature_leave_the_logprobs_the_models_own(pair, module):
    asked = {"logit_bias": {77: 100}, "presence_penalty": 2, "repetition_penalty": 3, "temperature": 0.3}
    result = generate(pair=pair, prompt=IDS, max_tokens=12, logprobs=3, **asked)
    expected = by_module(module, [*IDS, *result.token_ids])[len(IDS) - 1 : -1]
    assert set(result.token_ids) == {77}
    for entry, law in zip(result.logprobs, expected, strict=True):
        held(entry, law, 3)
    assert min(entry.logprob for entry in result.logprobs) < -2  # the model itself would not have said it


def test_logprobs_are_over_the_ids_that_may_be_emitted(pair, module):
    narrow = attrs.evolve(pair, tokenizer=bare_tokenizer(100))
    result = generate(pair=narrow, prompt=IDS, max_tokens=20, logprobs=2)
    expected = by_module(module, [*IDS, *result.token_ids], 100)[len(IDS) - 1 : -1]
    for entry, law in zip(result.logprobs, expected, strict=True):
        held(entry, law, 2)


def test_chunks_carry_the_logprobs_of_their_own_ids_also_where_a_stop_cuts_them(pair):
    free = generate(pair=pair, prompt=IDS, max_tokens=40)
    for stops in ((), (free.token_ids[17],)):
        chunks = list(stream(pair=pair, prompt=IDS, max_tokens=40, logprobs=1, stop_token_ids=stops))
        for chunk in chunks:
            assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids)


def test_who_does_not_ask_sees_nothing_of_it(pair):
    assert all(chunk.logprobs is None for chunk in stream(pair=pair, prompt=IDS, max_tokens=9))
    result = generate(pair=pair, prompt=IDS, max_tokens=9)
    assert result.logprobs is None
    assert "logprobs" not in result.to_dict()
    assert "logprobs" not in result.sampling
    asked = generate(pair=pair, prompt=IDS, max_tokens=9, logprobs=0)
    assert asked.token_ids == result.token_ids
    assert len(json.loads(json.dumps(asked.to_dict()))["logprobs"]) == 9


def test_only_the_row_that_asks_gets_logprobs_and_as_many_as_it_wants(pair):
    engine = Engine(pair, rows=3, capacity=256, width=5)
    for row, count in enumerate((None, 0, 7)):
        engine.insert(row, RowRequest(prompt=IDS, limit=60, draft_k=4, logprobs=count))
    for _ in range(4):
        steps = engine.step()
        assert steps[0].tokens == steps[1].tokens == steps[2].tokens
        assert steps[0].logprobs == ()
        assert [len(entry.top) for entry in steps[1].logprobs] == [0] * len(steps[1].tokens)
        assert [len(entry.top) for entry in steps[2].logprobs] == [7] * len(steps[2].tokens)
        assert [entry.logprob for entry in steps[1].logprobs] == [entry.logprob for entry in steps[2].logprobs]


# of the prompt


def finished(generator):
    """How often it paused, and what it returned."""
    pauses = 0
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return pauses, end.value
        pauses += 1


@pytest.mark.parametrize("length", [2, 63, 64, 65, 66, 150])
def test_a_prompts_logprobs_are_those_of_a_forward_without_a_cache(pair, module, length):
    prompt = [(7 + 13 * place) % 512 for place in range(length)]
    engine = Engine(pair, capacity=256, width=5, chunk=64)
    pauses, scored = finished(prompt_logprobs(engine, prompt, count=4))
    assert pauses == -(-(length - 1) // 64)  # one chunk a next()
    assert scored[0] is None
    assert [entry.token_id for entry in scored[1:]] == prompt[1:]
    for entry, law in zip(scored[1:], by_module(module, prompt), strict=False):
        held(entry, law, 4)


def test_a_prompt_of_one_token_has_nothing_to_score(pair):
    assert finished(prompt_logprobs(Engine(pair, capacity=64, width=5), [9])) == (0, [None])


def test_scoring_a_prompt_between_steps_leaves_the_rows_as_they_are(pair):
    def run(*, scores):
        engine = Engine(pair, rows=2, capacity=256, width=5, chunk=16)
        engine.insert(0, RowRequest(prompt=IDS, limit=80, draft_k=4, temperature=0.9, seed=2))
        engine.insert(1, RowRequest(prompt=[9] * 50, limit=120, draft_k=4))
        scoring = prompt_logprobs(engine, [8, 9] * 40, count=2)
        seen = []
        for _ in range(8):
            if scores:
                next(scoring, None)
            steps = engine.step()
            seen.append([steps[row].tokens for row in (0, 1)])
        return seen

    assert run(scores=True) == run(scores=False)


def test_a_prompt_id_that_is_never_emitted_has_a_number_that_json_can_write(pair):
    engine = Engine(attrs.evolve(pair, tokenizer=bare_tokenizer(400)), capacity=64, width=5)
    _, scored = finished(prompt_logprobs(engine, [3, 450, 5], count=2))
    assert scored[1].logprob == -9999.0
    assert -50 < scored[2].logprob < 0
    assert all(index < 400 for index, _ in scored[1].top)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: got 0 tokens, expected 1 to 63"),
        ([1] * 64, "prompt: got 64 tokens, expected 1 to 63"),
        ([1, 512], "prompt: got token id 512, expected 0 to 511"),
        ([-1], "prompt: got token id -1, expected 0 to 511"),
    ],
    ids=["empty", "too long", "past the vocabulary", "negative"],
)
def test_a_prompt_that_does_not_fit_is_refused_before_mlx_sees_it(pair, prompt, message):
    with pytest.raises(CapacityError, match=message):
        next(prompt_logprobs(Engine(pair, capacity=64, width=5), prompt))


def test_a_prompt_whose_logits_are_not_finite_is_an_error(plain):
    def broken(tokens, kv, position):
        logits, kv = plain.target.forward(tokens, kv, position)
        return mx.where((tokens == 13)[..., None], mx.nan, logits), kv

    engine = Engine(attrs.evolve(plain, target=attrs.evolve(plain.target, forward=broken)), capacity=64, width=1)
    with pytest.raises(NonFiniteError, match="prompt, positions 0 to 3"):
        finished(prompt_logprobs(engine, [3, 13, 5, 6, 7]))
