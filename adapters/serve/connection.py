"""One client's connection: what it owes, and how it is told and cut.

It reads h11's states, since uvicorn does not say how far a request has come.
"""

import asyncio
import json
import select
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from posttrainllm.adapters.serve.doors import Doors
from posttrainllm.adapters.serve.errors import ApiError, invalid

__all__ = ["Connection", "guarded_protocol"]


class Connection(H11Protocol):
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
        if self.flow.read_paused or self.transport.is_closing():
            return False  # nobody reads that any more
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

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
    return type("GuardedConnection", (Connection,), {"doors": doors})
