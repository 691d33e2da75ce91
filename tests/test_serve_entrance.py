"""Clients are taken while there is a place for them, and the others wait."""

import asyncio
import errno
import logging
import socket
import time
from contextlib import ExitStack, asynccontextmanager

import pytest
import uvicorn

from posttrainllm.adapters.serve import entrance
from posttrainllm.adapters.serve.connection import guarded_protocol
from posttrainllm.adapters.serve.doors import DoorLimits, Doors


class Places:
    """Places that a test gives and takes."""

    def __init__(self, places):
        self.places, self.asked = places, 0

    def make_room(self, count):
        self.asked += count


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
    """How many are taken with so many places, how many once there are more, and how many others had to go for them."""
    doors, counts = Places(places), []
    with ExitStack() as kept, socket.create_server(("127.0.0.1", 0), backlog=clients) as listener:
        door = entrance._Entrance(Listener(listener, failures), lambda: Guest(doors), doors)
        guests = [kept.enter_context(socket.create_connection(listener.getsockname())) for _ in range(clients)]
        for given in (0, more):
            doors.places += given
            deadline = time.monotonic() + 10
            while doors.places and sum(map(is_in, guests)) < clients and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # in which no more may come
            counts.append(sum(map(is_in, guests)))
        await door.close()
    return [*counts, doors.asked]


def is_in(guest):
    guest.setblocking(False)
    try:
        return guest.recv(2, socket.MSG_PEEK) == b"in"
    except BlockingIOError:
        return False


@pytest.mark.parametrize("places", [0, 1, 64, 150])
def test_no_more_are_taken_than_there_are_places_and_the_others_once_there_are(places):
    assert asyncio.run(taken(200, places, more=200 - places)) == [places, 200, 0]


def test_all_are_taken_where_there_are_places():
    assert asyncio.run(taken(200, 500)) == [200, 200, 0]


def test_where_the_system_has_no_file_for_a_client_one_line_says_so_and_it_is_taken_later(monkeypatch, caplog):
    monkeypatch.setattr(entrance, "_FAILED_S", 0.02)
    with caplog.at_level(logging.WARNING, "posttrainllm"):
        assert asyncio.run(taken(10, 20, failures=5)) == [10, 10, 5]  # five asked to go
    assert [record.getMessage() for record in caplog.records] == [
        "cannot take another connection: Too many open files; the next try is in 0.02 s"
    ]


async def silent_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def patient_app(scope, receive, send):
    while (await receive())["type"] != "http.disconnect":
        pass


async def long_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(50_000_000)})  # more than the system holds for a client


@asynccontextmanager
async def let_in(app, limits, *, clients):
    """A server's doors and the sockets of its clients, which are all in."""
    doors = Doors(limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=guarded_protocol(doors), lifespan="off", ws="none", log_config=None)
        server = entrance.GuardedServer(config, doors, listener)
        serving = asyncio.create_task(server.serve())
        with ExitStack() as kept:
            guests = [kept.enter_context(socket.create_connection(listener.getsockname())) for _ in range(clients)]
            async with asyncio.timeout(10):
                while len(doors) < clients:
                    await asyncio.sleep(0.001)
            yield doors, guests
        server.should_exit = True
        await serving


async def heard_after_a_look(limits, said, *, clients):
    """What each of so many clients hears that say something while the loop is busy, which then looks at once."""
    async with let_in(silent_app, limits, clients=clients) as (doors, guests):
        doors._look()  # begins the clocks
        time.sleep(1.1 if limits.header_s == 1 else 0.1)
        for guest in guests:
            guest.sendall(said)
        doors._look()
        return await asyncio.gather(*(asyncio.to_thread(receive, guest) for guest in guests))


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


async def cut_of_bodies_that_drip(*, seconds, clients, places):
    async with let_in(patient_app, DoorLimits(header_s=1, connections=clients), clients=clients) as (doors, guests):
        for guest in guests:
            guest.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
        await asyncio.sleep(0.1)
        doors._look()  # begins the clocks
        time.sleep(seconds)
        for guest in guests:
            guest.sendall(b"x")
        doors.limits = DoorLimits(header_s=1, connections=places)
        doors._look()
        return sum(one.transport.is_closing() for one in doors._inside)


@pytest.mark.parametrize(("seconds", "cut"), [(0.5, 0), (1.1, 2)])
def test_a_body_that_comes_drop_by_drop_keeps_its_place_only_as_long_as_headers_may_take(seconds, cut):
    assert asyncio.run(cut_of_bodies_that_drip(seconds=seconds, clients=4, places=2)) == cut


async def left_of_those_that_do_not_read(*, clients, places):
    async with let_in(long_app, DoorLimits(connections=places), clients=clients) as (doors, guests):
        for guest in guests:
            guest.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.3)
        for guest in guests:
            guest.sendall(b"x")  # which nobody will read
        await asyncio.sleep(1.5)
        return len(doors)


def test_who_does_not_read_makes_room_though_he_has_sent_more():
    assert asyncio.run(left_of_those_that_do_not_read(clients=6, places=4)) == 4
