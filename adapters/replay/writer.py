"""Writing a trace: a line a step, in the file before the next step is read.

`posttrainllm sample --record FILE` does it for one request. From Python, one prompt with an engine of its own:

    steps = record("trace.jsonl", pair, request, width=5, capacity=256)

or any row of an engine that is stepped elsewhere, however many rows it has:

    with TraceWriter("trace.jsonl") as writer:
        engine.insert(row, request)
        writer.begin(engine, row, request)
        while ...:
            writer.step(engine.step()[row])
        writer.end("length")

`posttrainllm replay FILE` needs the directories that the models came from; passing `describe.fingerprints_of(pair)` as
`fingerprints` spares hashing them again for every trace.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.replay.describe import header_of, step_record
from posttrainllm.adapters.replay.trace import Header
from posttrainllm.kernel.errors import NonFiniteError, TraceError

if TYPE_CHECKING:  # they import MLX, and the BLAS must come first
    from posttrainllm.adapters.engine import Engine
    from posttrainllm.adapters.rows import RowRequest, RowStep

__all__ = ["TraceWriter", "record"]


class TraceWriter:
    """Records one row of an engine. Each line is one write, so that a kill leaves whole lines before the last.

    Args:
        path: the file; what it held is lost when `begin` writes.

    Raises:
        TraceError: it cannot be written. So do the methods.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._header: Header | None = None
        self._steps = 0
        try:
            # what the file held is lost in begin(), once there is something in its place
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 # closed by close()
        except (OSError, ValueError) as error:
            raise self._failed(error) from None

    def begin(
        self,
        engine: "Engine",
        row: int,
        request: "RowRequest",
        *,
        fingerprints: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> None:
        """Write the header.

        Args:
            engine: what steps the row.
            row: which of its rows.
            request: what was, or will be, inserted there.
            fingerprints: of `fingerprints_of`; None hashes the models' files now.
            request_id: of the server that decodes it, one line of text; None where there is none.
        """
        self._header = header_of(engine, row, request, fingerprints=fingerprints, request_id=request_id)
        with suppress(OSError):  # a pipe has no length
            self._file.truncate(0)
        self._write(self._header.to_json())

    def step(self, step: "RowStep") -> None:
        """Write what the row's next step did.

        Args:
            step: of `Engine.step`.
        """
        assert self._header is not None, "begin() writes the header first"
        self._write(step_record(self._steps, step, self._header).to_json(self._header))
        self._steps += 1

    def end(self, reason: str) -> None:
        """Say why the run ended, and close the file.

        Args:
            reason: "length", "stop" or "cancelled".
        """
        # Ctrl-C may have come between a step's line and its count
        if self._header is not None:  # else it came while the models were hashed, and there is nothing to end
            self._write({"end": reason} if reason == "cancelled" else {"end": reason, "steps": self._steps})
        self.close()

    def close(self) -> None:
        """Close the file; a trace without an end replays as far as it goes."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from None

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            written = self._file.write(data)
        except (OSError, ValueError) as error:
            raise self._failed(error) from None
        if written != len(data):
            raise TraceError(f"{self._path}: got {written} bytes written, expected {len(data)}: is the disk full?")

    def _failed(self, error: Exception) -> TraceError:
        return TraceError(f"{self._path}: cannot be written: {getattr(error, 'strerror', None) or error}")


def record(
    path: str | Path,
    pair: Pair,
    request: "RowRequest",
    *,
    width: int,
    capacity: int,
    rows: int = 1,
    row: int = 0,
    diagnostics: bool = False,
    fingerprints: Mapping[str, str] | None = None,
) -> list["RowStep"]:
    """Decode one request to its limit on an engine of its own, and record it.

    Args:
        path: the file; what it held is lost when `begin` writes.
        pair: the models; without a draft the run is plain.
        request: what to decode; nothing ends it early.
        width: W.
        capacity: C.
        rows: B; the others stay idle.
        row: which of them.
        diagnostics: whether to record logit margins.
        fingerprints: of `fingerprints_of`; None hashes the models' files now.

    Returns:
        The steps.

    Raises:
        CapacityError: the request does not fit.
        NonFiniteError: the target's logits were not finite; that step is the last one recorded.
        TraceError: the file cannot be written.
    """
    from posttrainllm.adapters.engine import Engine

    engine = Engine(pair, capacity=capacity, width=width, rows=rows, diagnostics=diagnostics)
    engine.insert(row, request)
    steps: list[RowStep] = []
    left = request.limit - len(request.prompt)
    with TraceWriter(path) as writer:
        writer.begin(engine, row, request, fingerprints=fingerprints)
        while left > 0:
            steps.append(engine.step()[row])
            writer.step(steps[-1])
            if not steps[-1].finite:
                raise NonFiniteError(f"step {len(steps) - 1}: the target's logits are not finite")
            left -= len(steps[-1].tokens)
        writer.end("length")
    return steps
