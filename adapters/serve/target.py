"""A whole URI in place of a path: `GET http://host:port/health HTTP/1.1`, as clients of a proxy send it."""

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["OriginForm"]

_BEFORE_PATH = re.compile(rb"https?://[^/]+", re.IGNORECASE)


class OriginForm:
    """Middleware that keeps only the path of such a target (RFC 9112, 3.2.2).

    Whose host it names is not looked at, no more than the header `host` is: this server has one. https is what a proxy
    in front may have been asked.

    Args:
        app: what is asked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, by the path."""
        # in place, so that whoever is told of an error, or writes a line of the log, sees it so too
        target = scope.get("raw_path") or b""
        if found := _BEFORE_PATH.match(target):
            path = target[found.end() :] or b"/"
            scope.update(raw_path=path, path=unquote(path.decode("ascii")))
        await self._app(scope, receive, send)
