"""Contenders that run in a process of their own and take turns with the others; only one computes at a time."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

from posttrainllm.evals.bench.contenders import Engines
from posttrainllm.evals.bench.simulated import Script
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["Child", "ChildContender", "running_child"]

# what loading a BLAS sets for this process; a library as installed knows nothing of it
_OURS = ("GOMP_SPINCOUNT", "POSTTRAINLLM_BLAS")


class Child:
    """A process that decodes prompts, by `child_loop`'s protocol.

    Args:
        name: for messages.
        process: started, its standard input and output are pipes.
        log: what it writes to standard error.

    Raises:
        PosttrainllmError: it cannot take part; the message is its own.
    """

    def __init__(self, name: str, process: "subprocess.Popen[str]", log: IO[bytes]) -> None:
        self._name, self._process, self._log = name, process, log
        self.facts = self.read()
        """What it says of itself."""

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a line and wait for the answer.

        Args:
            request: for JSON.

        Returns:
            The answer.

        Raises:
            PosttrainllmError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise PosttrainllmError(f"{self._name}: {value['error']}")
        return value

    def _ended(self) -> PosttrainllmError:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        said = lines[-1] if lines else "it said nothing"
        return PosttrainllmError(f"{self._name} ended with status {status}: {said}")


@contextlib.contextmanager
def running_child(name: str, module: str, arguments: Sequence[str], *, python: str | None = None) -> Iterator[Child]:
    """Run a module of this package for as long as it is needed.

    Args:
        name: for messages.
        module: such as "child_mlx_lm".
        arguments: of its command line.
        python: interpreter; None for this one.

    Yields:
        The process, loaded.

    Raises:
        PosttrainllmError: it cannot take part.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _OURS}
    command = [python or sys.executable, "-m", f"posttrainllm.evals.bench.{module}", *arguments]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        try:
            yield Child(name, process, log)
        finally:
            process.kill()


class ChildContender:
    """One way to decode in such a process.

    Args:
        child: the process; several contenders may share it.
        name: of the row.
        engine: whose it is.
        draft_k: K; 0 without a draft.
        script: what the draft follows; None for a draft of its own mind.
    """

    def __init__(
        self, child: Child, *, name: str, engine: Engines, draft_k: int = 0, script: Script | None = None
    ) -> None:
        self._child, self.name, self.engine, self.draft_k, self.script = child, name, engine, draft_k, script
        self.facts = child.facts
        """What its process says of itself."""
        self.ids: list[int] = []
        self.steps: list[tuple[int, int]] = []

    def begin(self, prompt: Sequence[int], count: int) -> None:
        """See `Contender`."""
        wanted = None
        if self.script is not None:
            self.script.turn_to(prompt)
            wanted = self.script.current(len(prompt) + count).tolist()
        answer = self._child.ask(prompt=list(prompt), count=count, draft_k=self.draft_k, wanted=wanted)
        self.ids, self.steps = answer["ids"], []

    def finish(self) -> None:
        """See `Contender`."""
        answer = self._child.ask()
        self.ids, self.steps = answer["ids"], [(proposed, accepted) for proposed, accepted in answer["steps"]]
