"""A `posttrainllm serve` of one's own, for as long as it is measured."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

import httpx2

from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["running_server"]

_POLL_S = 0.1
_DRAIN_S = 40.0  # the server gives what is under way 30 s


@contextmanager
def running_server(arguments: Sequence[str], *, start_s: float = 600.0) -> Iterator[str]:
    """Start a server on a free port, wait until it answers, and stop it in the end.

    Args:
        arguments: of `posttrainllm serve`, without host and port.
        start_s: how long it may load and compile.

    Yields:
        Its URL.

    Raises:
        PosttrainllmError: it ended, or did not answer in time.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "posttrainllm", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            _wait(url, process, log, start_s)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_DRAIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _wait(url: str, process: "subprocess.Popen[bytes]", log: IO[bytes], start_s: float) -> None:
    until = time.monotonic() + start_s
    with httpx2.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise PosttrainllmError(
                    f"the server ended with status {process.returncode} before it answered: {_last_line(log)}"
                )
            try:
                if client.get(f"{url}/health").status_code == httpx2.codes.OK:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(_POLL_S)
    raise PosttrainllmError(f"the server did not answer within {start_s:.0f} s: {_last_line(log)}")


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
