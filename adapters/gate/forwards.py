"""A forward of our own against mlx-lm's module: the one fault that a reference cannot show is one that it shares."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from posttrainllm.adapters.gate.findings import NO_NUMBER, ForwardCheck
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.probes import histories
from posttrainllm.adapters.gate.scoring import Ids, Scorer
from posttrainllm.adapters.loading.memory import check_room
from posttrainllm.adapters.loading.module import Model, model_from_module
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.kernel.errors import MemoryLimitError

__all__ = ["compare_with_module"]

# of the largest logit; a GPU multiplies float32 matrices in tf32, which has the mantissa of float16
_LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
_LIMIT_TF32 = 2e-2


def compare_with_module(pair: Pair, texts: Sequence[Sequence[int]], shape: Shape) -> ForwardCheck | None:
    """Feed both the same histories, at the width of the run.

    Args:
        pair: its target is compared; its module is loaded for it.
        texts: ids of one or more texts.
        shape: of the run.

    Returns:
        What was found; None where the target is computed by the module anyway, or the module does not fit beside it.

    Raises:
        LoadError: mlx-lm cannot load the target.
    """
    ours, runtime = pair.target, pair.runtime
    if ours.variant.startswith("module") or ours.module_loader is None:
        return None
    try:
        caches = 4 * shape.rows * ours.kv_bytes(shape.capacity)  # of each an old and a new one
        check_room(ours.weight_bytes + caches, "mlx-lm's module beside a forward of ours")
    except MemoryLimitError:
        return None
    module = ours.module
    assert module is not None
    theirs = model_from_module(module, name=ours.name, dtype=ours.dtype, context=ours.context)
    ids = histories(texts, shape, min(ours.context, shape.capacity - 1))
    ids = ids[:, : ids.shape[1] // shape.width * shape.width]
    difference = _difference(ours, theirs, ids, shape, compiled=runtime.compiled, columns=pair.vocab_size)
    limit = _LIMIT_TF32 if runtime.device == "gpu" and ours.dtype == "float32" else _LIMITS[ours.dtype]
    return ForwardCheck(variant=ours.variant, difference=difference, limit=limit)


def _difference(ours: Model, theirs: Model, ids: Ids, shape: Shape, *, compiled: bool, columns: int) -> float:
    """Largest difference of a logit that decoding reads, as a part of the largest one of mlx-lm's."""
    scorers = (Scorer(model, capacity=shape.capacity, compiled=compiled) for model in (ours, theirs))
    worst = largest = 0.0
    for one, other in zip(*(scorer.forced(ids, shape.width) for scorer in scorers), strict=True):
        apart = mx.max(mx.abs(one[..., :columns] - other[..., :columns]))
        # written so that what is no number is the worst
        worst = max(float(np.array(apart)), worst) if np.isfinite(np.array(apart)) else float("inf")
        largest = max(float(np.array(mx.max(mx.abs(other[..., :columns])))), largest)
    return worst / largest if np.isfinite(worst) and largest > 0 else NO_NUMBER
