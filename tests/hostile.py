"""Clients that mean no good, a function a kind: they go on in a process of their own until it is told to stop."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

__all__ = ["ABUSES", "going_on"]

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_PATHS = ("/v1/completions", "/v1/chat/completions", "/api/chat", "/api/generate", "/health", "/nowhere")


class Abuse:
    """What an abuse may use: connections to a server, and whether to go on.

    Args:
        port: of the server that is abused.
        seed: of its choices.
        over: set when it has to end.
    """

    def __init__(self, port: int, seed: int, over: threading.Event) -> None:
        self.address, self.draw, self.over = ("127.0.0.1", port), random.Random(seed), over
        self.count = 0
        """Requests or connections so far."""

    @contextmanager
    def connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(self.address, timeout=5) as connection:
            self.count += 1
            yield connection

    def send(self, content: bytes) -> bytes:
        """Send, and read what comes back, as far as the server lets us."""
        with suppress(OSError), self.connection() as connection:
            with suppress(OSError):  # it need not read to the end
                connection.sendall(content)
            return connection.recv(4096)
        return b""

    def post(self, body: bytes) -> bytes:
        head = b"%scontent-length: %d\r\nconnection: close\r\n\r\n" % (_HEAD, len(body))
        return self.send(head + body)

    def trickle(self, first: bytes, rest: bytes) -> None:
        """A byte at a time."""
        with suppress(OSError), self.connection() as connection:
            connection.sendall(first)
            for byte in rest:
                if self.over.wait(0.05):
                    return
                connection.sendall(bytes([byte]))


def slow_headers(abuse: Abuse) -> None:
    abuse.trickle(b"", _HEAD + b"x: " + b"y" * 1000)


def slow_body(abuse: Abuse) -> None:
    abuse.trickle(_HEAD + b"content-length: 5000\r\n\r\n", b" " * 5000)


def body_after_the_answer(abuse: Abuse) -> None:
    """The answer is there at once; the body goes on."""
    abuse.trickle(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n", b" " * 5000)


def half_open(abuse: Abuse) -> None:
    """Many that send nothing, or stop somewhere, and are kept open."""
    with ExitStack() as kept:
        for _ in range(100):
            with suppress(OSError):
                connection = kept.enter_context(abuse.connection())
                content = _HEAD + b'content-length: 100\r\n\r\n{"prompt": '
                connection.sendall(content[: abuse.draw.choice([0, 1, 30, len(content) - 1, len(content)])])
            if abuse.over.is_set():
                return
        abuse.over.wait(1)


def unread(abuse: Abuse) -> None:
    """Asks for two megabytes, and reads none of them."""
    with suppress(OSError), abuse.connection() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 50)
        abuse.over.wait(2)


def large_bodies(abuse: Abuse) -> None:
    """20 MB, declared or not, and told to be less."""
    content = b'{"prompt": "' + b"x" * 20_000_000 + b'"}'
    if abuse.draw.random() < 0.5:
        abuse.post(content)
    else:
        chunk = b"%x\r\n%s\r\n" % (len(content), content)
        abuse.send(_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n")


def long_prompts(abuse: Abuse) -> None:
    """200,000 words, which are within the bytes of a body here or beyond them; and as many ids."""
    words = " ".join(abuse.draw.choice(["a", "an", "the", "loop"]) for _ in range(200_000))
    abuse.post(json.dumps({"prompt": words}).encode())
    abuse.post(json.dumps({"prompt": [7] * 200_000}).encode())


def many_stops(abuse: Abuse) -> None:
    stops = [f"stop {number}" for number in range(10_000)]
    abuse.post(json.dumps({"prompt": "x", "stop": stops, "max_tokens": 4}).encode())
    abuse.post(json.dumps({"prompt": "x", "stop_token_ids": list(range(10_000)), "max_tokens": 4}).encode())


def deep(abuse: Abuse) -> None:
    depth = abuse.draw.choice([65, 1000, 100_000])
    abuse.post(b'{"prompt": "x", "metadata": {"a": %s1%s}}' % (b"[" * depth, b"]" * depth))
    abuse.post(b'{"a":' * depth)


def huge_numbers(abuse: Abuse) -> None:
    number = abuse.draw.choice([b"9" * 4000, b"1e400", b"-1e400", b"1e-400", b"9" * 101, b"NaN", b"0." + b"1" * 4000])
    field = abuse.draw.choice([b"max_tokens", b"temperature", b"seed", b"n", b"top_k", b"logprobs"])
    abuse.post(b'{"prompt": "x", "max_tokens": 2, "%s": %s}' % (field, number))


def no_text(abuse: Abuse) -> None:
    """Bytes that are no UTF-8, halves of surrogate pairs, and what is no JSON."""
    noise = bytes(abuse.draw.randrange(256) for _ in range(2000))
    abuse.post(abuse.draw.choice([noise, b'{"prompt": "%s"}' % noise, b'{"prompt": "\\ud800"}', b"\x00" * 2000]))


def pipelined(abuse: Abuse) -> None:
    """Many requests at once on one connection, whose answers are not waited for."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    one = _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    abuse.send((one + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") * 20)


