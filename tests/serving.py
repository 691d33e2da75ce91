"""A real server process for tests, and the smallest client that shows everything it says."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai

_START_S = 300.0  # a first run compiles kernels


class ServerProcess:
    """`posttrainllm serve` on a free port, with a cache of its own; leaving it asks it to stop.

    Args:
        folder: where its log and its cache go.
        options: of the command.
        program: run instead of the package, to put a fault in.
        environment: added to ours.
    """

    def __init__(self, folder: Path, *options: str, program: str | None = None, **environment: str) -> None:
        self.log_file = folder / "serve.log"
        start = ["-m", "posttrainllm"] if program is None else ["-c", program]
        self.process = subprocess.Popen(
            [sys.executable, *start, "serve", "--port", "0", *options],
            stdout=subprocess.DEVNULL,
            stderr=self.log_file.open("wb"),
            env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
        )
        self.url = ""

    @property
    def log(self) -> str:
        """What it has written to standard error."""
        return self.log_file.read_text(encoding="utf-8")

    def wait_until_ready(self) -> "ServerProcess":
        """Return once it answers; its log is in the error where it does not."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"on (http://\S+)/v1", self.log)
            if found:
                self.url = found[1]
                try:
                    if httpx.get(f"{self.url}/health").status_code == 200:
                        return self
                except httpx.TransportError:
                    pass
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start, status {self.process.poll()}:\n{self.log}")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST JSON and wait for the answer."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return httpx.get(f"{self.url}{path}", timeout=30, **options)

    def client(self, key: str = "none") -> openai.OpenAI:
        """OpenAI's own client, which tries once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def stop(self, number: int = signal.SIGTERM, *, seconds: float = 60) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def __enter__(self) -> "ServerProcess":
        return self.wait_until_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_for(condition: Any, *, seconds: float = 30) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
