"""The zoo: presets, the tokenizer, and a trainer that resumes, distils and writes what loads."""

import itertools
import json
import math
import random
import re
import time
from types import SimpleNamespace

import attrs
import click
import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from posttrainllm.adapters.loading.pair import embedded_path, load_pair
from posttrainllm.evals.counting import repeated_share
from posttrainllm.evals.zoo import on_policy
from posttrainllm.evals.zoo import trainer as trainer_module
from posttrainllm.evals.zoo.batches import Batches, Prefetch
from posttrainllm.evals.zoo.checkpoint import last_checkpoint, load_checkpoint
from posttrainllm.evals.zoo.command import zoo
from posttrainllm.evals.zoo.data import read_corpus, training_ids
from posttrainllm.evals.zoo.evaluate import held_out_scores
from posttrainllm.evals.zoo.model import (
    build_module,
    divergences,
    load_any,
    losses,
    start_parameters,
    unlikelihood,
    with_parameters,
)
from posttrainllm.evals.zoo.on_policy import Writing, write_texts
from posttrainllm.evals.zoo.optimizer import apply_updates, clip, first_moments, step_scalars
from posttrainllm.evals.zoo.output import write_model
from posttrainllm.evals.zoo.presets import PRESETS
from posttrainllm.evals.zoo.schedule import rate_at
from posttrainllm.evals.zoo.step import compile_step
from posttrainllm.evals.zoo.tokenizer import cut_tokenizer, train_tokenizer
from posttrainllm.evals.zoo.unlearn import Loops, repeats

TOKENIZER = embedded_path("target-16m") / "tokenizer.json"
WORDS = [f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]  # a token each
SMALL = ("--batch", "8", "--sequence", "32", "--dtype", "float32", "--log-every", "10", "--checkpoint-every", "0")


def write_corpus(folder, text: str, held_out: str):
    folder.mkdir()
    (folder / "MANIFEST.json").write_text(json.dumps({"corpus_sha256": "0" * 64}))
    line = {"package": "p", "version": "1", "path": "a.py", "kind": "code"}
    (folder / "train-00000.jsonl").write_text(json.dumps({**line, "text": text}) + "\n")
    (folder / "heldout.jsonl").write_text(json.dumps({**line, "text": held_out}) + "\n")
    return folder


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    """Text in which a token says which one follows: its entropy is 0, and that of a single token ln 26 = 3.26 nats."""
    return write_corpus(tmp_path_factory.mktemp("zoo") / "cycle", "".join(WORDS) * 200, "".join(WORDS) * 20)


