"""Random weights of a shape, and drafts whose proposals stand as often as asked."""

import json
import math

import attrs
import mlx.core as mx
import numpy as np
import pytest
from support import tiny_pair

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.evals.bench import shape_writer
from posttrainllm.evals.bench.contenders import MlxLm, Ours
from posttrainllm.evals.bench.measure import outputs, references
from posttrainllm.evals.bench.shape_writer import write_shape
from posttrainllm.evals.bench.shapes import SHAPES, parse_shapes
from posttrainllm.evals.bench.simulated import Script, expected_accepted, scripted, wanted_ids
from posttrainllm.kernel.errors import UsageError
from posttrainllm.kernel.forward import BoundedForward, bounded

COUNT = 40
K = 4
PROMPTS = [[index, 7, index + 100] for index in range(3, 11)]


@pytest.fixture(scope="module")
def pair():
    """A target whose text wanders, and a draft that knows nothing of it."""
    return tiny_pair(draft="random")


def steps_of(coins, count, draft_k):
    """(proposed, accepted) of every step that decodes `count` ids, told from the coins alone."""
    steps, done = [], 0
    while done < count:
        proposed = min(draft_k, count - done)
        accepted = 0
        while accepted < proposed and coins[done + accepted]:
            accepted += 1
        steps.append((proposed, accepted))
        done += min(accepted + 1, count - done)
    return steps


def coins_of(script, prompt, text):
    """For each id of a text whether the script proposes it."""
    script.turn_to(prompt)
    wanted = script.current(len(prompt) + len(text))
    return [wanted[len(prompt) - 1 + index] == right for index, right in enumerate(text)]


def test_the_shapes_are_of_the_stated_sizes():
    sizes = {name: sum(map(math.prod, shape.tensors().values())) for name, shape in SHAPES.items()}
    assert round(sizes["mega"] / 1e9, 2) == 0.96
    assert round(sizes["tiny"] / 1e6) == 8
    assert SHAPES["tiny-shallow"].layers == 2


def test_a_shape_loads_like_any_other_checkpoint_in_several_files_too(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_writer, "_SHARD_BYTES", 300_000)
    path = write_shape(SHAPES["toy"], tmp_path / "toy", seed=1)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert set(index["weight_map"]) == set(SHAPES["toy"].tensors())
    stored = {
        name: tuple(array.shape) for file in path.glob("*.safetensors") for name, array in mx.load(str(file)).items()
    }
    assert stored == SHAPES["toy"].tensors()
    pair = load_pair(path, path, dtype="bfloat16")
    assert pair.vocab_size == SHAPES["toy"].vocab_size
    assert pair.target.weight_bytes == index["metadata"]["total_size"]
    # it repeats its last token, so that rounding leads nobody astray
    assert references(pair, 0, [[3, 4], [5, 6]], 6, 256) == [[4] * 6, [6] * 6]


def test_the_tokenizer_of_a_shape_knows_every_id_and_pairs_with_another_seed(tmp_path):
    shape = attrs.evolve(SHAPES["toy"], vocab_size=5000)
    target, draft = (write_shape(shape, tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b")))
    pair = load_pair(target, draft)
    assert pair.vocab_size == pair.tokenizer.size == 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("giga+tiny", "--shapes: got 'giga+tiny', expected one or two of mega, tiny"),
        ("toy+toy+toy", "--shapes: got 'toy+toy+toy'"),
        ("", "--shapes: got ''"),
        ("mega+toy", "--shapes: got vocabularies of 16384 and 4096"),
    ],
)
def test_shapes_that_are_none_are_refused_in_one_line(text, message):
    with pytest.raises(UsageError, match=message.replace("+", r"\+")):
        parse_shapes(text)


def test_wanted_ids_are_the_texts_own_where_the_coin_says_so_and_others_elsewhere():
    assert wanted_ids(3, [5, 9, 7], [True, False, True], 10).tolist() == [-1, -1, 5, 0, 7]


@pytest.mark.parametrize("make", ["ours", "mlx-lm"])
def test_a_draft_proposes_what_the_coins_say_and_nothing_else(pair, make):
    script = Script(0.7, pair.vocab_size)
    if make == "ours":
        contender = Ours(pair, width=K + 1, capacity=256, script=script)
        texts = references(pair, K, PROMPTS, COUNT, 256)
    else:
        contender = MlxLm(pair.target.module, pair.draft.module, draft_k=K, script=script)
        texts = outputs(MlxLm(pair.target.module), PROMPTS, COUNT)
    assert len(set(texts[0])) > 5
    script.learn(PROMPTS, texts)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        contender.begin(prompt, COUNT)
        contender.finish()
        assert contender.ids == text
        assert contender.steps == steps_of(coins_of(script, prompt, text), COUNT, K)


