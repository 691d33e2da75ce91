"""The gate holds a forward of our own against mlx-lm's module, since a reference shares the faults of its forward."""

import json

import attrs
import mlx.core as mx
import pytest
from support import fused_weights, tiny_config, tiny_module, tiny_pair
from test_gate import KEY, gate, own_cache, pair_options, result_of

from posttrainllm.adapters.gate import command as command_module
from posttrainllm.adapters.gate.findings import NO_NUMBER, ForwardCheck, GateResult
from posttrainllm.adapters.gate.forwards import compare_with_module
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.report import summary
from posttrainllm.adapters.loading import memory
from posttrainllm.adapters.loading.variants import model_from_weights

__all__ = ["own_cache", "pair_options"]  # fixtures

SHAPE = Shape(rows=2, capacity=128, draft_k=4)
TEXTS = [[5, 6, 7, 8], [9, 300, 11]]


def altered(pair, **shape):
    """A pair whose target's forward has values of its shape changed; the module is the right one."""
    config = tiny_config(vocab=512)
    weights = fused_weights(tiny_module(config, seed=1), config)
    weights = attrs.evolve(weights, shape=attrs.evolve(weights.shape, **shape))
    wrong = model_from_weights(weights, name="tiny", dtype="float32", context=512)
    return attrs.evolve(pair, target=attrs.evolve(pair.target, forward=wrong.forward))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_forward_agrees_with_the_module(dtype):
    check = compare_with_module(tiny_pair(dtype=dtype), TEXTS, SHAPE)
    assert check.holds
    assert check.variant != "module"


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm_eps": 0.5},
        {"rope_frequencies": (0.5,) * 8, "rope_base": None},
        {"rope_frequencies": tuple(0.5 * 10000 ** (-index / 8) for index in range(8)), "rope_base": None},
    ],
    ids=["another epsilon", "one frequency", "half the frequencies"],
)
def test_a_forward_that_computes_something_else_is_found(wrong):
    assert not compare_with_module(altered(tiny_pair(), **wrong), TEXTS, SHAPE).holds


def test_logits_that_are_no_number_are_found():
    pair = tiny_pair()

    def forward(tokens, kv, position):
        logits, kv = pair.target.forward(tokens, kv, position)
        return logits * mx.nan, kv

    check = compare_with_module(attrs.evolve(pair, target=attrs.evolve(pair.target, forward=forward)), TEXTS, SHAPE)
    assert check.difference == NO_NUMBER
    assert not check.holds


def test_the_module_is_compared_with_nothing_and_neither_is_what_does_not_fit_beside_it(monkeypatch):
    pair = tiny_pair()
    module = attrs.evolve(pair, target=attrs.evolve(pair.target, variant="module"))
    assert compare_with_module(module, TEXTS, SHAPE) is None
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert compare_with_module(pair, TEXTS, SHAPE) is None


def test_the_command_says_how_far_the_forward_is_from_the_module(pair_options):
    options = (*pair_options, "--prompts", "2", "--max-tokens", "6", "--draft-k", "2")
    first = json.loads(gate(*options, "--json").stdout)
    assert 0 <= first["forward"]["difference"] <= first["forward"]["limit"]
    assert "against mlx-lm's module: logits differ by" in gate(*options).stdout
    module = gate(*options, "--forward", "module")
    assert "against mlx-lm's module" not in module.stdout
    assert "from the cache" not in module.stdout  # another forward is another verdict


def test_a_forward_that_is_not_the_modules_exits_with_3_and_says_what_to_do(monkeypatch):
    check = ForwardCheck(variant="fused", difference=0.5, limit=0.001)
    result = attrs.evolve(result_of("identical"), forward=check)
    key = {**KEY, "variant": {"target": "fused", "draft": "fused"}}
    monkeypatch.setattr(command_module, "checked", lambda **_: (result, key, False))
    ran = gate()
    assert ran.exit_code == 3
    assert "logits differ by 0.5 >  0.001 of the largest  <- broken: decode with --forward module" in ran.stdout
    assert GateResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_verdict_that_was_reached_without_the_comparison_says_so():
    key = {**KEY, "variant": {"target": "cpu", "draft": "cpu"}}
    assert "the target's forward (cpu) was not compared with mlx-lm's module" in summary(
        result_of("identical"), key, cached=True
    )
