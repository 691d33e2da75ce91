import json

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import bare_tokenizer, table_pair, tiny_pair, without_draft

from posttrainllm.adapters.facade import stream
from posttrainllm.adapters.generation import Generation
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.kernel.errors import CapacityError, NonFiniteError, UsageError

PROMPT = [4, 5, 6, 7]


def run(pair, prompt=PROMPT, *, draft_k=4, plain_width=1, **options):
    generation = Generation(pair, prompt, SamplingParams(**options), draft_k=draft_k, plain_width=plain_width)
    chunks = list(generation)
    return generation.result(), chunks


def with_eos(pair, *eos):
    return attrs.evolve(pair, tokenizer=bare_tokenizer(pair.tokenizer.size, eos))


@pytest.fixture(scope="module")
def self_draft():
    """Everything is accepted, so every step emits whole blocks."""
    return table_pair()


@pytest.mark.parametrize("place", [3, 5, 6, 7, 9])
def test_an_eos_inside_an_accepted_block_ends_text_and_counts(self_draft, place):
    """Case: text and counters run past an EOS that was accepted with what follows it."""
    free, _ = run(self_draft, max_tokens=40)
    eos = free.token_ids[place]
    first = free.token_ids.index(eos)
    result, chunks = run(with_eos(self_draft, eos), max_tokens=40)
    assert result.token_ids == free.token_ids[: first + 1]
    assert result.finish_reason == "stop"
    assert result.usage.completion_tokens == first + 1
    assert result.usage.draft_accepted <= result.usage.draft_proposed <= first + 1
    assert chr(0x100 + eos) not in result.text
    assert result.text == "".join(chunk.text for chunk in chunks)
    assert sum(len(chunk.token_ids) for chunk in chunks) == first + 1
    plain, _ = run(without_draft(with_eos(self_draft, eos)), max_tokens=40, plain_width=5)
    assert plain.token_ids == result.token_ids


def test_accepted_ids_behind_the_end_are_not_counted(self_draft):
    free, _ = run(self_draft, max_tokens=11)
    # steps of five: the third is cut to one id by the limit
    assert free.usage.draft_accepted == 4 + 4 + 1
    assert free.usage.draft_proposed == 4 + 4 + 1
    assert free.usage.accept_rate == 1.0


def test_any_of_several_eos_ids_ends_the_text(self_draft):
    """Case: only the first EOS id is honoured."""
    free, _ = run(self_draft, max_tokens=40)
    late, early = free.token_ids[12], free.token_ids[4]
    result, _ = run(with_eos(self_draft, late, early), max_tokens=40)
    assert result.token_ids[-1] in (late, early)
    assert len(result.token_ids) <= 5


def test_ignore_eos_goes_on(self_draft):
    free, _ = run(self_draft, max_tokens=40)
    result, _ = run(with_eos(self_draft, free.token_ids[4]), max_tokens=40, ignore_eos=True)
    assert result.token_ids == free.token_ids


@pytest.mark.parametrize("place", [1, 4, 7])
def test_a_stop_string_that_spans_ids_ends_the_text_before_it(self_draft, place):
    free, _ = run(self_draft, max_tokens=40)
    stop = free.text[place : place + 3]
    at = free.text.index(stop)
    result, chunks = run(self_draft, max_tokens=40, stop=(stop,))
    assert result.text == free.text[:at]
    assert result.finish_reason == "stop"
    assert result.usage.completion_tokens == at + 3  # the ids that complete the stop string are counted
    assert "".join(chunk.text for chunk in chunks) == result.text


def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(self_draft):
    free, _ = run(self_draft, max_tokens=10)
    result, _ = run(self_draft, max_tokens=10, stop=(free.text[-1] + "\u4e00",))
    assert result.text == free.text
    assert result.finish_reason == "length"


@pytest.mark.parametrize("draft", ["same", "noisy", "random"])
def test_counts_are_consistent(draft):
    for options in ({}, {"temperature": 1.0, "seed": 1}):
        result, chunks = run(tiny_pair(draft=draft), max_tokens=33, **options)
        usage = result.usage
        assert usage.completion_tokens == len(result.token_ids) == 33
        assert usage.total_tokens == usage.prompt_tokens + 33
        assert 0 <= usage.draft_accepted <= usage.draft_proposed
        assert usage.draft_accepted <= usage.completion_tokens
        assert result.timings.steps == len(chunks)
        # every step adds one id to those it accepted, but for the last, which the limit may cut
        assert usage.draft_accepted + result.timings.steps - usage.completion_tokens in (0, 1)


