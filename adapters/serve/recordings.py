"""Traces of what is served, a file a choice."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.replay.writer import TraceWriter
from posttrainllm.adapters.rows import RowRequest, RowStep
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.jobs import Job
from posttrainllm.kernel.errors import TraceError

__all__ = ["Recording", "Recordings"]


class Recording:
    """The trace of one choice. What cannot be written is given up with a warning: the answer matters more.

    Args:
        path: its file.
        request_id: what the header says.
        fingerprints: of the models.
    """

    def __init__(self, path: Path, request_id: str, fingerprints: Mapping[str, str]) -> None:
        self._path, self._request_id, self._fingerprints = path, request_id, fingerprints
        self._writer: TraceWriter | None = None

    def begin(self, engine: Engine, number: int, request: RowRequest) -> None:
        """The choice has its row."""
        try:
            self._writer = TraceWriter(self._path)
            self._writer.begin(engine, number, request, fingerprints=self._fingerprints, request_id=self._request_id)
        except (TraceError, OSError) as error:
            self._give_up(error)

    def step(self, step: RowStep) -> None:
        """What its next step did."""
        if self._writer is None:
            return
        try:
            self._writer.step(step)
        except (TraceError, OSError) as error:
            self._give_up(error)

    def end(self, reason: str | None) -> None:
        """Why it left its row; None where it failed, and the trace ends without an end."""
        if self._writer is None:
            return
        try:
            if reason is not None:
                self._writer.end(reason)
            self._writer.close()
        except (TraceError, OSError) as error:
            self._give_up(error)
        self._writer = None

    def _give_up(self, error: Exception) -> None:
        LOGGER.warning("%s is not recorded: %s", self._request_id, error)
        if self._writer is not None:
            with suppress(TraceError, OSError):  # said already
                self._writer.close()
        self._writer = None


class Recordings:
    """Where traces go.

    Args:
        folder: of --record-dir; None records nothing.
        fingerprints: of the pair, hashed once.
    """

    def __init__(self, folder: Path | None, fingerprints: Mapping[str, str]) -> None:
        self._folder, self._fingerprints = folder, fingerprints

    def start(self, job: Job) -> Recording | None:
        """The recording of a choice, in a file named after it; None where nothing is recorded."""
        if self._folder is None:
            return None
        path = self._folder / f"{job.request_id}-{job.index}.jsonl"
        return Recording(path, job.request_id, self._fingerprints)
