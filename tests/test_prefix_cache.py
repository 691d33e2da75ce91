"""Prompts that begin alike: what is used again has the bits of what is computed, and takes no more than allowed."""

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import (
    bare_tokenizer,
    fused_weights,
    tiny_config,
    tiny_model,
    tiny_module,
    tiny_pair,
    without_draft,
)

from posttrainllm.adapters import prefix_cache as module
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.cuda_llama import one_buffer, plain_llama_forward
from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.loading.module import Model, model_from_module
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.prefix_cache import PrefixCache
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.runtime import start
from posttrainllm.kernel.cache import attention_mask, write_at
from posttrainllm.kernel.chunks import cut_chunk, join_chunks
from posttrainllm.kernel.errors import MemoryLimitError

CHUNK, CAPACITY, WIDTH = 16, 256, 4
ROOMY = 2**24
PROMPT = tuple(np.random.default_rng(3).integers(1, 500, 50).tolist())
NEIGHBOURS = ((9,) * 40, tuple(range(100, 133)))
WAYS = {
    "greedy": {},
    "leviathan": {"temperature": 0.9, "seed": 5},
    "coupled": {"temperature": 0.9, "seed": 5, "coupled": True},
}


@pytest.fixture(scope="module", params=["drafted", "plain"])
def pair(request):
    pair = tiny_pair(draft="noisy", context=20000)
    return pair if request.param == "drafted" else without_draft(pair)


@pytest.fixture(scope="module")
def drafted():
    return tiny_pair(draft="noisy", context=20000)


def engine_of(pair, *, prefix_bytes=ROOMY, rows=1, width=WIDTH, capacity=CAPACITY):
    return Engine(pair, rows=rows, capacity=capacity, width=width, chunk=CHUNK, prefix_bytes=prefix_bytes)


def request_of(pair, prompt, count=24, **options):
    draft_k = WIDTH - 1 if pair.draft is not None else 0
    return RowRequest(prompt=tuple(prompt), limit=len(prompt) + count, draft_k=draft_k, **options)


def prefilled(engine, request, *, chunks=None):
    """A prompt, read to its end or some chunks far."""
    prefill = engine.prefill(request)
    while not prefill.done and chunks != 0:
        prefill.advance()
        chunks = None if chunks is None else chunks - 1
    return prefill


def replies(engine, requests):
    """Ids of each request, decoded in rows beside each other, and how much of each prompt was kept before."""
    prefills = []
    for row, request in enumerate(requests):
        prefills.append(prefilled(engine, request))
        engine.place(row, prefills[-1])
    ids = [[] for _ in requests]
    while any(len(row) < request.limit - len(request.prompt) for row, request in zip(ids, requests, strict=True)):
        for row, step in engine.step().items():
            ids[row].extend(step.tokens)
    for row in range(len(requests)):
        engine.release(row)
    return ids, [prefill.cached for prefill in prefills]


def bits(prefill):
    """Every array of a row that a prompt was read into."""
    state = prefill.state()
    arrays = [state.tokens, state.length, state.limit, state.key]
    arrays += [part for kv in (state.target_kv, state.draft_kv) for layer in kv for part in layer]
    return [np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).tobytes() for array in arrays]


def other_cache_pair(kind):
    """Models whose caches are one buffer for all layers, as the CUDA kernel's are, or of other forwards or bits."""
    if kind == "bfloat16":
        return tiny_pair(dtype=kind, draft="noisy")

    def model(layers, seed):
        config = tiny_config(layers=layers, vocab=512)
        module = tiny_module(config, seed=seed)
        if kind == "module":
            return model_from_module(module, name="module", dtype="float32", context=512)
        weights = fused_weights(module, config)
        made = tiny_model(module, config, name="buffer", dtype="float32", context=512)
        return attrs.evolve(
            made, forward=plain_llama_forward(weights), kv_shapes=one_buffer(weights.shape), copies_cache=True
        )

    tokenizer = bare_tokenizer(512)
    return Pair(target=model(2, 1), draft=model(1, 2), tokenizer=tokenizer, runtime=start(), reason=None)


