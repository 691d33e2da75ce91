"""A forward of Llama models for NVIDIA GPUs: one persistent kernel for short windows.

The cache of all layers is one buffer, [B, 2 * layers * H, C, D], keys before values, so that a forward writes it once.
Long windows, as in prefill, take the same weights through plain MLX operations, which are also the kernel's reference.
Source of the kernel: cuda_llama.cu, cuda_attention.cu, cuda_forward.cu.
"""

import functools
import importlib.resources
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from posttrainllm.adapters.loading.fused_llama import fused_llama_forward
from posttrainllm.adapters.loading.llama import Linear, LlamaLayer, LlamaShape, LlamaWeights
from posttrainllm.adapters.loading.nvrtc import Gpu, compile_cuda
from posttrainllm.kernel.cache import write_at
from posttrainllm.kernel.forward import Forward
from posttrainllm.kernel.state import KVCache

__all__ = ["cuda_llama_forward", "one_buffer", "plain_llama_forward", "unsupported"]

_SOURCES = ("cuda_llama.cu", "cuda_attention.cu", "cuda_forward.cu")
_FIELDS = ("norm", "qkv", "bias", "output", "mlp_norm", "gate_up", "down")  # of a layer, as the kernel has them
_THREADS = 512
_MOST_TOKENS = 64  # of a launch; more rows are several launches, a wider window takes plain operations
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
    if _most_tokens(shape, device) == 0:
        return f"a hidden size of {shape.hidden} does not fit shared memory"
    return None


def _linears(layer: LlamaLayer) -> tuple[Linear, ...]:
    return (layer.qkv, layer.output, layer.gate_up, layer.down)


def one_buffer(shape: LlamaShape) -> tuple[tuple[int, int, int], ...]:
    """Keys and then values of all layers as one buffer, [B, 2 * layers * H, C, D]; the other of the pair is empty."""
    return ((2 * shape.layers * shape.kv_heads, shape.head_size, 0),)


def plain_llama_forward(weights: LlamaWeights) -> Forward:
    """The same function in MLX operations: the kernel's reference, and the way of long windows.

    Args:
        weights: of the model.

    Returns:
        The pure forward; kv is as `one_buffer` says.
    """
    layers, fused = weights.shape.layers, fused_llama_forward(weights)

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        ((cached, empty),) = kv
        planes = mx.split(cached, 2 * layers, axis=1)
        logits, written = fused(tokens, tuple(zip(planes[:layers], planes[layers:], strict=True)), position)
        keys, values = zip(*written, strict=True)
        return logits, ((mx.concatenate([*keys, *values], axis=1), empty),)

    return forward


