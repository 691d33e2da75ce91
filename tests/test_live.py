"""Attention that looks at the slots in use alone, and steps that leave out what no row needs: faster, the same bits."""

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import decode, fused_weights, make_sampling, make_state, mostly_slow, tiny_config, tiny_module, tiny_pair

from posttrainllm.adapters import engine as engine_module
from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.cpu_llama import briefly, cpu_llama_forward
from posttrainllm.adapters.loading.variants import model_from_weights
from posttrainllm.adapters.rows import RowRequest, needed_rules
from posttrainllm.adapters.shapes import live_slots
from posttrainllm.kernel.compiled import compile_forward, compile_step
from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.draft import Draft
from posttrainllm.kernel.forward import BoundedForward

DEAR = Curve(draft_ks=(0, 1, 2, 4), seconds=(1.0, 5.0, 6.0, 9.0), plain_seconds=1.0)  # tried again and again, no more


def unbounded(pair):
    """The same models, whose forwards always look at the whole capacity."""

    def plain(model):
        return attrs.evolve(model, forward=lambda tokens, kv, position: model.forward(tokens, kv, position))

    return attrs.evolve(pair, target=plain(pair.target), draft=plain(pair.draft))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "brief"), [(1, False), (2, True), (5, False), (64, False)])
def test_slots_behind_the_windows_change_no_bit(width, brief, dtype, compiled):
    """Whatever stands in them: here finite values that would win every maximum."""
    config = tiny_config()
    weights = fused_weights(tiny_module(config, seed=3, dtype=getattr(mx, dtype)), config, dtype)
    model = model_from_weights(weights, name="tiny", dtype=dtype, context=512)
    forward = cpu_llama_forward(weights)
    forward = briefly(forward) if brief else forward
    generator = np.random.default_rng(1)
    kv = tuple(
        tuple(mx.array(generator.normal(size=array.shape) * 30).astype(array.dtype) for array in layer)
        for layer in model.make_kv(2, 640)
    )
    tokens = mx.array(generator.integers(0, 4096, (2, width)), dtype=mx.int32)
    position = mx.array([123, 64], dtype=mx.int32)
    logits, written = compile_forward(forward, compiled=compiled)(tokens, kv, position)
    for live in (123 + width, 200, 256, 257, 639):
        other, also_written = compile_forward(forward.within(live), compiled=compiled)(tokens, kv, position)
        assert mx.array_equal(logits, other), live
        for layer, also in zip(written, also_written, strict=True):
            assert all(mx.array_equal(one, two) for one, two in zip(layer, also, strict=True))


# what attention looks at depends on neither the rule nor the temperature, but on how the rows come to a bucket's end
OUTGROWN = {
    f"{rule}, {kind}": (temperature, coupled, curve)
    for kind, curve in (("fixed K", None), ("K chosen", DEAR))
    for rule, temperature, coupled in (("greedy", 0.0, False), ("leviathan", 1.0, False), ("coupled", 1.0, True))
}


@pytest.mark.parametrize(
    ("temperature", "coupled", "curve"),
    mostly_slow(OUTGROWN, "greedy, fixed K", "leviathan, fixed K", "greedy, K chosen"),
)
def test_rows_that_outgrow_their_bucket_decode_as_if_there_were_none(
    embedded_pair, monkeypatch, temperature, coupled, curve
):
    """Two rows of different lengths; the longer passes 256 and then 512, by steps of 1 to 5 ids in flight.

    With one step in flight, here where it is greedy, a bucket that is 4 slots too small is found; with two it need not.
    """
    monkeypatch.setattr(engine_module, "_PIPELINED_BELOW_S", 1e9 if temperature else 0.0)
    if not isinstance(embedded_pair.target.forward, BoundedForward):
        pytest.skip("the forward in use here always looks at all slots")
    prompts = [[7 * place % 4000 + 5 for place in range(length)] for length in (243, 64)]

    def steps(pair):
        curves = None if curve is None else {"greedy": curve, "sampled": curve}
        engine = Engine(pair, rows=2, capacity=640, width=5, diagnostics=True, curves=curves)
        for row, prompt in enumerate(prompts):
            limit = len(prompt) + 290
            engine.insert(
                row,
                RowRequest(prompt=prompt, limit=limit, draft_k=4, seed=row, temperature=temperature, coupled=coupled),
            )
        seen = []
        for _ in range(285 if curve else 60 if temperature else 80):
            seen.append({row: (step.tokens, step.margins, step.window) for row, step in engine.step().items()})
        return seen

    bounded_steps, whole = steps(embedded_pair), steps(unbounded(embedded_pair))
    assert bounded_steps == whole
    assert 243 + sum(len(step[0][0]) for step in whole) > (512 if curve else 256) + 5
    if curve:  # the draft caught up again and again
        drafted = [index for index, step in enumerate(whole) if any(step[0][2][1:])]
        assert 2 < len(drafted) < len(whole) / 5


