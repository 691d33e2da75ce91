"""How long and how many clients may keep a connection without doing their part.

uvicorn waits for headers for ever, and takes as many connections as there are files. Here headers and bodies come in
bounded time, answers are read in bounded time, and where all places are taken a client that keeps the server waiting
makes room, so that whoever asks at once is let in. The entrance takes no more than there are places.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.errors import as_api_error

if TYPE_CHECKING:  # which comes through these
    from posttrainllm.adapters.serve.connection import Connection

__all__ = ["BODY_S", "CONNECTIONS", "HEADER_S", "DoorLimits", "Doors"]

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
        self._inside: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._said = -_SAID_S

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def places(self) -> int:
        """How many more may enter now."""
        return 2 * self.limits.connections - len(self._inside)

    def enter(self, connection: "Connection") -> None:
        """Let a connection in, in place of another one where there are too many.

        Args:
            connection: just made.
        """
        self._inside.add(connection)
        if len(self._inside) > self.limits.connections:
            self._look_within(_YOUNG_S)
        elif self._timer is None:
            self._look_within(self._pace)

    def leave(self, connection: "Connection") -> None:
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
            self._say(now)
            self.make_room(surplus)
        if self._inside:
            self._look_within(_YOUNG_S if surplus > 0 else self._pace)

    def make_room(self, surplus: int) -> None:
        """Cut those that do nothing, the longest first, but none so young that its request may be on its way.

        How young that is falls with the places that are left beyond the limit: a client that a busy machine keeps from
        sending for a moment is older than a crowd that has just come, and would else go in its place.

        Args:
            surplus: how many at most.
        """
        now = time.monotonic()
        for one in self._inside:
            one.look(now)
        young = max(_YOUNG_S, _OLD_S * (1 - surplus / self.limits.connections))
        ranks = [(one.rank, one.since, one) for one in self._inside if now - one.since >= young]
        waiting = [(rank, since, one) for rank, since, one in ranks if rank is not None]
        oldest = (entry[1:] for entry in sorted(waiting, key=lambda entry: entry[:2]))
        # a body that comes drop by drop is always on its way: that saves it for as long as headers may take
        idle = (one for since, one in oldest if now - since > self.limits.header_s or not one.is_unheard)
        for connection in itertools.islice(idle, surplus):
            connection.cut()

    def _say(self, now: float) -> None:
        if now - self._said >= _SAID_S:
            self._said = now
            LOGGER.warning(
                "all %d connections are taken; those that wait for a client are cut", self.limits.connections
            )
