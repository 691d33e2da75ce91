"""Taking clients from the system's queue only while there is a place for them.

asyncio takes as many as are there, and the server then has to throw out whom it has no place for: the good ones too,
and those who have left again meanwhile. Who is not taken waits in the queue instead, as for any busy server.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Callable

import uvicorn

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.doors import Doors

__all__ = ["GuardedServer"]

_AT_ONCE = 64  # taken in one turn of the event loop, so that it reads what these send before the next
_FULL_S = 0.01  # until the next look for a place
_FAILED_S = 0.5  # where the system has no file for another
_SAID_S = 60.0
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # files or memory


class GuardedServer(uvicorn.Server):
    """uvicorn's, which takes clients from one socket through its doors.

    Args:
        config: whose protocol is `guarded_protocol(doors)`.
        doors: that say how many more may come.
        listener: that listens.
    """

    def __init__(self, config: uvicorn.Config, doors: Doors, listener: socket.socket) -> None:
        super().__init__(config)
        self._doors, self._listener = doors, listener
        self._entrance: _Entrance | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take clients from now on."""
        await super().startup(sockets=[])
        self._entrance = _Entrance(self._listener, self._protocol, self._doors)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, and let those that are here be answered."""
        if self._entrance is not None:
            await self._entrance.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        state = self.lifespan.state
        # mypy knows the class as any protocol's
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=state
        )


class _Entrance:
    """All of it on the event loop."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], doors: Doors) -> None:
        self._listener, self._protocol, self._doors = listener, protocol, doors
        self._coming: set[asyncio.Task[None]] = set()  # taken, and not through the doors yet
        self._pause: asyncio.TimerHandle | None = None
        self._said = -_SAID_S
        listener.setblocking(False)
        self._open()

    async def close(self) -> None:
        """Take no more, once those that are coming are in; who waits in the queue is told so by the system."""
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await asyncio.gather(*self._coming, return_exceptions=True)

    def _open(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener, self._take)

    def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._pause = loop.call_later(seconds, self._open)

    def _take(self) -> None:
        places = self._doors.places - len(self._coming)
        for _ in range(min(places, _AT_ONCE)):
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NONE_LEFT:
                    self._say(error)
                    self._doors.make_room(1)
                    self._wait(_FAILED_S)
                return  # else nobody waits, or one who has left
            task = asyncio.get_running_loop().create_task(self._enter(client))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)
        if places <= _AT_ONCE:
            self._wait(_FULL_S)

    async def _enter(self, client: socket.socket) -> None:
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, client)
        except OSError:  # it has left
            client.close()

    def _say(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._said >= _SAID_S:
            self._said = now
            LOGGER.warning("cannot take another connection: %s; the next try is in %g s", error.strerror, _FAILED_S)
