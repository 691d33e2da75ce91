"""Hostile clients: while each kind goes on, and after it, a good request is answered, with what it gets alone."""

import contextlib
import socket
import statistics
import time

import httpx2 as httpx
import pytest
from hostile import ABUSES, going_on
from serving import ServerProcess, wait_for
from support import mostly_slow

OPTIONS = ("--gate", "off", "--slots", "2", "--max-context", "1024")
GOOD = {"prompt": "def moon_phase(day_of_cycle):\n    ", "max_tokens": 16, "temperature": 0}
PATIENCE_S = 60  # far beyond what a good request takes: an answer, and no time, is what is tested


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = ("--header-timeout", "1", "--body-timeout", "1", "--max-connections", "128")
    with ServerProcess(tmp_path_factory.mktemp("hostile"), *OPTIONS, *limits) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


def asked(server, path="/v1/completions"):
    """The text of a good request on a connection of its own, and the seconds that it took."""
    with httpx.Client(timeout=PATIENCE_S, verify=False) as client:  # closed also where nobody answers
        started = time.perf_counter()
        response = client.post(f"{server.url}{path}", json=GOOD)
        seconds = time.perf_counter() - started
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"], seconds


def measured(server, count):
    """Texts and the median of the seconds of good requests, one after the other."""
    texts, seconds = zip(*(asked(server) for _ in range(count)), strict=True)
    return set(texts), statistics.median(seconds)


def is_cut(connection):
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def is_free(server):
    health = server.get("/health").json()
    return (health["slots"]["busy"], health["queue"]["waiting"]) == (0, 0)


@pytest.fixture(scope="module")
def usual_server(tmp_path_factory):
    """With the timeouts and limits that a server has unless told otherwise."""
    with ServerProcess(tmp_path_factory.mktemp("usual"), *OPTIONS) as server:
        yield server
        assert server.stop(seconds=120) == 0
        assert "Traceback" not in server.log


# the usual limits are those of the slower tests below, too, where each kind goes on alone and in four threads
@pytest.mark.parametrize("limits", mostly_slow({name: name for name in ("server", "usual_server")}, "server"))
def test_good_requests_are_answered_while_every_abuse_goes_on_and_after_it(request, limits):
    server = request.getfixturevalue(limits)
    alone, _ = measured(server, 2)
    with going_on(server, ABUSES, threads=1):
        assert measured(server, 4)[0] == alone
    wait_for(lambda: is_free(server))
    assert measured(server, 2)[0] == alone


@pytest.mark.slow
@pytest.mark.parametrize("places", [16, 512])
def test_none_of_40_good_requests_is_lost_while_every_abuse_goes_on_in_4_threads(tmp_path, places):
    limits = ("--header-timeout", "1", "--body-timeout", "1", "--max-connections", str(places))
    with ServerProcess(tmp_path, *OPTIONS, *limits) as server:
        alone, _ = measured(server, 1)
        with going_on(server, ABUSES, threads=4):
            assert measured(server, 40)[0] == alone
        assert server.stop(seconds=120) == 0
        assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.parametrize("kind", ABUSES, ids=lambda kind: kind.__name__)
def test_good_requests_are_answered_while_an_abuse_goes_on_in_4_threads(usual_server, kind):
    alone, usual = measured(usual_server, 9)
    with going_on(usual_server, (kind,), threads=4) as counts:
        during, beside = measured(usual_server, 9)
    wait_for(lambda: is_free(usual_server), seconds=90)
    after, later = measured(usual_server, 9)
    assert alone == during == after
    times = f"alone {usual * 1e3:.0f} ms, during {beside / usual:.2f} of it, after {later / usual:.2f}"
    print(f"{kind.__name__}: {sum(counts)} requests or connections; good requests {times}")


def is_answered(server):
    with contextlib.suppress(httpx.TransportError), httpx.Client(timeout=5, verify=False) as client:
        return client.get(f"{server.url}/health").status_code == 200
    return False


def opened(server, content=b""):
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as failed:
        connection = failed.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
        connection.sendall(content)
        failed.pop_all()
    return connection


def heard(connection):
    """Everything until the server closes."""
    parts = []
    with connection:
        while part := connection.recv(4096):
            parts.append(part)
    return b"".join(parts)


def test_headers_and_bodies_that_never_end_are_told_so_and_cut(server):
    half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
    nowhere = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    with contextlib.ExitStack() as kept:
        parts = (b"", half, half + b"\r\n{", nowhere)
        silent, headers, body, answered = [kept.enter_context(opened(server, content)) for content in parts]
        assert heard(silent) == b""
        assert heard(headers).startswith(b"HTTP/1.1 408 ")
        told = heard(body)
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b"got no whole body in 1 s" in told
        assert heard(answered).startswith(b"HTTP/1.1 404 ")


def test_a_client_that_takes_its_time_between_requests_keeps_its_connection(server):
    request = b"GET /api/version HTTP/1.1\r\nhost: x\r\n\r\n"
    with opened(server, request) as connection:
        for _ in range(3):
            time.sleep(0.5)  # half of the limit, which counts from the answer before
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            connection.sendall(request)


def test_an_answer_may_take_longer_than_headers_and_bodies_may(server):
    with server.events("/v1/completions", {**GOOD, "max_tokens": 600, "ignore_eos": True, "stream": True}) as events:
        started = time.monotonic()
        read = sum(1 for _ in events)
        while time.monotonic() - started < 2:
            time.sleep(0.1)
    assert read > 100


def test_where_all_places_are_taken_an_idle_client_makes_room(server):
    body = {**GOOD, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as opened_here, server.events("/v1/completions", body) as events:
        next(events)
        idle = [opened_here.enter_context(opened(server)) for _ in range(600)]  # more than are let in at once
        assert asked(server)[0]
        *_, done = events  # whoever is being answered stays
        assert done == "[DONE]"
        wait_for(lambda: sum(map(is_cut, idle)) >= 600 - 128)
    assert "all 128 connections are taken" in server.log


def test_where_all_places_are_taken_who_does_not_read_makes_room_though_not_all_is_said(tmp_path):
    asked_for = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400  # 16 MB, more than the system holds for him
    with contextlib.ExitStack() as deaf, ServerProcess(tmp_path, *OPTIONS, "--max-connections", "4") as server:
        for _ in range(2 * 4 + 2):
            with contextlib.suppress(OSError):  # cut at once
                deaf.enter_context(opened(server, asked_for))
            time.sleep(0.1)
        wait_for(lambda: is_answered(server))


def test_a_request_for_another_protocol_is_answered_in_this_one_and_no_line_of_the_log(server):
    asked_for = {"connection": "upgrade", "upgrade": "websocket"}
    assert httpx.get(f"{server.url}/health", headers=asked_for).status_code == 200
    assert "websockets" not in server.log
    assert "upgrade" not in server.log


def test_what_is_no_http_is_told_so_in_json(server):
    told = heard(opened(server, b"\xff\xfe no HTTP\r\n\r\n"))
    assert told.startswith(b"HTTP/1.1 400 ")
    assert b'"message": "no HTTP request' in told
    assert "Invalid HTTP" not in server.log  # anybody could fill a disk with it


def test_a_server_that_may_be_full_of_good_requests_says_so_at_its_start(tmp_path):
    with ServerProcess(tmp_path, *OPTIONS, "--max-connections", "2", "--queue", "2") as server:
        assert "4 connections at most are let in, and 4 requests may be answered or wait" in server.log
    (tmp_path / "other").mkdir()
    with ServerProcess(tmp_path / "other", *OPTIONS, "--max-connections", "2", "--queue", "1") as server:
        assert "are let in" not in server.log