def test_the_simulated_rate_is_the_one_asked_for():
    """False alarm: 7e-6 for the share of coins, as if its seeds were fresh; the mean a step follows from it."""
    for rate in (0.5, 0.8):
        script, text = Script(rate, 512), list(range(500))
        prompts = [[index] for index in range(20)]
        script.learn(prompts, [text] * len(prompts))
        coins = [coins_of(script, prompt, text) for prompt in prompts]
        total = 20 * 500
        assert abs(np.sum(coins) - total * rate) < 4.5 * math.sqrt(total * rate * (1 - rate))
        steps = [step for of_prompt in coins for step in steps_of(of_prompt, 500, K) if step[0] == K]
        mean = sum(accepted for _, accepted in steps) / len(steps)
        assert mean == pytest.approx(expected_accepted(rate, K), abs=4.5 * K / 2 / math.sqrt(len(steps)))


def test_expected_accepted_is_the_sum_of_the_chances_to_get_that_far():
    assert expected_accepted(0.8, 4) == pytest.approx((0.8 - 0.8**5) / 0.2)
    assert expected_accepted(1.0, 4) == 4
    assert expected_accepted(0.0, 4) == 0


def test_a_prompt_that_was_not_learned_is_drafted_freely(pair):
    script = Script(0.0, pair.vocab_size)
    free, simulated = (Ours(pair, width=K + 1, capacity=256, script=one) for one in (None, script))
    for contender in (free, simulated):
        contender.begin([3, 4, 5], COUNT)
        contender.finish()
    assert simulated.ids == free.ids
    assert simulated.steps == free.steps


def test_every_row_follows_the_script_of_its_own_prompt(pair):
    script = Script(0.7, pair.vocab_size)
    texts = references(pair, K, PROMPTS, COUNT, 256)
    script.learn(PROMPTS, texts)
    contender = Ours(pair, width=K + 1, capacity=256, script=script)
    engine = Engine(contender.pair, rows=3, capacity=256, width=K + 1)
    for row in range(3):
        script.turn_to(PROMPTS[row])
        engine.insert(row, RowRequest(prompt=PROMPTS[row], limit=len(PROMPTS[row]) + COUNT, draft_k=K))
    found = {row: [] for row in range(3)}
    while any(sum(len(step.tokens) for step in steps) < COUNT for steps in found.values()):
        for row, step in engine.step().items():
            found[row] += [step] if step.tokens else []
    for row, steps in found.items():
        coins = coins_of(script, PROMPTS[row], texts[row])
        assert [(step.proposed, step.accepted) for step in steps] == steps_of(coins, COUNT, K)


def test_another_prompt_retraces_nothing(pair):
    traced = []
    model = pair.draft

    def counting(tokens, kv, position):
        traced.append(tokens.shape)
        return model.forward(tokens, kv, position)

    script = Script(0.7, pair.vocab_size)
    counted = attrs.evolve(pair, draft=attrs.evolve(model, forward=counting))
    contender = Ours(counted, width=K + 1, capacity=256, script=script)
    script.learn(PROMPTS, references(pair, K, PROMPTS, COUNT, 256))
    outputs(contender, PROMPTS[:1], COUNT)
    before = len(traced)
    assert before > 0
    outputs(contender, PROMPTS[1:], COUNT)
    assert len(traced) == before


def test_a_forward_that_can_leave_slots_out_still_can():
    class Bounded:
        def __call__(self, tokens, kv, position):
            return mx.zeros((1, 1, 8)), kv

        def within(self, live):
            return lambda tokens, kv, position: (mx.full((1, 1, 8), live), kv)

    pair = tiny_pair(draft="random")
    model = scripted(attrs.evolve(pair.draft, forward=Bounded()), Script(1.0, 8))
    arguments = (mx.zeros((1, 1), dtype=mx.int32), model.make_kv(1, 16), mx.array([0], dtype=mx.int32))
    assert bounded(model.forward, 5)(*arguments)[0].tolist() == [[[5.0] * 8]]
    assert not isinstance(
        scripted(attrs.evolve(pair.draft, forward=lambda *_: None), Script(1.0, 8)).forward, BoundedForward
    )


def test_only_the_wanted_logit_moves(pair):
    script = Script(1.0, pair.vocab_size)
    script.learn([[3, 4]], [[9, 11]])
    script.turn_to([3, 4])
    model = scripted(pair.draft, script)
    tokens, position = mx.array([[3, 4, 9]], dtype=mx.int32), mx.array([0], dtype=mx.int32)
    own, _ = pair.draft.forward(tokens, pair.draft.make_kv(1, 16), position)
    bent, _ = model.forward(tokens, model.make_kv(1, 16), position)
    differing = [[int(index) for index in np.flatnonzero(row)] for row in np.array(own != bent)[0]]
    assert differing == [[], [9], [11]]
    assert np.array(mx.argmax(bent, axis=-1))[0, 1:].tolist() == [9, 11]
