"""Which scaling of Llama 3 the numbers of `rope_freqs.weight` are: the file has them in place of its settings."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["llama3_scaling"]

_LOW, _HIGH, _TRAINED = 1.0, 4.0, 8192  # of every Llama 3.1, 3.2 and 3.3
_TOLERANCE = 1e-4


def llama3_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the settings.

    Args:
        header: of a file with that tensor.
        config: with `rope_theta` and `head_dim`.

    Returns:
        What transformers and mlx-lm call `rope_scaling`.

    Raises:
        CheckpointError: the tensor has another shape or type.
        UnsupportedModelError: no setting that is known gives these numbers.
    """
    size, base = config["head_dim"], config["rope_theta"]
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.type.name != "F32" or tensor.shape != (size // 2,):
        got = f"{tensor.type.name} {list(tensor.shape)}"
        raise CheckpointError(f"{header.path}: rope_freqs.weight: got {got}, expected F32 {[size // 2]}")
    with header.path.open("rb") as stream:
        stream.seek(tensor.offset)
        stored = np.frombuffer(stream.read(tensor.size), dtype="<f4")
    factor = float(stored.max(initial=0.0))
    if math.isfinite(factor) and factor >= 1:
        expected = [_slower(2 * math.pi * base ** (2 * index / size), factor) for index in range(size // 2)]
        if np.allclose(stored, expected, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": _TRAINED,
            }
    raise UnsupportedModelError(
        f"{header.path}: rope_freqs.weight: got numbers up to {factor:g}, expected those of Llama 3's scaling"
    )


def _slower(wave: float, factor: float) -> float:
    """By how much a wave of so many positions turns slower: long ones by the factor, short ones not at all."""
    if wave > _TRAINED / _LOW:
        return factor
    if wave < _TRAINED / _HIGH:
        return 1.0
    kept = (_TRAINED / wave - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - kept) / factor + kept)