def no_http(abuse: Abuse) -> None:
    """Nonsense in place of a request line, a header, a length or a chunk."""
    body = b'{"prompt": "x"}'
    abuse.send(
        abuse.draw.choice(
            [
                bytes(abuse.draw.randrange(256) for _ in range(200)) + b"\r\n\r\n",
                b"GET \xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
                b"GET /%ff%00%zz HTTP/1.1\r\nhost: x\r\n\r\n",
                b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
                b"GET http://[::1/ HTTP/1.1\r\nhost: x\r\n\r\n",
                _HEAD + b"content-length: -1\r\n\r\n" + body,
                _HEAD + b"content-length: 15\r\ncontent-length: 16\r\n\r\n" + body,
                _HEAD + b"content-length: 15\r\ntransfer-encoding: chunked\r\n\r\n" + body,
                _HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + body,
                _HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + body,
                _HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"x" * 100_000,
                _HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
                _HEAD + b"expect: 100-continue\r\ncontent-length: 15\r\n\r\n" + body,
                _HEAD + b"upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 0\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            ]
        )
    )


def long_headers(abuse: Abuse) -> None:
    """One of a megabyte, thousands of them, and a path without end."""
    many = b"".join(b"x-%d: y\r\n" % number for number in range(20_000))
    for head in (b"x: " + b"y" * 10**6, many, b"authorization: Bearer " + b"z" * 60_000):
        abuse.send(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
    abuse.send(b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\nhost: x\r\n\r\n")


def come_and_go(abuse: Abuse) -> None:
    """Connections by the hundred, closed or reset at once."""
    for _ in range(100):
        with suppress(OSError), abuse.connection() as connection:
            if abuse.draw.random() < 0.5:
                connection.sendall(f"GET {abuse.draw.choice(_PATHS)} HTTP/1.1\r\n".encode())


ABUSES: tuple[Callable[[Abuse], None], ...] = (
    *(slow_headers, slow_body, body_after_the_answer, half_open, unread, large_bodies, long_prompts, many_stops, deep),
    *(huge_numbers, no_text, pipelined, no_http, long_headers, come_and_go),
)


_BY_NAME = {kind.__name__: kind for kind in ABUSES}


@contextmanager
def going_on(server: Any, kinds: tuple[Callable[[Abuse], None], ...], threads: int) -> Iterator[list[int]]:
    """Abuse a server meanwhile, in so many threads a kind, once each of them has begun.

    Yields:
        A list, which has the requests and connections of each thread once it is over.
    """
    port, counts = server.url.rpartition(":")[2], []
    names = [kind.__name__ for kind in kinds]
    process = subprocess.Popen(
        [sys.executable, __file__, port, str(threads), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    with process:
        assert process.stdout.readline() == "begun\n"
        try:
            yield counts
        finally:
            counts += json.loads(process.communicate("", timeout=120)[0])
    assert process.returncode == 0


def _main(port: str, threads: str, *names: str) -> None:
    over = threading.Event()

    def again(abuse: Abuse, kind: Callable[[Abuse], None]) -> None:
        while not over.is_set():
            kind(abuse)
            over.wait(0.02)

    kinds = [_BY_NAME[name] for name in names for _ in range(int(threads))]
    abuses = [Abuse(int(port), number, over) for number in range(len(kinds))]
    workers = [threading.Thread(target=again, args=pair) for pair in zip(abuses, kinds, strict=True)]
    for worker in workers:
        worker.start()
    while not all(abuse.count for abuse in abuses):
        over.wait(0.02)
    print("begun", flush=True)
    sys.stdin.read()
    over.set()
    for worker in workers:
        worker.join()
    print(json.dumps([abuse.count for abuse in abuses]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