def width_bound_pair():
    """A model whose every key and value says how wide the window was that wrote it, and whose logits show it.

    So a reply that was decoded is not what prefill would have written, as it is with the roundings of real hardware.
    """

    def forward(tokens, kv, position):
        ((keys, values),) = kv
        written = (tokens + 0.125 * tokens.shape[1]).astype(mx.float32)[:, None, :, None]  # [B, 1, W, 1]
        keys, values = write_at(keys, written, position), write_at(values, written, position)
        seen = attention_mask(position, tokens.shape[1], keys.shape[2])[:, 0]  # [B, W, C]
        total = mx.sum(mx.where(seen, keys[:, 0, None, :, 0], 0.0), axis=-1, keepdims=True)  # [B, W, 1]
        return mx.sin(total * mx.arange(1, 65)), ((keys, values),)

    model = Model(
        forward=forward,
        name="width",
        dtype="float32",
        vocab_size=64,
        context=512,
        kv_shapes=((1, 1, 1),),
        kv_dtype=mx.float32,
    )
    return Pair(target=model, draft=None, tokenizer=bare_tokenizer(64), runtime=start(), reason="test")


# the same bits


@pytest.mark.parametrize("way", WAYS)
def test_a_reply_is_the_same_with_and_without_a_hit_alone_and_among_neighbours(pair, way):
    def turns(engine):
        """A first turn; a second one behind the first reply; the first again; and it beside others."""
        first = request_of(pair, PROMPT, **WAYS[way])
        (reply,), known = replies(engine, [first])
        second = request_of(pair, (*PROMPT, *reply, 7, 8, 9), **WAYS[way])
        told = [reply]
        for requests in ([second], [first]):
            ids, cached = replies(engine, requests)
            told, known = told + ids, known + cached
        others = [request_of(pair, prompt, **WAYS["leviathan"]) for prompt in NEIGHBOURS]
        ids, cached = replies(engine, [others[0], second, others[1]])
        return told + ids, known + cached

    told, known = turns(engine_of(pair, rows=3))
    expected, none = turns(engine_of(pair, rows=3, prefix_bytes=0))
    assert told == expected
    assert none == [0] * 6
    # 50 ids are three whole chunks; the second turn has them of the first one, its own only when it is asked again
    assert known == [0, 48, 48, 0, 64, 0]


@pytest.mark.parametrize("length", range(3 * CHUNK - 1, 3 * CHUNK + 3))
def test_a_row_has_the_same_bits_with_and_without_a_hit_wherever_the_prompt_ends(drafted, length):
    engine = engine_of(drafted)
    prefilled(engine, request_of(drafted, PROMPT))
    hit = prefilled(engine, request_of(drafted, PROMPT[:length]))
    # the last id is fed by the first step, so n chunks hold a prompt of n * P + 1 ids, and one of n * P lacks a slot
    assert hit.cached == (length - 1) // CHUNK * CHUNK
    assert bits(hit) == bits(prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, PROMPT[:length])))


@pytest.mark.parametrize("kind", ["one buffer", "module", "bfloat16"])
def test_other_caches_are_put_back_alike(kind):
    pair = other_cache_pair(kind)
    engine, plain = engine_of(pair), engine_of(pair, prefix_bytes=0)
    prefilled(engine, request_of(pair, PROMPT))
    longer = (*PROMPT[:40], *NEIGHBOURS[1])
    assert prefilled(engine, request_of(pair, longer)).cached == 32
    assert bits(prefilled(engine, request_of(pair, longer))) == bits(prefilled(plain, request_of(pair, longer)))
    request = request_of(pair, longer, **WAYS["leviathan"])
    assert replies(engine, [request])[0] == replies(plain, [request])[0]