def test_without_a_draft_nothing_is_proposed_and_the_rate_is_null(self_draft):
    result, _ = run(without_draft(self_draft), max_tokens=5)
    assert result.usage.accept_rate is None
    assert result.usage.draft_proposed == 0
    assert result.speculative == {"enabled": False, "reason": "test"}
    assert result.draft_k is None


@pytest.mark.parametrize("draft_k", [1, 8])
def test_decoding_reaches_the_last_position_of_the_context(draft_k):
    """Case: the look-ahead runs past the context window."""
    pair = tiny_pair(draft="noisy", context=64)
    result, _ = run(pair, [5] * 60, draft_k=draft_k, max_tokens=10**9)
    assert result.usage.completion_tokens == 4
    assert result.finish_reason == "length"
    reference, _ = run(without_draft(pair), [5] * 60, plain_width=draft_k + 1, max_tokens=1000)
    assert reference.token_ids == result.token_ids


def test_a_draft_with_half_the_context_leaves_the_text_unchanged():
    pair = tiny_pair(draft="noisy", context=64)
    short = attrs.evolve(pair, draft=attrs.evolve(pair.draft, context=32))
    result, _ = run(short, [5] * 20, max_tokens=1000)
    reference, _ = run(without_draft(pair), [5] * 20, plain_width=5, max_tokens=1000)
    assert result.token_ids == reference.token_ids
    assert result.usage.total_tokens == 64
    full, _ = run(pair, [5] * 20, max_tokens=1000)
    assert result.usage.draft_proposed < full.usage.draft_proposed


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(length):
    with pytest.raises(CapacityError, match=f"got {length} tokens, expected fewer than the context of 64"):
        run(tiny_pair(context=64), [5] * length)


def test_a_prompt_of_one_token_works(self_draft):
    result, _ = run(self_draft, [9], max_tokens=12)
    reference, _ = run(without_draft(self_draft), [9], plain_width=5, max_tokens=12)
    assert result.token_ids == reference.token_ids


@pytest.mark.parametrize("bad", [-1, 512, 10**9])
def test_an_id_outside_the_vocabulary_is_refused_before_mlx_sees_it(self_draft, bad):
    with pytest.raises(CapacityError, match=f"got token id {bad}, expected 0 to 511"):
        run(self_draft, [1, bad, 2])


def test_an_empty_prompt_is_refused(self_draft):
    with pytest.raises(CapacityError, match="prompt: got no token"):
        run(self_draft, [])


def test_logits_that_are_not_finite_stop_the_run_and_name_the_step(self_draft):
    calls = []

    def forward(tokens, kv, position):
        logits, kv = self_draft.target.forward(tokens, kv, position)
        calls.append(1)
        return mx.where((position >= 8)[:, None, None], float("nan"), logits), kv

    broken = attrs.evolve(self_draft, target=attrs.evolve(self_draft.target, forward=forward))
    with pytest.raises(NonFiniteError, match=r"step \d, position \d+: the target's logits are not finite"):
        run(broken, max_tokens=40)


def test_cancelling_returns_what_was_decoded(self_draft):
    generation = Generation(self_draft, PROMPT, SamplingParams(max_tokens=40))
    chunks = iter(generation)
    first = next(chunks)
    last = generation.cancel()
    result = generation.result()
    assert result.finish_reason == last.finish_reason == "cancelled"
    assert result.token_ids == first.token_ids
    assert result.text == first.text + last.text


