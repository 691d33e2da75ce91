"""A forward of Llama models for NVIDIA GPUs: one persistent kernel for short windows.

The cache of all layers is one buffer, [B, layers * H, C, D] for keys and one for values, so that a forward writes it
once. Long windows, as in prefill, take the same weights through plain MLX operations, which are also the kernel's
reference. Source of the kernel: cuda_llama.cu, cuda_attention.cu, cuda_forward.cu.
"""

import functools
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

import attrs
import mlx.core as mx

from posttrainllm.adapters.loading.llama import LlamaLayer, LlamaShape, LlamaWeights
from posttrainllm.adapters.loading.nvrtc import Gpu, compile_cuda
from posttrainllm.kernel.cache import attention_mask, write_at
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["cuda_llama_forward", "plain_llama_forward", "unsupported"]

_SOURCES = ("cuda_llama.cu", "cuda_attention.cu", "cuda_forward.cu")
_THREADS = 512
_MOST_ROWS = 64  # tokens of all rows together; more are as fast through plain products
_COUNTERS = 4096
_BARRIER_COUNTERS = 32


def unsupported(weights: LlamaWeights, device: Gpu | None) -> str | None:
    """Why the kernel cannot run a model; None when it can.

    Args:
        weights: of the model.
        device: the GPU, None where there is none.

    Returns:
        The reason.
    """
    shape, first = weights.shape, weights.layers[0]
    if device is None or device.major != 9:
        return "not an NVIDIA GPU of compute capability 9"
    if weights.norm.dtype not in (mx.bfloat16, mx.float16):
        return f"weights are {weights.norm.dtype}, expected 16 bits"
    linears = [weights.head] + [linear for layer in weights.layers for linear in _linears(layer)]
    if any(linear.scales is not None for linear in (weights.embedding, *linears)):
        return "weights are quantised"
    if first.query_norm is not None or first.key_norm is not None:
        return "queries or keys are normed"
    if any(linear.bias is not None for linear in linears if all(linear is not layer.qkv for layer in weights.layers)):
        return "a product besides queries, keys and values has a bias"
    if len({layer.qkv.bias is None for layer in weights.layers}) > 1:
        return "some layers have a bias, others not"
    if shape.hidden % 32 or shape.mlp % 32 or shape.head_size % 64 or shape.head_size > 128:
        return f"got sizes {shape.hidden}, {shape.mlp}, {shape.head_size}, expected multiples of 32, 32 and 64 (to 128)"
    if _rows_for(1, shape, device) is None:
        return f"a hidden size of {shape.hidden} does not fit shared memory"
    return None


def _linears(layer: LlamaLayer) -> tuple:
    return (layer.qkv, layer.output, layer.gate_up, layer.down)


def plain_llama_forward(weights: LlamaWeights) -> Forward:
    """The same function in MLX operations, over the same layout of the cache.

    Args:
        weights: of the model.

    Returns:
        The pure forward; kv is one pair of [B, layers * H, C, D].
    """
    shape = weights.shape
    wavelengths = mx.array([1.0 / frequency for frequency in shape.rope_frequencies])
    mx.eval(wavelengths)

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        ((keys, values),) = kv
        batch, width = tokens.shape
        mask = attention_mask(position, width, keys.shape[2])
        hidden = weights.embedding.weight[tokens]  # [B, W] -> [B, W, N]
        fresh = []

        def rotated(heads: mx.array) -> mx.array:
            return mx.fast.rope(
                heads, shape.head_size, traditional=False, base=None, scale=1.0, offset=position, freqs=wavelengths
            )

        for index, layer in enumerate(weights.layers):
            normed = mx.fast.rms_norm(hidden, layer.input_norm, shape.norm_eps)
            heads = layer.qkv(normed).reshape(batch, width, -1, shape.head_size).transpose(0, 2, 1, 3)
            queries, new_keys, new_values = mx.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
            queries, new_keys = rotated(queries), rotated(new_keys)
            fresh.append((new_keys, new_values))
            own = slice(index * shape.kv_heads, (index + 1) * shape.kv_heads)
            attended = mx.fast.scaled_dot_product_attention(
                queries,
                write_at(keys[:, own], new_keys, position),
                write_at(values[:, own], new_values, position),
                scale=shape.head_size**-0.5,
                mask=mask,
            )
            hidden = hidden + layer.output(attended.transpose(0, 2, 1, 3).reshape(batch, width, -1))
            normed = mx.fast.rms_norm(hidden, layer.mlp_norm, shape.norm_eps)
            gate, up = mx.split(layer.gate_up(normed), 2, axis=-1)
            hidden = hidden + layer.down(gate * mx.sigmoid(gate) * up)
        logits = weights.head(mx.fast.rms_norm(hidden, weights.norm, shape.norm_eps))
        written = [
            write_at(buffer, mx.concatenate(list(new), axis=1), position)
            for buffer, new in zip((keys, values), zip(*fresh, strict=True), strict=True)
        ]
        return logits, ((written[0], written[1]),)

    return forward