def test_a_prompt_shorter_than_what_is_kept_takes_its_own_part(drafted):
    engine = engine_of(drafted)
    prefilled(engine, request_of(drafted, PROMPT))
    hit = prefilled(engine, request_of(drafted, PROMPT[:20]))
    assert hit.cached == CHUNK
    assert bits(hit) == bits(prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, PROMPT[:20])))


def test_a_chunk_behind_another_beginning_is_another_chunk_though_both_are_kept(drafted):
    engine = engine_of(drafted)
    beginning, behind = PROMPT[CHUNK : 2 * CHUNK], PROMPT[CHUNK:]
    prefilled(engine, request_of(drafted, PROMPT))
    prefilled(engine, request_of(drafted, (*beginning, *NEIGHBOURS[0])))
    other = prefilled(engine, request_of(drafted, (*beginning, *behind)))
    assert other.cached == CHUNK
    assert bits(other) == bits(prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, beginning + behind)))


def test_a_reply_that_was_decoded_is_read_again_and_so_has_the_bits_of_prefill():
    pair = width_bound_pair()
    engines = [engine_of(pair, prefix_bytes=size) for size in (ROOMY, 0)]
    prompt = tuple(range(1, 36))
    told, known = [], []
    for engine in engines:
        (reply,), _ = replies(engine, [request_of(pair, prompt, count=30)])
        again, cached = replies(engine, [request_of(pair, (*prompt, *reply, 3, 4))])
        told.append((reply, again))
        known += cached
    assert told[0] == told[1]
    assert known == [2 * CHUNK, 0]  # whole chunks of the prompt, nothing more


def test_two_chunks_that_hash_alike_are_told_apart_by_their_ids(drafted, monkeypatch):
    monkeypatch.setattr(module._Key, "__hash__", lambda self: 1)
    engine = engine_of(drafted)
    prefilled(engine, request_of(drafted, PROMPT))
    other = prefilled(engine, request_of(drafted, PROMPT[::-1]))
    assert other.cached == 0
    assert bits(other) == bits(prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, PROMPT[::-1])))
    assert prefilled(engine, request_of(drafted, PROMPT)).cached == 3 * CHUNK


def test_ids_that_the_draft_lacks_are_told_apart():
    """The draft is fed its last id for all of them, the target is not."""
    pair = tiny_pair(vocab=512, draft_vocab=256)
    engine = engine_of(pair)
    prefilled(engine, request_of(pair, [300] * 20))
    other = prefilled(engine, request_of(pair, [301] * 20))
    assert other.cached == 0
    assert bits(other) == bits(prefilled(engine_of(pair, prefix_bytes=0), request_of(pair, [301] * 20)))


def test_a_row_that_speculates_uses_what_one_left_that_does_not(drafted):
    engine = engine_of(drafted)
    quiet = attrs.evolve(request_of(drafted, PROMPT), draft_k=0)
    expected, _ = replies(engine_of(drafted, prefix_bytes=0), [request_of(drafted, PROMPT)])
    assert replies(engine, [quiet])[0] == expected
    assert replies(engine, [request_of(drafted, PROMPT)]) == (expected, [3 * CHUNK])


# cut short, and at once


@pytest.mark.parametrize(("advances", "kept"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 2)])
def test_a_prompt_that_is_given_up_leaves_whole_chunks_of_both_models_or_none(drafted, advances, kept):
    engine = engine_of(drafted)
    prefilled(engine, request_of(drafted, PROMPT), chunks=advances)
    assert len(engine.prefixes) == kept
    again = prefilled(engine, request_of(drafted, PROMPT))
    assert again.cached == kept * CHUNK
    assert bits(again) == bits(prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, PROMPT)))


def test_two_prompts_read_at_once_keep_one_chunk_each_and_disturb_nobody(drafted):
    engine = engine_of(drafted)
    pair_of_them = [engine.prefill(request_of(drafted, PROMPT)) for _ in range(2)]
    while not all(prefill.done for prefill in pair_of_them):
        for prefill in pair_of_them:
            prefill.advance()
    assert len(engine.prefixes) == 3
    expected = bits(prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, PROMPT)))
    assert [bits(prefill) for prefill in pair_of_them] == [expected] * 2