def test_the_same_seed_gives_the_same_text_and_another_seed_another(self_draft):
    options = {"temperature": 1.5, "max_tokens": 24}
    texts = [run(self_draft, seed=seed, **options)[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_two_runs_differ_and_report_theirs(self_draft):
    # 24 draws at T=1.5 from hundreds of ids: equal by chance with probability far below 1e-12
    first, second = (run(self_draft, temperature=1.5, max_tokens=24)[0] for _ in range(2))
    assert first.seed != second.seed
    assert first.text != second.text
    assert run(self_draft, temperature=1.5, max_tokens=24, seed=first.seed)[0].text == first.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max-tokens: got 0, expected 1 or more"),
        ({"temperature": -0.1}, "temperature: got -0.1"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": float("inf")}, "temperature: got inf"),
        ({"top_p": 2.0}, "top-p: got 2.0"),
        ({"top_p": 0.0}, "top-p: got 0.0"),
        ({"top_k": -1}, "top-k: got -1"),
        ({"top_k": 2**40}, "top-k: got"),
        ({"min_p": 1.5}, "min-p: got 1.5"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 2**70}, "seed: got"),
        ({"stop": ("",)}, "stop: got"),
        ({"stop": 5}, "stop: got 5"),
        ({"stop": ["a", 1]}, "stop: got"),
        ({"max_tokens": "4"}, "max-tokens: got '4'"),
        ({"max_tokens": 4.0}, "max-tokens: got 4.0"),
        ({"max_tokens": True}, "max-tokens: got True"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"temperature": 1e-40}, "temperature: got 1e-40"),
        ({"top_k": 2.5}, "top-k: got 2.5"),
        ({"ignore_eos": 1}, "ignore-eos: got 1"),
        ({"accept_rule": "typical"}, "accept-rule: got 'typical'"),
    ],
)
def test_a_bad_option_is_refused_with_got_and_expected(options, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("draft_k", [0, 33, 1000])
def test_a_draft_length_out_of_range_is_refused(self_draft, draft_k):
    with pytest.raises(UsageError, match=f"draft-k: got {draft_k}, expected 1 to 32"):
        run(self_draft, draft_k=draft_k)


@pytest.mark.parametrize("prompt", [None, 7, [5.7, 6.2], ["a"], [1, None]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(self_draft, prompt):
    with pytest.raises(UsageError, match="prompt: got"):
        run(self_draft, prompt)


def test_a_text_alone_is_one_stop(self_draft):
    free, _ = run(self_draft, max_tokens=20)
    stop = free.text[4:6]
    assert run(self_draft, max_tokens=20, stop=stop)[0].text == free.text[: free.text.index(stop)]
    assert SamplingParams(stop=None).stop == ()


def test_a_generation_that_is_left_and_taken_up_again_goes_on(self_draft):
    generation = Generation(self_draft, PROMPT, SamplingParams(max_tokens=33))
    for _ in generation:
        break
    for _ in generation:
        pass
    assert list(generation) == []
    assert generation.result().token_ids == run(self_draft, max_tokens=33)[0].token_ids


@pytest.mark.parametrize("rule", ["leviathan", "coupled"])
def test_the_smallest_top_p_and_temperature_still_draw_the_likeliest_id(self_draft, rule):
    greedy, _ = run(self_draft, max_tokens=12)
    for options in ({"temperature": 1.0, "top_p": 1e-46}, {"temperature": 1e-4}):
        assert run(self_draft, max_tokens=12, accept_rule=rule, seed=1, **options)[0].token_ids == greedy.token_ids


def test_the_text_and_the_counts_survive_ctrl_c_between_steps(self_draft):
    generation = Generation(self_draft, PROMPT, SamplingParams(max_tokens=40))
    chunks = iter(generation)
    kept = [next(chunks), next(chunks)]
    generation.cancel()
    assert generation.cancel().text == ""
    assert generation.result().usage.completion_tokens == sum(len(chunk.token_ids) for chunk in kept)


def test_numbers_of_numpy_are_numbers(self_draft):
    options = {"max_tokens": np.int64(6), "temperature": np.float32(0.5), "top_k": np.int32(20), "seed": np.uint64(3)}
    result, _ = run(self_draft, np.array(PROMPT), draft_k=np.int64(4), **options)
    json.dumps(result.to_dict())
    assert len(result.token_ids) == 6


@pytest.mark.parametrize("prompt", ["", "\ud800", b"abc", [True, False]])
def test_a_prompt_that_is_no_text_is_refused(self_draft, prompt):
    with pytest.raises(UsageError, match="prompt: got"):
        run(self_draft, prompt)


@pytest.mark.parametrize("pair", [None, 5, "x"])
def test_a_pair_that_is_none_is_refused_at_once(pair):
    with pytest.raises(UsageError, match="pair: got"):
        stream(pair=pair, prompt="x")