def run(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(zoo, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def train(corpus, out, *more, code: int = 0) -> str:
    return run("train", "toy", "--corpus", corpus, "--out", out, "--tokenizer", TOKENIZER, *SMALL, *more, code=code)


@pytest.fixture(scope="module")
def trained(cycle, tmp_path_factory):
    out = tmp_path_factory.mktemp("zoo") / "trained"
    train(cycle, out, "--steps", "60", "--learning-rate", "5e-3")
    return out


def test_presets_have_the_sizes_that_their_names_promise():
    assert PRESETS["nano"].parameters == 2_753_792
    assert PRESETS["small"].parameters == 16_521_600
    assert 2 * (PRESETS["nano"].parameters + PRESETS["small"].parameters) <= 40_000_000
    assert 8_000_000 <= PRESETS["tiny"].parameters <= 8_500_000
    assert 900_000_000 <= PRESETS["mega"].parameters <= 1_000_000_000
    output = run("list")
    for name, preset in PRESETS.items():
        assert name in output
        assert f"{preset.parameters:,}" in output


@pytest.mark.parametrize("name", ["toy", "nano"])
def test_a_presets_count_is_that_of_the_module(name):
    from mlx.utils import tree_flatten

    from posttrainllm.evals.zoo.model import build_module

    shapes = {path: tuple(array.shape) for path, array in tree_flatten(build_module(PRESETS[name]).parameters())}
    assert shapes == PRESETS[name].shape.tensors()


def test_the_tokenizer_is_deterministic_nested_and_round_trips_any_text():
    source = random.Random(1)
    texts = ["".join(source.choices("abcdef _=().\n", k=400)) for _ in range(40)]
    first, second = train_tokenizer(texts, vocab_size=600), train_tokenizer(texts, vocab_size=600)
    assert first.to_str() == second.to_str()
    assert first.token_to_id("<|endoftext|>") == 0
    cut = Tokenizer.from_str(cut_tokenizer(first.to_str(), 400))
    assert cut.get_vocab() == {piece: index for piece, index in first.get_vocab().items() if index < 400}
    assert json.loads(cut.to_str())["model"] == json.loads(train_tokenizer(texts, vocab_size=400).to_str())["model"]
    points = [*range(0xD800), *range(0xE000, 0x110000)]  # without surrogates
    any_text = "".join(map(chr, source.choices(points, k=2000)))
    for text in (any_text, " \n\t  x\r\n\r\n", "it's 12345 ''", "\x00\x7f"):
        for tokenizer in (first, cut):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    with pytest.raises(click.ClickException, match="got 600 ids, expected at least 601"):
        cut_tokenizer(first.to_str(), 601)


def test_a_toy_learns_what_the_text_determines(trained):
    record = json.loads((trained / "TRAINING.json").read_text())
    assert record["curve"][0]["loss"] > math.log(26)
    assert record["held_out"]["p code"]["nats_per_token"] < 0.5  # 3.26 without looking at the token before
    assert record["tokens"] == 60 * 8 * 32


def test_muon_learns_it_too(cycle, tmp_path):
    train(cycle, tmp_path / "muon", "--steps", "60", "--learning-rate", "5e-3", "--optimizer", "muon")
    record = json.loads((tmp_path / "muon" / "TRAINING.json").read_text())
    assert record["held_out"]["p code"]["nats_per_token"] < 0.5


@pytest.mark.parametrize("kind", ["adamw", "muon", "unlikelihood"])
def test_a_run_that_was_stopped_and_resumed_is_the_unbroken_run_bit_for_bit(
    cycle, trained, tmp_path, monkeypatch, kind
):
    options = ("--steps", "6", "--accumulate", "2", "--log-every", "1")
    if kind == "unlikelihood":  # step 3 is between two writings
        more = ("--unlikelihood", "0.5", "--on-policy-rows", "8", "--rewrite-every", "2")
        options += ("--init", trained, *more)
    else:
        options += ("--optimizer", kind)
    train(cycle, tmp_path / "whole", *options)
    steps = trainer_module.Trainer._one_step

    def interrupted(self, prefetch):
        steps(self, prefetch)
        self._signalled = self.step == 3

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "_one_step", interrupted)
        train(cycle, tmp_path / "broken", *options, code=3)
    assert last_checkpoint(tmp_path / "broken").name == "checkpoint-00000003"
    assert "expected 2" in train(cycle, tmp_path / "broken", "--steps", "6", "--resume", code=1)
    train(cycle, tmp_path / "broken", *options, "--resume")
    one, other = (json.loads((tmp_path / name / "TRAINING.json").read_text()) for name in ("whole", "broken"))
    assert [entry["loss"] for entry in one["curve"]] == [entry["loss"] for entry in other["curve"]]
    for file in (tmp_path / "whole").glob("model*.safetensors"):
        assert file.read_bytes() == (tmp_path / "broken" / file.name).read_bytes()


def test_a_distillation_resumes_after_its_own_target_alone(cycle, trained, tmp_path):
    options = ("--steps", "2", "--on-policy", "0.5", "--on-policy-rows", "8")
    train(cycle, tmp_path / "run", *options, "--distill-from", trained, "--stop-after", "0", code=3)
    train(cycle, tmp_path / "other", "--steps", "1", "--seed", "1")
    output = train(cycle, tmp_path / "run", *options, "--distill-from", tmp_path / "other", "--resume", code=1)
    assert "distill_from: got 'sha256:" in output
    assert "distill_from: got None, expected" in train(cycle, tmp_path / "run", "--steps", "2", "--resume", code=1)
    train(cycle, tmp_path / "run", *options, "--distill-from", trained, "--resume")


def test_a_loss_that_is_not_finite_is_told_and_none_that_is_ends_the_run(cycle, tmp_path, monkeypatch):
    steps, broken = trainer_module.Trainer._one_step, {2}

    def with_infinity(self, prefetch):
        steps(self, prefetch)
        if self.step in broken:
            self._unread[-1] = (self.step, mx.array(math.inf), *self._unread[-1][2:])

    monkeypatch.setattr(trainer_module.Trainer, "_one_step", with_infinity)
    assert "1 of 4 losses not finite" in train(cycle, tmp_path / "one", "--steps", "4")
    broken |= {1, 2, 3, 4}
    assert "got no finite loss in 4 steps" in train(cycle, tmp_path / "all", "--steps", "4", code=1)


def test_evaluations_and_checkpoints_are_not_on_the_clock(cycle, tmp_path, monkeypatch):
    hours = itertools.count(0, 3600)  # that pass while something is evaluated or saved
    passed = [0]

    def evaluate(self):
        passed[0] = next(hours)
        return {}

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(trainer_module, "time", clock)
    monkeypatch.setattr(trainer_module.Trainer, "evaluate", evaluate)
    train(cycle, tmp_path / "run", "--steps", "6", "--evaluate-every", "1")
    assert passed[0] >= 4 * 3600
    assert json.loads((tmp_path / "run" / "TRAINING.json").read_text())["seconds"] < 3600


def test_a_checkpoint_holds_every_array_and_replaces_the_older_one(cycle, tmp_path):
    output = train(cycle, tmp_path / "run", "--steps", "500", "--stop-after", "0", code=3)
    assert "--resume goes on" in output
    parameters, moments, state, _ = load_checkpoint(last_checkpoint(tmp_path / "run"))
    assert parameters.keys() == moments.first.keys() == PRESETS["toy"].shape.tensors().keys()
    assert state["step"] == 1
    train(cycle, tmp_path / "run", "--steps", "500", "--stop-after", "0", "--resume", code=3)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-00000002"]


@pytest.mark.slow
def test_a_distilled_toy_is_closer_to_its_target_than_its_control(cycle, trained, tmp_path):
    mixed = write_corpus(tmp_path / "mixed", "".join(random.Random(1).choices(WORDS, k=4000)), "".join(WORDS) * 3)
    steps = ("--steps", "80", "--learning-rate", "5e-3")
    train(mixed, tmp_path / "control", *steps)
    of_target = ("--on-policy", "0.5", "--on-policy-rows", "8")
    train(mixed, tmp_path / "distilled", *steps, "--distill-from", trained, *of_target)
    (file,) = (tmp_path / "distilled").glob("on_policy-*.npy")
    ids = mx.array(np.load(file).astype(np.int32)[:, :-1])
    target = load_any(trained, mx.float32)(ids)
    found = [
        divergences(target, load_any(tmp_path / name, mx.float32)(ids)).mean().item()
        for name in ("distilled", "control")
    ]
    assert found[0] < 0.5 * found[1]


def test_what_is_written_loads_and_has_the_trained_logits(trained, tmp_path):
    files = list(trained.glob("model-*.safetensors"))
    assert all(file.stat().st_size <= 15_000_000 for file in files)
    pair = load_pair(trained, speculate=False, dtype="float32")
    ids = pair.tokenizer.encode("".join(WORDS))
    assert pair.tokenizer.decode(ids) == "".join(WORDS)
    module = load_any(trained, mx.float32)
    expected = np.array(module(mx.array([ids]))[0].argmax(axis=-1))
    assert pair.target.vocab_size == 4096
    assert (expected[:-1] == np.array(ids[1:])).mean() > 0.9
    assert "bits a character" in (trained / "MODEL_CARD.md").read_text()


def test_shards_are_15_mb_at_most(tmp_path):
    preset = PRESETS["small"]
    parameters = {name: mx.zeros(shape) for name, shape in preset.shape.tensors().items()}
    record = {"preset": "small", "held_out": {}, "target": None, "tokens": 0, "steps": 0, "seconds": 0.0, "loss": 0.0}
    settings = {"sequence": 512, "seed": 0, "optimizer": "adamw", "learning_rate": 0.1}
    more = {"settings": settings, "device": "none", "command": "none", "corpus_sha256": "none"}
    write_model(tmp_path / "small", preset, parameters, TOKENIZER.read_text(), {**record, **more})
    sizes = [file.stat().st_size for file in (tmp_path / "small").glob("model-*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) <= 15_000_000


def test_adamw_is_that_of_mlx():
    from mlx.optimizers import AdamW

    parameters = {"a.weight": mx.array([[1.0, -2.0], [0.5, 3.0]])}
    theirs = AdamW(learning_rate=0.01, betas=[0.9, 0.95], weight_decay=0.1, bias_correction=True)
    expected, moments = dict(parameters), first_moments(parameters, "adamw")
    for step in range(1, 4):
        gradients = {"a.weight": mx.array([[0.3, -0.1], [2.0, 0.0]]) * step}
        expected = theirs.apply_gradients(gradients, expected)
        options = {"optimizer": "adamw", "weight_decay": 0.1, "dtype": mx.float32}
        parameters, moments = apply_updates(parameters, gradients, moments, step_scalars(0.01, step), **options)
        assert mx.allclose(parameters["a.weight"], expected["a.weight"], rtol=1e-5).item()


def test_muons_steps_are_orthogonal_at_adamws_scale():
    name = "model.layers.0.x.weight"
    for rows, columns in ((32, 32), (48, 32), (32, 48)):
        gradients = {name: mx.random.normal((rows, columns), key=mx.random.key(3))}
        parameters = {name: mx.zeros((rows, columns))}
        options = {"optimizer": "muon", "weight_decay": 0.1, "dtype": mx.float32}
        moments = first_moments(parameters, "muon")
        made, _ = apply_updates(parameters, gradients, moments, step_scalars(1.0, 1), **options)
        singular = np.linalg.svd(np.array(made[name]), compute_uv=False) / (0.2 * max(rows, columns) ** 0.5)
        assert singular.min() > 0.3  # a matrix of normal draws has some near 0
        assert singular.max() < 1.3


def test_gradients_that_are_not_finite_become_zeros_and_large_ones_are_bounded():
    clipped, norm = clip({"a": mx.array([3.0, 4.0])}, 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert np.linalg.norm(np.array(clipped["a"])) == pytest.approx(1.0, rel=1e-4)
    clipped, _ = clip({"a": mx.array([3.0, math.nan])}, 1.0)
    assert clipped["a"].tolist() == [0.0, 0.0]


def test_the_rate_rises_then_falls_to_a_remainder_and_is_never_zero():
    rates = [rate_at(share / 100, peak=1.0, warm_up=0.1) for share in range(101)]
    assert rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert min(rates) > 0


def test_repeats_are_the_tokens_that_end_a_run_of_four_that_was_there_before():
    text = np.array([[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 1, 2, 3, 9]])
    assert np.flatnonzero(repeats(text)[0]).tolist() == [7, 8]  # tokens 8 and 9: 1 2 3 4 and 2 3 4 5 again
    assert repeats(text, 2)[0].sum() == 6
    assert repeated_share(text.tolist()) == 2 / 12


def test_unlikelihood_is_the_mean_cost_of_the_counted_tokens():
    logits = mx.log(mx.array([[[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]]))
    targets, counted = mx.array([[0, 1, 0]]), mx.array([[True, False, True]])
    expected = -(math.log(0.25) + math.log(0.75)) / 2
    assert unlikelihood(logits, targets, counted).item() == pytest.approx(expected, rel=1e-5)
    assert unlikelihood(logits, targets, mx.zeros((1, 3), dtype=mx.bool_)).item() == 0
    certain = mx.array([[[100.0, -100.0]]])
    slopes = mx.grad(lambda values: unlikelihood(values, mx.array([[0]]), mx.array([[True]])))(certain)
    assert mx.isfinite(slopes).all().item()
    nearly = mx.array([[[12.0, 0.0]]])  # 0.999994
    (slope, _) = mx.grad(lambda values: unlikelihood(values, mx.array([[0]]), mx.array([[True]])))(nearly)[
        0, 0
    ].tolist()
    assert slope == pytest.approx(1, abs=0.05)


def test_what_ends_a_repeated_run_of_its_own_text_becomes_unlikely(trained, cycle, tmp_path):
    options = ("--steps", "8", "--learning-rate", "3e-3", "--unlikelihood", "1", "--on-policy-rows", "8")
    assert "--init" in train(cycle, tmp_path / "alone", *options, code=2)
    train(cycle, tmp_path / "unlearnt", *options, "--init", trained)
    ids = training_ids(read_corpus(cycle), Tokenizer.from_file(str(TOKENIZER)), "x")
    wanted = Writing(rows=8, batch=8, sequence=32, prompt=16, seed=0, greedy_share=1.0)
    texts = write_texts(load_any(trained, mx.float32), ids, wanted)
    counted = repeats(texts)
    assert counted.any(axis=1).all()  # 33 tokens of a cycle of 26
    tokens = mx.array(texts.astype(np.int32))
    chances = []
    for folder in (trained, tmp_path / "unlearnt"):
        nats = losses(load_any(folder, mx.float32)(tokens[:, :-1]), tokens[:, 1:])
        chances.append(np.exp(-np.array(nats))[counted].mean())
    assert chances[0] > 0.5
    assert chances[1] < 0.1 * chances[0]


def test_greedy_texts_do_not_depend_on_how_many_are_written_at_once(trained, cycle, monkeypatch):
    ids = training_ids(read_corpus(cycle), Tokenizer.from_file(str(TOKENIZER)), "x")
    module = load_any(trained, mx.float32)
    wanted = Writing(rows=5, batch=5, sequence=32, prompt=16, seed=0, greedy_share=1.0)
    at_once, sizes, write = write_texts(module, ids, wanted), [], on_policy._continue

    def counting(module, prompts, *rest):
        sizes.append(len(prompts))
        return write(module, prompts, *rest)

    monkeypatch.setattr(on_policy, "_continue", counting)
    np.testing.assert_array_equal(write_texts(module, ids, attrs.evolve(wanted, batch=2)), at_once)
    assert sizes == [2, 2, 1]


def test_a_text_begins_with_the_corpus_for_as_long_as_asked_and_goes_on_with_the_models_choices(trained, cycle):
    text = "".join(random.Random(2).choices(WORDS, k=400))  # in no order that the model has learnt
    ids = np.array(Tokenizer.from_file(str(TOKENIZER)).encode(text).ids, dtype=np.uint16)
    module = load_any(trained, mx.float32)
    windows = {tuple(ids[start : start + 12]) for start in range(len(ids))}
    texts = write_texts(module, ids, Writing(rows=6, batch=6, sequence=32, prompt=12, seed=0, greedy_share=1.0))
    assert all(tuple(row[:12]) in windows for row in texts)
    choices = np.array(module(mx.array(texts.astype(np.int32)))[:, 11:-1].argmax(axis=-1))
    np.testing.assert_array_equal(texts[:, 12:], choices)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_what_is_learnt_of_a_target_is_its_law_and_its_choice_in_the_shares_asked_for(trained, share):
    preset, target = PRESETS["toy"], load_any(trained, mx.float32)
    functions = compile_step(
        build_module(preset), target, dtype=mx.float32, optimizer="adamw", weight_decay=0.0, accumulate=1,
        distill_weight=1.0, distill_choice=share, z_loss=0.0,
    )  # fmt: skip
    parameters = start_parameters(preset, 5)
    tokens = mx.random.randint(0, 4096, (2, 9), key=mx.random.key(1))
    _, loss = functions.gradient(parameters, tokens)
    theirs, ours = target(tokens[:, :-1]), with_parameters(build_module(preset), parameters, mx.float32)(tokens[:, :-1])
    law, choice = divergences(theirs, ours).mean().item(), losses(ours, theirs.argmax(axis=-1)).mean().item()
    assert abs(law - choice) > 0.1
    assert loss.item() == pytest.approx((1 - share) * law + share * choice, rel=1e-4)


def test_the_options_of_what_is_learnt_of_a_target_reach_the_run(trained, cycle, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(on_policy, "write_texts", lambda *args: asked.append(args[2]) or write_texts(*args))
    options = ("--steps", "1", "--distill-from", trained, "--on-policy", "1", "--on-policy-rows", "8")
    losses_said = []
    for share in ("0", "1"):
        for prompt in ("12", "30"):
            out = tmp_path / f"{share}-{prompt}"
            train(cycle, out, *options, "--on-policy-prompt", prompt, "--distill-choice", share)
            losses_said.append(json.loads((out / "TRAINING.json").read_text())["loss"])
    assert [one.prompt for one in asked] == [12, 16, 12, 16]  # half of 32 at most
    assert losses_said[0] != losses_said[2]
    assert "without --distill-from" in train(cycle, tmp_path / "x", "--steps", "1", "--distill-choice", "1", code=2)


def test_unlearning_ends_where_few_enough_runs_are_repeated(trained, cycle, tmp_path):
    options = ("--init", trained, "--unlikelihood", "1", "--on-policy-rows", "8", "--rewrite-every", "2")
    output = train(
        cycle, tmp_path / "run", *options, "--steps", "500", "--learning-rate", "3e-3", "--until-repeated", "0.05"
    )
    shares = [float(share) for share in re.findall(r"([\d.]+)% of the tokens end a run", output)]
    assert len(shares) > 1
    assert min(shares[:-1]) >= 5 >= shares[-1]
    assert json.loads((tmp_path / "run" / "TRAINING.json").read_text())["steps"] == 2 * (len(shares) - 1)
    train(cycle, tmp_path / "none", *options, "--steps", "500", "--until-repeated", "1")
    record = json.loads((tmp_path / "none" / "TRAINING.json").read_text(), parse_constant=pytest.fail)
    assert (record["steps"], record["loss"]) == (0, None)


def test_writing_is_not_on_the_clock_and_every_step_is(trained, cycle, tmp_path, monkeypatch):
    passed, put_into, steps = [0], Loops.put_into, trainer_module.Trainer._one_step

    def slowly(self, *arguments):
        passed[0] += 3600
        return put_into(self, *arguments)

    def step(self, prefetch):
        steps(self, prefetch)
        passed[0] += 60

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0]))
    monkeypatch.setattr(Loops, "put_into", slowly)
    monkeypatch.setattr(trainer_module.Trainer, "_one_step", step)
    options = ("--init", trained, "--unlikelihood", "0.5", "--on-policy-rows", "8", "--rewrite-every", "2")
    train(cycle, tmp_path / "run", *options, "--minutes", "5.5")
    record = json.loads((tmp_path / "run" / "TRAINING.json").read_text())
    assert record["steps"] == 2 + 6  # the first of each kind compiles, which is not on the clock
    assert 360 <= record["seconds"] < 480


def test_batches_take_every_window_once_an_epoch_and_any_number_alone():
    batches = Batches(ids=np.arange(65, dtype=np.uint16), rows=3, sequence=8, seed=2)
    windows = np.concatenate([batches.batch(number).tokens for number in range(7)])  # 3 epochs of 7 windows
    assert len({row[0] for row in windows[:7]}) == 7
    assert (np.diff(windows, axis=1) == 1).all()
    with Prefetch(batches, 4) as prefetch:
        assert (prefetch.take().tokens == batches.batch(4).tokens).all()
        assert (prefetch.take().tokens == batches.batch(5).tokens).all()


def test_prose_has_the_share_that_is_asked_for_and_leaves_out_no_window():
    code, prose = np.arange(65, dtype=np.uint16), np.arange(100, 165, dtype=np.uint16)
    batches = Batches(ids=code, prose=prose, prose_share=0.25, rows=4, sequence=8, seed=2)
    for share, expected in ((0.25, [7, 21]), (1.0, [28, 0]), (0.0, [0, 28])):
        batches = attrs.evolve(batches, prose_share=share)
        first = np.concatenate([batches.batch(number).tokens[:, 0] for number in range(7)])
        assert [(first >= 100).sum(), (first < 100).sum()] == expected
    assert len(set(first[:7])) == 7  # an epoch of the code alone


def test_held_out_losses_count_every_token_but_the_first_once():
    from posttrainllm.evals.zoo.data import HeldOut

    source = HeldOut(name="p code", ids=np.arange(1, 24, dtype=np.uint16), characters=11)
    (score,) = held_out_scores(lambda tokens, counted: (tokens[:, 1:] * counted).sum(), [source], rows=2, sequence=4)
    assert score.nats == sum(range(2, 24))
    assert score.tokens == 22
    assert score.bits_per_character == score.nats / math.log(2) / 11


def test_ids_are_kept_and_a_torn_file_of_them_is_made_again(cycle):
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    ids = training_ids(read_corpus(cycle), tokenizer, "x")
    (file,) = [path for path in cycle.glob("tokens-*.npy") if len(np.load(path)) == len(ids)][:1]
    file.write_bytes(file.read_bytes()[:100])
    assert (training_ids(read_corpus(cycle), tokenizer, "x") == ids).all()
    assert ids[0] == ids[-1] == 0


def test_evaluate_agrees_with_the_training_run(cycle, trained):
    line = run("evaluate", trained, "--corpus", cycle, "--sequence", "32", "--dtype", "float32", "--json")
    record = json.loads((trained / "TRAINING.json").read_text())
    found = json.loads(line)["sources"]["p code"]["nats_per_token"]
    # the run's own weights are float32, those on disk bfloat16: 8 bits of each, a few per mille of the loss
    assert found == pytest.approx(record["held_out"]["p code"]["nats_per_token"], rel=0.05)


def test_bad_input_is_one_line(cycle, trained, tmp_path):
    steps = ("--steps", "1")
    assert "expected a folder of `zoo corpus`" in train(tmp_path, tmp_path / "out", *steps, code=1)
    other = tmp_path / "other"
    other.mkdir()
    for file in trained.iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 4000}))
    output = train(cycle, tmp_path / "out", *steps, "--distill-from", other, code=1)
    assert "got 4000 ids, expected the draft's 4096" in output
    assert "expected one of the two" in train(cycle, tmp_path / "out", code=2)
    assert "--accumulate" in train(cycle, tmp_path / "out", *steps, "--batch", "100000", code=2)
    assert "got 1 tokens of prose" in train(cycle, tmp_path / "out", *steps, "--prose", "0.5", code=1)
    assert "expected both" in train(cycle, tmp_path / "out", *steps, "--on-policy", "0.5", code=2)


def test_a_disk_that_refuses_is_an_error_of_the_file_system(tmp_path):
    from posttrainllm.evals.zoo.checkpoint import save_checkpoint

    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save_checkpoint(tmp_path / "file", 1, {"a": mx.zeros(1)}, first_moments({"a": mx.zeros(1)}, "adamw"), {}, None)