def cuda_llama_forward(weights: LlamaWeights, device: Gpu, folder: Path) -> Forward:
    """The forward through the kernel where the window is short, through `plain_llama_forward` where it is long.

    Args:
        weights: of a model for which `unsupported` returns None.
        device: the GPU.
        folder: where compiled kernels are kept.

    Returns:
        The pure forward; logits are float32 from the kernel, of the weights' dtype from the plain one.
    """
    shape, plain = weights.shape, plain_llama_forward(weights)
    frequencies = mx.array(shape.rope_frequencies, dtype=mx.float32)
    # a barrier and counters that the kernel leaves as it found them
    counters = mx.zeros((_COUNTERS,), dtype=mx.int32)
    mx.eval(frequencies, counters)
    arrays = [frequencies, weights.embedding.weight, weights.norm, weights.head.weight, counters]
    layers = [array for layer in weights.layers for array in _arrays(layer)]
    build = functools.cache(functools.partial(_kernel, weights, device, folder))

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        batch, width = tokens.shape
        rows = _rows_for(batch * width, shape, device)
        if rows is None:
            return plain(tokens, kv, position)
        ((keys, values),) = kv
        capacity = keys.shape[2]
        split = _split_keys(capacity)
        query_tiles = batch * shape.kv_heads * -(-shape.heads // shape.kv_heads * width // 16)
        if query_tiles > _COUNTERS - _BARRIER_COUNTERS:
            return plain(tokens, kv, position)
        parts = query_tiles * -(-capacity // split) * 16 * (shape.head_size + 2) if capacity > split else 1
        count, dtype = batch * width, keys.dtype
        window = (batch, keys.shape[1], width, shape.head_size)
        logits, new_keys, new_values, *_ = mx.fast.precompiled_cuda_kernel(
            name="llama_forward",
            compiled_source=build(rows, split),
            inputs=[tokens, position, arrays[0], keys, values, *arrays[1:], *layers],
            output_shapes=[
                (batch, width, shape.vocab_size),
                window,
                window,
                (count, shape.hidden),
                (count, shape.heads * shape.head_size),
                (count, shape.heads * shape.head_size),
                (count, shape.mlp),
                (parts,),
            ],
            output_dtypes=[mx.float32, *[dtype] * 6, mx.float32],
            scalars=[batch, width, capacity],
            grid=(device.multiprocessors * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            shared_memory=_shared_bytes(shape, device),
            ensure_row_contiguous=True,
        )
        return logits, ((write_at(keys, new_keys, position), write_at(values, new_values, position)),)

    return forward


def _split_keys(capacity: int) -> int:
    """Keys of one work item of attention: few enough for many items, and at most 32 of them to add up."""
    return 256 * max(1, -(-capacity // (256 * 32)))


def _arrays(layer: LlamaLayer) -> Sequence[mx.array]:
    bias = [] if layer.qkv.bias is None else [layer.qkv.bias]
    return [
        layer.input_norm,
        layer.qkv.weight,
        *bias,
        layer.output.weight,
        layer.mlp_norm,
        layer.gate_up.weight,
        layer.down.weight,
    ]


def _shared_bytes(shape: LlamaShape, device: Gpu) -> int:
    """Dynamic shared memory: all that the table of layers (7 pointers each) and a few sums leave."""
    return (device.shared_bytes - shape.layers * 56 - 2048) // 128 * 128


def _rows_for(tokens: int, shape: LlamaShape, device: Gpu) -> int | None:
    """How many tokens a product is built for; None where the inputs of a product would not fit shared memory."""
    rows = -(-tokens // 8) * 8
    sums = 4 * 2 * (1 if rows > 16 else 2) * 8 * rows * 8
    inputs = rows * (shape.hidden + 32) * 2
    angles = rows * shape.head_size * 4
    return rows if rows <= _MOST_ROWS and sums + inputs + angles <= _shared_bytes(shape, device) else None


def _kernel(weights: LlamaWeights, device: Gpu, folder: Path, rows: int, split: int) -> bytes:
    shape, bias = weights.shape, weights.layers[0].qkv.bias is not None
    names = ["norm", "qkv", *(["bias"] if bias else []), "output", "mlp_norm", "gate_up", "down"]
    parameters = "".join(f"const u16* {name}_{index}, " for index in range(shape.layers) for name in names)
    table = ", ".join(
        "{" + ", ".join(f"{name}_{index}" if name in names else "nullptr" for name in _FIELDS) + "}"
        for index in range(shape.layers)
    )
    defined = attrs.asdict(shape) | {
        "hidden": shape.hidden,
        "eps": f"{shape.norm_eps!r}f",
        "half_is_bf16": int(weights.norm.dtype == mx.bfloat16),
        "has_bias": int(bias),
        "rows": rows,
        "split_keys": split,
        "shared_bytes": _shared_bytes(shape, device),
        "parameters": parameters,
        "table": table,
        "vocab": shape.vocab_size,
    }
    for name in ("rope_frequencies", "norm_eps", "vocab_size"):
        defined.pop(name)
    folder_of_sources = importlib.resources.files("posttrainllm.adapters.loading")
    lines = [f"#define {name.upper()} {value}" for name, value in defined.items()]
    source = "\n".join([*lines, *((folder_of_sources / name).read_text(encoding="utf-8") for name in _SOURCES)])
    return compile_cuda(source, [f"--gpu-architecture=sm_{device.major}{device.minor}a", "-std=c++17"], folder)


_FIELDS = ("norm", "qkv", "bias", "output", "mlp_norm", "gate_up", "down")
