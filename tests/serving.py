"""A real server process for tests, and the smallest client that shows everything it says."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import httpx2 as httpx
import openai

_JSON = "application/json"
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
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *start, "serve", "--port", "0", *options],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
            )
        self.url = ""
        self.headers: dict[str, str] = {}
        """Sent with every request, as a key is."""
        self._http = httpx.Client(timeout=120, verify=False)  # one for all: making it is what costs

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
                    if self.get("/health").status_code == 200:
                        return self
                except httpx.TransportError:
                    pass
            time.sleep(0.05)
        self._kill()
        raise AssertionError(f"the server did not start, status {self.process.poll()}:\n{self.log}")

    def post(self, path: str, body: Any, *, headers: Mapping[str, str] = MappingProxyType({})) -> httpx.Response:
        """POST JSON and wait for the answer."""
        return self._http.post(f"{self.url}{path}", json=body, headers={**self.headers, **headers})

    def post_bytes(self, path: str, content: bytes, *, content_type: str | None = _JSON) -> httpx.Response:
        """POST what may be no JSON at all."""
        kind = {} if content_type is None else {"content-type": content_type}
        return self._http.post(f"{self.url}{path}", content=content, headers={**self.headers, **kind})

    def get(self, path: str, *, headers: Mapping[str, str] = MappingProxyType({})) -> httpx.Response:
        """GET."""
        return self._http.get(f"{self.url}{path}", headers={**self.headers, **headers})

    def raw(self, content: bytes) -> bytes:
        """Send bytes on a connection of their own; every byte that comes until the server closes it."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(content)
            return b"".join(iter(lambda: connection.recv(2**16), b""))

    @contextmanager
    def events(self, path: str, body: Any) -> Iterator[Iterator[Any]]:
        """POST for a stream: its events as JSON, "[DONE]" as it is, and comments in full."""
        with self._http.stream("POST", f"{self.url}{path}", json=body, headers=self.headers) as response:
            assert response.status_code == 200, response.read()
            yield (_event(line) for line in response.iter_lines() if line)

    def leave(self, path: str, body: Any, when: Callable[[socket.socket], object]) -> None:
        """POST, and drop the connection with no farewell once `when` returns, which is given the socket."""
        content = json.dumps(body).encode()
        host, port = self.url.removeprefix("http://").split(":")
        headers = {**self.headers, "host": host, "content-type": _JSON, "content-length": str(len(content))}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            when(connection)

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
        self._kill()

    def _kill(self) -> None:
        self._http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _event(line: str) -> Any:
    if line.startswith(":"):
        return line
    value = line.removeprefix("data: ")
    return value if value == "[DONE]" else json.loads(value)


def wait_for(condition: Any, *, seconds: float = 30) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
