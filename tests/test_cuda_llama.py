"""The CUDA forward: what it computes, which bits it keeps, and where it steps aside."""

import logging
import math
from collections.abc import Iterator

import attrs
import mlx.core as mx
import pytest

from posttrainllm.adapters.loading import cuda_llama, variants
from posttrainllm.adapters.loading.cuda_llama import cuda_llama_forward, one_buffer, plain_llama_forward, unsupported
from posttrainllm.adapters.loading.fused_llama import fused_llama_forward
from posttrainllm.adapters.loading.llama import Linear, LlamaLayer, LlamaShape, LlamaWeights
from posttrainllm.adapters.loading.nvrtc import Gpu, gpu
from posttrainllm.adapters.runtime import LOGGER, start
from posttrainllm.kernel.errors import BackendError
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

_HOPPER = Gpu(multiprocessors=132, major=9, minor=0, shared_bytes=232448)
on_cuda = pytest.mark.skipif(
    not mx.cuda.is_available() or gpu() is None or gpu().major != 9, reason="needs an NVIDIA GPU of the Hopper kind"
)


def _weights(
    *,
    dtype: mx.Dtype = mx.bfloat16,
    layers: int = 2,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    mlp: int = 480,
    vocab_size: int = 1001,
    bias: bool = False,
) -> LlamaWeights:
    keys: Iterator[mx.array] = iter(mx.random.split(mx.random.key(7), 200))

    def normal(*shape: int, scale: float | None = None) -> mx.array:
        scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
        return (mx.random.normal(shape, key=next(keys)) * scale).astype(dtype)

    def layer() -> LlamaLayer:
        rows = (heads + 2 * kv_heads) * head_size
        return LlamaLayer(
            input_norm=1 + normal(hidden, scale=0.1),
            qkv=Linear(weight=normal(rows, hidden), bias=normal(rows, scale=0.5) if bias else None),
            query_norm=None,
            key_norm=None,
            output=Linear(weight=normal(hidden, heads * head_size)),
            mlp_norm=1 + normal(hidden, scale=0.1),
            gate_up=Linear(weight=normal(2 * mlp, hidden)),
            down=Linear(weight=normal(hidden, mlp)),
        )

    weights = LlamaWeights(
        shape=LlamaShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            mlp=mlp,
            vocab_size=vocab_size,
            norm_eps=1e-5,
            rope_frequencies=tuple(10000 ** (-2 * i / head_size) for i in range(head_size // 2)),
        ),
        embedding=Linear(weight=normal(vocab_size, hidden, scale=1)),
        layers=tuple(layer() for _ in range(layers)),
        norm=1 + normal(hidden, scale=0.1),
        head=Linear(weight=normal(vocab_size, hidden)),
    )
    mx.eval([array for one in weights.layers for array in one.arrays], weights.norm)
    return weights


def _cast(weights: LlamaWeights, dtype: mx.Dtype) -> LlamaWeights:
    def linear(one: Linear) -> Linear:
        return attrs.evolve(
            one, weight=one.weight.astype(dtype), bias=None if one.bias is None else one.bias.astype(dtype)
        )

    layers = tuple(
        attrs.evolve(
            one,
            input_norm=one.input_norm.astype(dtype),
            mlp_norm=one.mlp_norm.astype(dtype),
            **{name: linear(getattr(one, name)) for name in ("qkv", "output", "gate_up", "down")},
        )
        for one in weights.layers
    )
    return attrs.evolve(
        weights,
        embedding=linear(weights.embedding),
        head=linear(weights.head),
        norm=weights.norm.astype(dtype),
        layers=layers,
    )


def _cache(weights: LlamaWeights, rows: int, capacity: int) -> KVCache:
    return tuple(
        (
            mx.zeros((rows, heads, capacity, key), dtype=weights.norm.dtype),
            mx.zeros((rows, heads, capacity, value), dtype=weights.norm.dtype),
        )
        for heads, key, value in one_buffer(weights.shape)
    )


def _prompt(weights: LlamaWeights, rows: int, length: int) -> mx.array:
    ids = mx.random.randint(0, weights.shape.vocab_size, (rows, length), key=mx.random.key(3))
    return ids.astype(mx.int32)


def _prefilled(forward: Forward, weights: LlamaWeights, ids: mx.array, length: int, capacity: int) -> KVCache:
    rows = ids.shape[0]
    kv = forward(ids[:, :length], _cache(weights, rows, capacity), mx.zeros((rows,), dtype=mx.int32))[1]
    mx.eval(kv)
    return kv


def test_one_buffer_holds_what_a_buffer_a_layer_holds():
    weights = _weights(dtype=mx.float32)
    shape, ids = weights.shape, _prompt(weights, 2, 20)
    each = tuple((mx.zeros((2, 2, 32, 64)), mx.zeros((2, 2, 32, 64))) for _ in range(shape.layers))
    position = mx.array([0, 3], dtype=mx.int32)
    logits, kv = plain_llama_forward(weights)(ids, _cache(weights, 2, 32), position)
    expected, layers = fused_llama_forward(weights)(ids, each, position)
    assert mx.array_equal(logits, expected)
    assert mx.array_equal(kv[0][0], mx.concatenate([k for k, _ in layers] + [v for _, v in layers], axis=1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": mx.float32}, "expected 16 bits"),
        ({"head_size": 32}, "sizes 256, 480, 32"),
        ({"hidden": 240}, "sizes 240"),
        ({"hidden": 16384, "layers": 1, "mlp": 32, "vocab_size": 8}, "shared memory"),
    ],
)
def test_sizes_and_types_are_named_as_what_the_kernel_cannot_run(change, reason):
    assert reason in str(unsupported(_weights(**change), _HOPPER))


def test_the_kernel_wants_a_gpu_that_it_was_run_on():
    weights = _weights()
    assert unsupported(weights, _HOPPER) is None
    assert "compute capability 9" in str(unsupported(weights, None))
    assert "compute capability 9" in str(unsupported(weights, attrs.evolve(_HOPPER, major=8)))


def test_quantised_normed_and_biased_products_are_left_to_the_plain_forward():
    weights = _weights()
    first = weights.layers[0]
    packed = Linear(weight=first.qkv.weight, scales=first.qkv.weight)
    biased = attrs.evolve(first.output, bias=first.input_norm)
    for layer, reason in (
        (attrs.evolve(first, qkv=packed), "quantised"),
        (attrs.evolve(first, query_norm=first.input_norm, key_norm=first.input_norm), "normed"),
        (attrs.evolve(first, output=biased), "besides queries, keys and values"),
        (attrs.evolve(first, qkv=attrs.evolve(first.qkv, bias=first.input_norm)), "some layers"),
    ):
        changed = attrs.evolve(weights, layers=(layer, *weights.layers[1:]))
        assert reason in str(unsupported(changed, _HOPPER))


def test_without_a_compiler_the_next_forward_is_taken_with_one_warning(monkeypatch, caplog):
    def refuse(*_: object) -> Forward:
        raise BackendError("CUDA kernels: got no libnvrtc, expected the one that mlx-cuda installs")

    monkeypatch.setattr(variants, "gpu", lambda: _HOPPER)
    monkeypatch.setattr(variants, "cuda_llama_forward", refuse)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(variants, "start", lambda: attrs.evolve(start(), device="gpu"))
    with caplog.at_level(logging.WARNING):
        model = variants.model_from_weights(_weights(), name="m", dtype="bfloat16", context=64)
    assert model.variant == "fused"
    assert len(caplog.records) == 1
    assert "got no libnvrtc" in caplog.text


def test_a_model_that_takes_the_plain_forward_on_a_gpu_has_the_reason_in_the_debug_log(monkeypatch, caplog):
    monkeypatch.setattr(variants, "gpu", lambda: _HOPPER)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(variants, "start", lambda: attrs.evolve(start(), device="gpu"))
    with caplog.at_level(logging.DEBUG, logger=LOGGER.name):
        model = variants.model_from_weights(_weights(head_size=32), name="m", dtype="bfloat16", context=64)
    assert model.variant == "fused"
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
    assert "sizes 256, 480, 32" in caplog.text


def test_rows_that_one_launch_cannot_hold_are_computed_in_several(monkeypatch):
    weights = _weights()
    plain, launches = plain_llama_forward(weights), []

    def stand_in(*, inputs: list[mx.array], scalars: list[int], **_: object) -> tuple[mx.array, ...]:
        tokens, position, cached = inputs[0], inputs[1], inputs[3]
        launches.append(scalars)
        logits, ((written, _),) = plain(tokens, ((cached, cached[..., :0]),), position)
        slots = position[:, None, None, None] + mx.arange(tokens.shape[1])[None, None, :, None]
        return logits.astype(mx.float32), mx.take_along_axis(written, slots, axis=2)

    monkeypatch.setattr(cuda_llama, "compile_cuda", lambda *_: b"")
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", stand_in)
    forward = cuda_llama_forward(weights, _HOPPER, None)
    ids = _prompt(weights, 18, 28)
    kv = _prefilled(plain, weights, ids, 20, 32)
    position = mx.array([20, 7] * 9, dtype=mx.int32)
    logits, ((cached, _),) = forward(ids[:, 20:], kv, position)
    assert launches == [[8, 8, 32], [8, 8, 32], [2, 8, 32]]
    expected, ((written, _),) = plain(ids[:, 20:], kv, position)
    assert mx.allclose(logits, expected, atol=0.05)
    assert mx.allclose(cached, written, atol=0.05)
    launches.clear()
    forward(_prompt(weights, 1, 65), _cache(weights, 1, 80), mx.array([0], dtype=mx.int32))
    assert not launches, "a window that no launch holds takes plain operations"


@on_cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_kernel_is_as_close_to_float32_as_plain_operations(dtype, bias, head_size):
    weights = _weights(dtype=dtype, bias=bias, head_size=head_size)
    exact = _cast(weights, mx.float32)
    ids, lengths = _prompt(weights, 3, 330), mx.array([320, 290, 2], dtype=mx.int32)
    windows = mx.stack([ids[row, length : length + 5] for row, length in enumerate(lengths.tolist())])

    def off(forward: Forward, of: LlamaWeights) -> mx.array:
        kv = _prefilled(plain_llama_forward(of), of, ids, 320, 400)
        return forward(windows, kv, lengths)[0].astype(mx.float32)

    reference = off(plain_llama_forward(exact), exact)
    plain = mx.linalg.norm(off(plain_llama_forward(weights), weights) - reference)
    ours = mx.linalg.norm(off(cuda_llama_forward(weights, gpu(), None), weights) - reference)
    assert float(ours) < 1.25 * float(plain)


@on_cuda
def test_bits_of_a_token_rest_on_its_history_alone():
    weights = _weights(hidden=512, heads=8)
    forward, ids = cuda_llama_forward(weights, gpu(), None), _prompt(weights, 3, 700)
    lengths = mx.array([640, 255, 1], dtype=mx.int32)
    windows = mx.stack([ids[row, length : length + 8] for row, length in enumerate(lengths.tolist())])
    kv = _prefilled(plain_llama_forward(weights), weights, ids, 640, 700)
    expected, _ = forward(windows, kv, lengths)
    for width in (1, 2, 5):
        assert mx.array_equal(forward(windows[:, :width], kv, lengths)[0], expected[:, :width]), f"width {width}"
    stepped, own = [], kv
    for place in range(8):
        logits, own = forward(windows[:, place : place + 1], own, lengths + place)
        stepped.append(logits)
    assert mx.array_equal(mx.concatenate(stepped, axis=1), expected), "one by one"
    for row in range(3):
        alone = tuple((keys[row : row + 1], values[row : row + 1]) for keys, values in kv)
        logits, _ = forward(windows[row : row + 1], alone, lengths[row : row + 1])
        assert mx.array_equal(logits[0], expected[row]), f"row {row} alone"
    many = mx.array([2] * 17 + [0], dtype=mx.int32)  # 18 rows of 8 tokens: more than one launch holds
    copies = tuple((keys[many], values[many]) for keys, values in kv)
    found, written = forward(windows[many], copies, lengths[many])
    assert all(mx.array_equal(found[row], expected[int(many[row])]) for row in range(18)), "several launches"
    assert mx.array_equal(written[0][0][17], forward(windows, kv, lengths)[1][0][0][0]), "their cache"
    larger = tuple((mx.pad(keys, [(0, 0), (0, 0), (0, 900), (0, 0)]), mx.zeros((3, 8, 1600, 0))) for keys, _ in kv)
    assert mx.array_equal(forward(windows, larger, lengths)[0], expected), "capacity"
    for _ in range(20):
        assert mx.array_equal(forward(windows, kv, lengths)[0], expected), "again"