@pytest.mark.parametrize(
    ("length", "capacity", "expected"),
    [(1, 256, None), (1, 512, 256), (256, 512, 256), (257, 512, None), (257, 1280, 512), (1025, 1280, None)],
)
def test_a_bucket_holds_the_length_and_is_smaller_than_the_capacity(length, capacity, expected):
    assert live_slots(length, capacity) == expected


@pytest.mark.parametrize(("rules", "coupled"), [("leviathan", False), ("coupled", True)])
@pytest.mark.parametrize("mode", ["sampled", "filtered"])
@pytest.mark.parametrize(("drawn", "arithmetic"), [(1, True), (2, False), (3, True), (3, False)])
def test_the_rule_that_is_left_out_changes_no_row_of_the_other(rules, coupled, mode, drawn, arithmetic):
    """Rows at temperatures, one greedy, one that does not speculate; what is emitted and proposed is the same."""
    pair = tiny_pair(draft="noisy")
    draft = Draft(forward=pair.draft.forward, vocab_size=pair.draft.vocab_size, context=pair.draft.context)
    top_k = 20 if mode == "filtered" else 0
    sampling = make_sampling(4, temperature=[1.0, 0.7, 0.0, 1.3], coupled=coupled, draft_k=[3, 3, 3, 0], top_k=top_k)
    seen = {}
    for chosen in ("both", rules):
        shape = {"width": 4, "vocab_size": pair.vocab_size, "draft_k": drawn}
        config = StepConfig(mode=mode, rules=chosen, arithmetic=arithmetic, **shape)
        step = compile_step(config, pair.target.forward, draft)
        kv = [model.make_kv(4, 64) for model in (pair.target, pair.draft)]
        state = make_state([[9, 8, 7], [1], [3, 4], [2, 2]], limit=60, capacity=64, target_kv=kv[0], draft_kv=kv[1])
        seen[chosen] = []
        for _ in range(12):
            state, output = step(state, sampling)
            seen[chosen].append((output.tokens.tolist(), output.proposals.tolist(), output.accepted.tolist()))
    assert seen["both"] == seen[rules]
    accepted = [row for step in seen["both"] for row in step[2][:2]]
    assert 0 < sum(accepted) < drawn * len(accepted)  # refusals and acceptances were both seen


def test_an_engine_asks_for_the_rules_that_its_rows_have():
    def row(**options):
        return RowRequest(prompt=[1], limit=3, **options)

    assert needed_rules([None, row()]) == "both"
    assert needed_rules([row(temperature=1.0), row(), None]) == "leviathan"
    assert needed_rules([row(temperature=1.0, coupled=True), row(coupled=False)]) == "coupled"
    assert needed_rules([row(temperature=1.0), row(temperature=0.5, coupled=True)]) == "both"


def test_rows_of_both_rules_decode_together_as_they_do_alone():
    pair = tiny_pair(draft="noisy")
    options = {"temperature": 0.9, "draft_k": 3}
    alone = [
        decode(pair, [[5, 6, 7]], width=4, count=24, seeds=[seed], coupled=coupled, engine=None, **options)[0]
        for seed, coupled in ((0, False), (1, True))
    ]
    engine = Engine(pair, rows=2, capacity=256, width=4)
    for row, coupled in ((0, False), (1, True)):
        engine.insert(row, RowRequest(prompt=[5, 6, 7], limit=27, seed=row, coupled=coupled, **options))
    together = [[], []]
    while any(len(ids) < 24 for ids in together):
        for row, step in engine.step().items():
            together[row].extend(step.tokens)
    assert together == alone
