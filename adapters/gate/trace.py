"""A trace of the request that broke, to replay."""

from pathlib import Path

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.replay.writer import TraceWriter
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["write_trace"]


def write_trace(engine: Engine, request: RowRequest, file: Path) -> str | None:
    """Decode one request again, alone in its batch, and record it.

    Args:
        engine: of the path that broke, with every row idle.
        request: what broke.
        file: where the trace goes; its folder is made.

    Returns:
        The file, or None where no trace can be written: the verdict matters more.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        engine.insert(0, request)
        left = request.limit - len(request.prompt)
        with TraceWriter(file) as writer:
            writer.begin(engine, 0, request)
            while left > 0:
                step = engine.step()[0]
                writer.step(step)
                left -= len(step.tokens)
                if not step.tokens:  # the fault may be that nothing is emitted any more
                    return str(file)
            writer.end("length")
    except (OSError, PosttrainllmError):
        return None
    return str(file)