def test_what_is_dropped_while_a_prompt_is_read_costs_it_nothing(drafted):
    engine = engine_of(drafted)
    prefilled(engine, request_of(drafted, PROMPT))
    hit = engine.prefill(request_of(drafted, (*PROMPT, *PROMPT)))
    engine.prefixes.clear()
    while not hit.done:
        hit.advance()
    assert (hit.cached, len(engine.prefixes)) == (48, 0)  # nothing that could not be found
    expected = prefilled(engine_of(drafted, prefix_bytes=0), request_of(drafted, (*PROMPT, *PROMPT)))
    assert bits(hit) == bits(expected)


# memory


def chunk_of(size=100):
    return (((mx.zeros((1, 1, size, 1)), mx.zeros((1, 1, size, 1))),),)


def filled(limit_chunks, *, size=100):
    """A cache with room for so many chunks of four ids, and the bytes of one."""
    one = PrefixCache(limit=2**20, chunk=4)
    one.keep(module.Prefix(), (1, 2, 3, 4), chunk_of(size))
    return PrefixCache(limit=limit_chunks * one.used, chunk=4), one.used


def keep_all(cache, prompt, size=100):
    prefix, _ = cache.find(prompt)
    for place in range(4 * len(prefix.keys), len(prompt) - 4, 4):
        prefix = cache.keep(prefix, prompt[place : place + 4], chunk_of(size))
        assert cache.used <= cache.limit
    return prefix


def known(cache, prompt):
    return len(cache.find(prompt)[1])


def test_the_least_recently_used_chunks_are_dropped_and_the_bytes_never_pass_the_limit():
    cache, size = filled(4)
    a, b, c = ((first,) * 9 for first in (1, 2, 3))
    keep_all(cache, a)
    keep_all(cache, b)
    assert (cache.used, len(cache)) == (4 * size, 4)
    assert known(cache, a) == 2  # case: and so b is the older one
    keep_all(cache, c)
    assert [known(cache, prompt) for prompt in (a, b, c)] == [2, 0, 2]
    assert (cache.used, cache.evicted) == (4 * size, 2)


def test_of_a_prompt_the_last_chunk_is_dropped_first():
    cache, _ = filled(4)
    keep_all(cache, (1,) * 17)
    keep_all(cache, (2,) * 5)
    assert [known(cache, (first,) * 17) for first in (1, 2)] == [3, 1]


def test_a_prompt_that_does_not_fit_keeps_its_beginning_and_drops_others_for_no_more():
    cache, size = filled(3)
    keep_all(cache, (2,) * 5)
    prefix = keep_all(cache, (1,) * 40)
    assert known(cache, (1,) * 40) == 3
    assert prefix.last is None
    assert cache.used == 3 * size
    keep_all(cache, (3,) * 5)  # it goes on taking others
    assert [known(cache, (first,) * 40) for first in (1, 3)] == [2, 1]


def test_a_chunk_larger_than_the_whole_limit_is_not_kept_and_drops_nothing():
    cache, size = filled(2)
    keep_all(cache, (1,) * 5)
    keep_all(cache, (2,) * 5, size=100_000)
    assert (len(cache), cache.used) == (1, size)


def test_chunks_of_models_that_keep_nothing_are_bounded_too():
    cache = PrefixCache(limit=5000, chunk=4)
    for first in range(100):
        keep_all(cache, (first,) * 5, size=0)
    assert 0 < len(cache) < 10


def test_a_chunk_behind_one_that_came_anew_meanwhile_is_not_kept():
    """It would be found by nobody: the chunk before it has another serial now."""
    cache, _ = filled(4)
    first = cache.keep(module.Prefix(), (1,) * 4, chunk_of())
    cache.clear()
    cache.keep(module.Prefix(), (1,) * 4, chunk_of())
    assert cache.keep(first, (2,) * 4, chunk_of()).last is None
    assert len(cache) == 1


