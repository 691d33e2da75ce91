"""How long and how many clients may keep a connection without doing their part.

uvicorn waits for headers for ever, and takes as many connections as there are files. Here headers and bodies come in
bounded time, answers are read in bounded time, and where all places are taken a client that keeps the server waiting
makes room, so that whoever asks at once is let in. The entrance takes no more than there are places.
"""

import asyncio
import itertools
import json
import select
import time
from collections.abc import Callable
from typing import Any

import attrs
import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.errors import ApiError, as_api_error, invalid

__all__ = ["BODY_S", "CONNECTIONS", "HEADER_S", "DoorLimits", "Doors", "guarded_protocol"]

HEADER_S, BODY_S, CONNECTIONS = 10.0, 30.0, 512
_UNREAD_S = 60.0  # with an answer that the client takes no byte of
_GRACE_S = 5.0  # for the 408 that a slow body is told before its connection is cut
_LOOK_S = 1.0
_YOUNG_S = 0.05  # within which a request that is sent at once is read, by a client that has a processor to itself
_OLD_S = 1.0  # within which it is read on a busy machine
_SAID_S = 60.0


@attrs.frozen(kw_only=True)
class DoorLimits:
    """What a client may take."""

    header_s: float = HEADER_S
    """Seconds from the connection, or from the answer before, until a request's headers are whole."""
    body_s: float = BODY_S
    """Seconds until its body is whole."""
    connections: int = CONNECTIONS
    """At one time; up to twice as many for the moment that it takes to see who does nothing."""


class Doors:
    """The connections of a server; all of it on the event loop.

    Args:
        limits: of each, and of all.
        closed: why nobody is answered any more; gives None while somebody is.
    """

    def __init__(self, limits: DoorLimits, *, closed: Callable[[], Exception | None] = lambda: None) -> None:
        self.limits, self._closed = limits, closed
        self._inside: set[_Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._said = -_SAID_S

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def places(self) -> int:
        """How many more may enter now."""
        return 2 * self.limits.connections - len(self._inside)

    def enter(self, connection: "_Connection") -> None:
        """Let a connection in, in place of another one where there are too many.

        Args:
            connection: just made.
        """
        self._inside.add(connection)
        if len(self._inside) > self.limits.connections:
            self._look_within(_YOUNG_S)
        elif self._timer is None:
            self._look_within(self._pace)

    def leave(self, connection: "_Connection") -> None:
        """Forget a connection.

        Args:
            connection: that is lost.
        """
        self._inside.discard(connection)

    @property
    def _pace(self) -> float:
        return min(_LOOK_S, self.limits.header_s / 4)

    def _look_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Cut those whose time is up, and as many more as there are too many."""
        now, self._timer, closed = time.monotonic(), None, self._closed()
        body_s = self.limits.body_s + min(self.limits.body_s, _GRACE_S)
        for connection in list(self._inside):
            owed = connection.look(now)
            waited = now - connection.since
            if owed == "headers" and waited > self.limits.header_s and not connection.is_unheard:
                connection.give_up(self.limits.header_s)
            elif (owed == "body" and waited > body_s) or (owed == "reading" and waited > _UNREAD_S):
                connection.cut()
            elif closed is not None and waited > _LOOK_S:  # nothing else would end these soon
                if owed == "body":
                    connection.dismiss(as_api_error(closed))
                elif owed == "reading":
                    connection.cut()
        surplus = len(self._inside) - self.limits.connections
        if surplus > 0:
            self._make_room(surplus, now)
        if self._inside:
            self._look_within(_YOUNG_S if surplus > 0 else self._pace)

    def _make_room(self, surplus: int, now: float) -> None:
        """Cut those that do nothing, the longest first, but none so young that its request may be on its way.

        How young that is falls with the places that are left beyond the limit: a client that a busy machine keeps from
        sending for a moment is older than a crowd that has just come, and would else go in its place.
        """
        if now - self._said >= _SAID_S:
            self._said = now
            LOGGER.warning(
                "all %d connections are taken; those that wait for a client are cut", self.limits.connections
            )
        young = max(_YOUNG_S, _OLD_S * (1 - surplus / self.limits.connections))
        ranks = [(one.rank, one.since, one) for one in self._inside if now - one.since >= young]
        waiting = [(rank, since, one) for rank, since, one in ranks if rank is not None]
        idle = (one for _, _, one in sorted(waiting, key=lambda entry: entry[:2]) if not one.is_unheard)
        for connection in itertools.islice(idle, surplus):
            connection.cut()


class _Connection(H11Protocol):
    """uvicorn's, with a note of what the client owes, and since when; its own errors are this API's."""

    doors: Doors

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.since = time.monotonic()
        # the first look begins the clock: between it and the next one the loop reads, however busy it was before
        self._mark: tuple[Any, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Take a place."""
        super().connection_made(transport)
        self.doors.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give it back."""
        super().connection_lost(exc)
        self.doors.leave(self)

    @property
    def owed(self) -> str | None:
        """What the client has to do: send "headers" or a "body", be "reading"; None while it waits for us."""
        if self.transport.get_write_buffer_size():
            return "reading"
        return {h11.IDLE: "headers", h11.SEND_BODY: "body"}.get(self.conn.their_state)

    @property
    def rank(self) -> int | None:
        """How soon it goes where a place is wanted; None while it waits for an answer.

        0 has asked for nothing yet, 1 is in the middle of a body, 2 has had its answers, 3 does not read what it is
        being told, so that the rest of it waits.
        """
        if self.cycle is None:
            return 0
        if self.conn.their_state is h11.SEND_BODY:
            return 1
        if self.cycle.response_complete:
            return 2
        return 3 if self.flow.write_paused else None

    @property
    def is_unheard(self) -> bool:
        """Whether the client has sent something, or has left, and a busy loop has not read that yet."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return not self.flow.read_paused and bool(poll.poll(0))

    def look(self, now: float) -> str | None:
        """Note what is owed, and since when.

        Args:
            now: on the clock of time.monotonic().

        Returns:
            What.
        """
        owed = self.owed
        mark = (owed, self.cycle, self.transport.get_write_buffer_size())  # bytes that are taken are progress
        if mark != self._mark:
            self._mark, self.since = mark, now
        return owed

    def give_up(self, seconds: float) -> None:
        """End a connection whose headers do not come.

        Args:
            seconds: that they had.
        """
        if self.conn.trailing_data[0]:  # a part of them did
            self._tell(ApiError(408, f"got no whole headers in {seconds:g} s", code="request_timeout"))
        self.transport.close()

    def dismiss(self, error: ApiError) -> None:
        """End a connection in the middle of a body.

        Args:
            error: what its client is told.
        """
        self._tell(error)
        self.transport.close()

    def cut(self) -> None:
        """End it now; what was not sent is not."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """uvicorn has found no HTTP."""
        self._tell(invalid(f"no HTTP request: {msg}"))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: uvicorn would recommend packages, in two lines for every request for another protocol."""

    def _tell(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        reason = STATUS_PHRASES[error.status]
        try:
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # another answer has begun
            self.cut()


def guarded_protocol(doors: Doors) -> type[asyncio.Protocol]:
    """The class of a server's connections.

    Args:
        doors: through which they come.

    Returns:
        What uvicorn makes one of for each.
    """
    return type("GuardedConnection", (_Connection,), {"doors": doors})
