"""A checkpoint of a stated shape with random weights, in Hugging Face layout, to be loaded like any other.

The layers add little to the residual stream and the head is the embedding, so such a model repeats its last token, with
a margin that no rounding reaches: contenders that round differently still decode the same ids.
"""

import json
import math
import shutil
from pathlib import Path

import mlx.core as mx

from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.evals.bench.shapes import Shape

__all__ = ["write_shape"]

_EMBEDDING_SCALE = 0.02
_SHARD_BYTES = 2**29


def write_shape(shape: Shape, folder: Path, *, seed: int) -> Path:
    """Write a model directory that loads like a downloaded one.

    Args:
        shape: what to write.
        folder: made here; it must not exist.
        seed: of the weights.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=1), encoding="utf-8")
    _write_tokenizer(folder, shape)
    shards: list[dict[str, mx.array]] = [{}]
    key, size = mx.random.key(seed), 0
    for name, dimensions in shape.tensors().items():
        key, own = mx.random.split(key)
        array = _draw(shape, name, dimensions, own)
        if size + array.nbytes > _SHARD_BYTES:
            shards, size = [*shards, {}], 0
        shards[-1][name], size = array, size + array.nbytes
    where: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        mx.save_safetensors(str(folder / file), shard, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
        shard.clear()  # written: the arrays need not wait for the others
    total = sum(map(math.prod, shape.tensors().values())) * getattr(mx, shape.dtype).size
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
    (folder / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    return folder


def _draw(shape: Shape, name: str, dimensions: tuple[int, ...], key: mx.array) -> mx.array:
    """A lazy random weight; the matrices that write to the residual stream add half of an embedding's size in all."""
    dtype = getattr(mx, shape.dtype)
    if len(dimensions) == 1:
        return mx.ones(dimensions, dtype=dtype)
    writes = name.endswith(("o_proj.weight", "down_proj.weight"))
    scale = _EMBEDDING_SCALE * (0.5 / (2 * shape.layers * dimensions[1]) ** 0.5 if writes else 1.0)
    return mx.random.normal(dimensions, dtype=mx.float32, scale=scale, key=key).astype(dtype)


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """The embedded pair's tokenizer, filled up with pieces that no text has."""
    source = embedded_path("target-16m")
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<unused {index}>": index for index in range(len(vocabulary), shape.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    shutil.copy(source / "tokenizer_config.json", folder / "tokenizer_config.json")