@pytest.mark.parametrize("heads", [1, 2])
def test_a_chunk_holds_its_own_bytes_and_not_the_cache_that_it_was_cut_from(heads):
    kv = ((mx.random.normal((1, heads, 4096, 64), key=mx.random.key(0)), mx.zeros((1, 2, 4096, 0))),)
    mx.eval(kv)
    before = mx.get_active_memory()
    cut = cut_chunk(kv, 32, 16)
    mx.eval(cut)
    assert mx.array_equal(cut[0][0], kv[0][0][:, :, 32:48])
    assert cut[0][1].shape == (1, 2, 16, 0)
    own = heads * 16 * 64 * 4
    assert mx.get_active_memory() - before < 2 * own + 4096
    del kv
    assert mx.get_active_memory() < before - 4096 * 64 * 4 * heads + 2 * own + 4096


def test_chunks_are_put_back_where_they_were_and_nothing_else_is_changed():
    """One buffer of all layers, as a kernel of ours keeps it, with no values beside it."""
    kv = ((mx.random.normal((1, 6, 64, 8), key=mx.random.key(0)), mx.zeros((1, 6, 64, 0))),)
    empty = ((mx.zeros((1, 6, 64, 8)), mx.zeros((1, 6, 64, 0))),)
    assert join_chunks([], empty) is empty
    ((joined, nothing),) = join_chunks([cut_chunk(kv, 0, 16), cut_chunk(kv, 16, 16)], empty)
    assert mx.array_equal(joined[:, :, :32], kv[0][0][:, :, :32])
    assert not mx.any(joined[:, :, 32:])
    assert nothing.shape == (1, 6, 64, 0)


def test_keeping_chunks_makes_no_step_and_no_prefill_copy_a_cache(drafted):
    capacity, long = 16384, PROMPT * 4
    kv_bytes = sum(model.kv_bytes(capacity) for model in (drafted.target, drafted.draft))
    engine = engine_of(drafted, capacity=capacity)
    prefilled(engine, request_of(drafted, PROMPT))  # compiled, and three chunks kept
    prefill = engine.prefill(request_of(drafted, long))
    assert prefill.cached == 48
    prefill.advance()
    prefill.advance()  # from here on every cache has been written
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    while not prefill.done:
        prefill.advance()
    assert mx.get_peak_memory() - before < 0.3 * kv_bytes
    engine.place(0, prefill)
    engine.step()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(4):
        engine.step()
    assert mx.get_peak_memory() - before < 0.6 * kv_bytes


def test_the_forecast_counts_what_may_be_kept(drafted):
    plain = engine_of(drafted, prefix_bytes=0)
    assert plain.prefixes is None
    engine = engine_of(drafted, prefix_bytes=12345)
    assert engine.prefixes.limit == engine.forecast.prefixes == 12345
    assert "prompts kept: at most 0.000 GB" in engine.forecast.description
    with pytest.raises(MemoryLimitError, match="of prompts that are kept"):
        engine_of(drafted, prefix_bytes=2**60)


@pytest.mark.parametrize(("free", "spare"), [(None, 2**30), (10**12, 2**30), (10**9, (10**9 - 4000) // 4), (10, 0)])
def test_where_nobody_says_a_quarter_of_what_is_left_is_kept_and_a_gibibyte_at_most(free, spare):
    assert Forecast(weights=(1,), kv=(1000,), rows=3, capacity=8, free=free).spare == spare
    assert engine_of(tiny_pair(), prefix_bytes=None).prefixes.limit <= 2**30


def test_an_engine_that_gives_its_state_away_keeps_no_prompt(drafted):
    engine = engine_of(drafted)
    prefilled(engine, request_of(drafted, PROMPT))
    engine.hand_over()
    assert (len(engine.prefixes), engine.prefixes.used) == (0, 0)