def cuda_llama_forward(weights: LlamaWeights, device: Gpu, folder: Path | None) -> Forward:
    """The forward through the kernel where the window is short, through `plain_llama_forward` where it is long.

    Args:
        weights: of a model for which `unsupported` returns None.
        device: the GPU.
        folder: where compiled kernels are kept; None keeps none.

    Returns:
        The pure forward; logits are float32 from the kernel, of the weights' dtype from the plain one.

    Raises:
        BackendError: the kernel cannot be compiled here.
    """
    shape, plain = weights.shape, plain_llama_forward(weights)
    frequencies = mx.array(shape.rope_frequencies, dtype=mx.float32)
    # a barrier and counters that the kernel leaves as it found them
    counters = mx.zeros((_COUNTERS,), dtype=mx.int32)
    mx.eval(frequencies, counters)
    shared = [weights.embedding.weight, weights.norm, weights.head.weight, counters]
    layers = [array for layer in weights.layers for array in _arrays(layer)]
    build = functools.cache(functools.partial(_kernel, weights, device, folder))
    most, counted = _most_tokens(shape, device), _COUNTERS - _BARRIER_COUNTERS
    build(_rows_for(1), _split_keys(1))  # what is wrong with it is said now, not in the middle of a request

    def launched(tokens: mx.array, cached: mx.array, position: mx.array, after: mx.array) -> tuple[mx.array, mx.array]:
        """Logits [B, W, V] and the window's own keys and values [B, 2 layers H, W, D], when `after` is there."""
        batch, width = tokens.shape
        planes, capacity = cached.shape[1:3]
        split = _split_keys(capacity)
        query_tiles = batch * shape.kv_heads * _query_tiles(shape, width)
        parts = query_tiles * -(-capacity // split) * 16 * (shape.head_size + 2) if capacity > split else 1
        count, dtype = batch * width, cached.dtype
        logits, fresh, *_ = mx.fast.precompiled_cuda_kernel(
            name="llama_forward",
            compiled_source=build(_rows_for(count), split),
            inputs=[tokens, position, frequencies, cached, *shared, after, *layers],
            output_shapes=[
                (batch, width, shape.vocab_size),
                (batch, planes, width, shape.head_size),
                (count, shape.hidden),
                (count, shape.heads * shape.head_size),
                (count, shape.heads * shape.head_size),
                (count, shape.mlp),
                (parts,),
            ],
            output_dtypes=[mx.float32, *[dtype] * 5, mx.float32],
            scalars=[batch, width, capacity],
            grid=(device.multiprocessors * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            shared_memory=_shared_bytes(shape, device),
            ensure_row_contiguous=True,
        )
        return logits, fresh

    def forward(tokens: mx.array, kv: KVCache, position: mx.array) -> tuple[mx.array, KVCache]:
        batch, width = tokens.shape
        together = min(most // width, counted // (shape.kv_heads * _query_tiles(shape, width)))  # rows a launch
        if together == 0:
            return plain(tokens, kv, position)
        ((cached, empty),) = kv
        # a row's bits are the same in any company, so more rows than fit are several launches
        found: list[tuple[mx.array, mx.array]] = []
        for first in range(0, batch, together):
            rows = slice(first, first + together)
            # one after the other: blocks of two launches that wait for their own others would fill the device and hang
            after = found[-1][1] if found else counters
            found.append(launched(tokens[rows], cached[rows], position[rows], after))
        logits, fresh = (mx.concatenate(list(each)) if len(found) > 1 else each[0] for each in zip(*found, strict=True))
        return logits, ((write_at(cached, fresh, position), empty),)

    return forward


def _query_tiles(shape: LlamaShape, width: int) -> int:
    """How often the kernel takes up 16 queries of a row and key head."""
    return -(-shape.heads // shape.kv_heads * width // 16)


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
    return (device.shared_bytes - shape.layers * 56 - 3072) // 128 * 128


def _rows_for(tokens: int) -> int:
    """How many tokens a product is built for."""
    return -(-tokens // 8) * 8


def _most_tokens(shape: LlamaShape, device: Gpu) -> int:
    """Tokens of a launch: no more than the inputs of a product in shared memory; 0 where none fits."""
    for rows in range(_MOST_TOKENS, 0, -8):
        sums = 4 * 2 * (1 if rows > 16 else 2) * 8 * rows * 8
        inputs = rows * (shape.hidden + 32) * 2
        angles = rows * shape.head_size * 4
        attention = 16 * 16 * (shape.head_size + 8) * 4 + 3 * 16 * 16 * 4 + 2 * 32 * 16 * 4 + 16  # AttentionShared
        if sums + angles + max(inputs, attention) <= _shared_bytes(shape, device):
            return rows
    return 0


def _kernel(weights: LlamaWeights, device: Gpu, folder: Path | None, rows: int, split: int) -> bytes:
    shape, bias = weights.shape, weights.layers[0].qkv.bias is not None
    names = [name for name in _FIELDS if bias or name != "bias"]
    parameters = "".join(f"const u16* {name}_{index}, " for index in range(shape.layers) for name in names)
    table = ", ".join(
        "{" + ", ".join(f"{name}_{index}" if name in names else "nullptr" for name in _FIELDS) + "}"
        for index in range(shape.layers)
    )
    defined = {
        "LAYERS": shape.layers,
        "HIDDEN": shape.hidden,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_SIZE": shape.head_size,
        "MLP": shape.mlp,
        "VOCAB": shape.vocab_size,
        "EPS": f"{shape.norm_eps!r}f",
        "HALF_IS_BF16": int(weights.norm.dtype == mx.bfloat16),
        "HAS_BIAS": int(bias),
        "ROWS": rows,
        "SPLIT_KEYS": split,
        "SHARED_BYTES": _shared_bytes(shape, device),
        "PARAMETERS": parameters,
        "TABLE": table,
    }
    folder_of_sources = importlib.resources.files("posttrainllm.adapters.loading")
    lines = [f"#define {name} {value}" for name, value in defined.items()]
    source = "\n".join([*lines, *((folder_of_sources / name).read_text(encoding="utf-8") for name in _SOURCES)])
    return compile_cuda(source, [f"--gpu-architecture=sm_{device.major}{device.minor}a", "-std=c++17"], folder)
