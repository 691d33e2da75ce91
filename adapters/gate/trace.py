"""A trace of the request that broke, to replay."""

from collections.abc import Callable
from pathlib import Path

from posttrainllm.adapters.batch import decode
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.replay.writer import TraceWriter
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["write_trace"]


def write_trace(
    engine: Engine, request: RowRequest, file: Path, *, advance: Callable[[int], None] = lambda _: None
) -> str | None:
    """Decode one request again, alone in its batch, and record it.

    Args:
        engine: of the path that broke, with every row idle.
        request: what broke.
        file: where the trace goes; its folder is made.
        advance: as `decode` calls it. Nothing is written before the last call, so that what it raises leaves no file.

    Returns:
        The file, or None where no trace can be written: the verdict matters more.
    """
    (steps,) = decode(engine, [request], advance=advance, ends_at_non_finite=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TraceWriter(file) as writer:
            writer.begin(engine, 0, request)
            for step in steps:
                writer.step(step)
            if steps[-1].tokens:  # the fault may be that nothing is emitted any more
                writer.end("length")
    except (OSError, PosttrainllmError):
        return None
    return str(file)
