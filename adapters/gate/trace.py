"""A trace of the request that broke, to replay."""

from pathlib import Path

from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.replay.writer import record
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["write_trace"]


def write_trace(pair: Pair, shape: Shape, request: RowRequest, file: Path) -> str | None:
    """Decode one request again in the shapes of the run, alone in its batch, and record it.

    Args:
        pair: with its draft.
        shape: of the run.
        request: what broke.
        file: where the trace goes; its folder is made.

    Returns:
        The file, or None where no trace can be written: the verdict matters more.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        record(file, pair, request, width=shape.width, capacity=shape.capacity, rows=shape.rows, diagnostics=True)
    except (OSError, PosttrainllmError):
        return None
    return str(file)
