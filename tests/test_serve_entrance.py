"""Clients are taken while there is a place for them, and the others wait."""

import asyncio
import errno
import logging
import socket
import time
from contextlib import ExitStack

import pytest
import uvicorn

from posttrainllm.adapters.serve import entrance
from posttrainllm.adapters.serve.connection import guarded_protocol
from posttrainllm.adapters.serve.doors import DoorLimits, Doors


class Places:
    """Places that a test gives and takes."""

    def __init__(self, places):
        self.places = places


class Listener:
    """A socket for whose clients the system has no file at first."""

    def __init__(self, listener, failures):
        self.listener, self.failures = listener, failures

    def accept(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()

    def __getattr__(self, name):
        return getattr(self.listener, name)


class Guest(asyncio.Protocol):
    def __init__(self, doors):
        self.doors = doors

    def connection_made(self, transport):
        self.doors.places -= 1
        transport.write(b"in")


async def taken(clients, places, *, failures=0, more=0):
    """How many of so many clients are taken with so many places, and how many once there are more."""
    doors, counts = Places(places), []
    with ExitStack() as kept, socket.create_server(("127.0.0.1", 0), backlog=clients) as listener:
        door = entrance._Entrance(Listener(listener, failures), lambda: Guest(doors), doors)
        guests = [kept.enter_context(socket.create_connection(listener.getsockname())) for _ in range(clients)]
        for given in (0, more):
            doors.places += given
            await asyncio.sleep(0.2)
            counts.append(sum(map(is_in, guests)))
        door.close()
    return counts


def is_in(guest):
    guest.setblocking(False)
    try:
        return guest.recv(2, socket.MSG_PEEK) == b"in"
    except BlockingIOError:
        return False


@pytest.mark.parametrize("places", [0, 1, 64, 150])
def test_no_more_are_taken_than_there_are_places_and_the_others_once_there_are(places):
    assert asyncio.run(taken(200, places, more=200 - places)) == [places, 200]


def test_all_are_taken_where_there_are_places():
    assert asyncio.run(taken(200, 500)) == [200, 200]


def test_where_the_system_has_no_file_for_a_client_one_line_says_so_and_it_is_taken_later(monkeypatch, caplog):
    monkeypatch.setattr(entrance, "_FAILED_S", 0.02)
    with caplog.at_level(logging.WARNING, "posttrainllm"):
        assert asyncio.run(taken(10, 20, failures=5)) == [10, 10]
    assert [record.getMessage() for record in caplog.records] == [
        "cannot take another connection: Too many open files; the next try is in 0.02 s"
    ]


async def silent_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def heard_after_a_look(limits, said, *, clients):
    """What each of so many clients hears that say something while the loop is busy, which then looks at once."""
    doors = Doors(limits)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as kept:
        config = uvicorn.Config(silent_app, http=guarded_protocol(doors), lifespan="off", ws="none", log_config=None)
        server = entrance.GuardedServer(config, doors, listener)
        serving = asyncio.create_task(server.serve())
        guests = [kept.enter_context(socket.create_connection(listener.getsockname())) for _ in range(clients)]
        while len(doors) < clients:
            await asyncio.sleep(0.001)
        doors._look()  # begins the clocks
        time.sleep(1.1)
        for guest in guests:
            guest.sendall(said)
        doors._look()
        heard = [await asyncio.to_thread(receive, guest) for guest in guests]
        server.should_exit = True
        await serving
    return heard


def receive(guest):
    guest.settimeout(1)
    try:
        return guest.recv(12)
    except TimeoutError:
        return b"nothing"


@pytest.mark.parametrize(
    "limits", [DoorLimits(header_s=1), DoorLimits(connections=2)], ids=["no time is left", "no place is left"]
)
def test_whose_request_has_come_is_answered_though_a_busy_loop_has_not_read_it(limits):
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    assert asyncio.run(heard_after_a_look(limits, request, clients=4)) == [b"HTTP/1.1 204"] * 4


@pytest.mark.parametrize(
    ("limits", "heard"),
    [(DoorLimits(header_s=1), [b""] * 4), (DoorLimits(connections=2), [b"", b"", b"nothing", b"nothing"])],
    ids=["no time is left", "no place is left"],
)
def test_who_has_sent_nothing_is_cut(limits, heard):
    assert sorted(asyncio.run(heard_after_a_look(limits, b"", clients=4))) == heard
