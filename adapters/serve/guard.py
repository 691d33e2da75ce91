"""What stands before an endpoint: the key, errors as answers, and the count of how requests end."""

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from posttrainllm.adapters.serve.errors import ApiError, as_api_error
from posttrainllm.adapters.serve.metrics import Ending, ending_of
from posttrainllm.adapters.serve.refusals import refusal
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["Endpoint", "Guard", "Refuse"]

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Refuse: TypeAlias = Callable[[Request, ApiError], Response]


class Guard:
    """Of all endpoints.

    Args:
        scheduler: whose metrics count.
        api_key: that clients must send; None for none.
    """

    def __init__(self, scheduler: Scheduler, api_key: str | None) -> None:
        self._scheduler, self._api_key = scheduler, api_key

    def guarded(self, endpoint: Endpoint, counted: str | None = None, *, refused: Refuse | None = None) -> Endpoint:
        """Ask for the key first, turn our errors into answers, and count a request.

        Args:
            endpoint: what answers.
            counted: the name that it is counted under; None for not at all.
            refused: the shape of errors; None for OpenAI's.

        Returns:
            The endpoint to route to.
        """
        refuse = refused or refusal

        async def answered(request: Request) -> Response:
            request.state.endpoint = counted
            try:
                self.check_key(request)
                return await endpoint(request)
            except PosttrainllmError as error:
                told = as_api_error(error)
                self.ended(request, ending_of(told))
                return refuse(request, told)
            except Exception:  # a fault of ours, which is told elsewhere
                self.ended(request, "failed")
                raise

        return answered

    def ended(self, request: Request, ending: Ending) -> None:
        """Count a request, once: the first to tell knows how it ended.

        Args:
            request: that has ended.
            ending: how.
        """
        endpoint, request.state.endpoint = request.state.endpoint, None
        if endpoint is not None:
            self._scheduler.metrics.ended(endpoint, ending)

    def check_key(self, request: Request) -> None:
        """Refuse who has no key, or another one.

        Args:
            request: its headers are looked at.

        Raises:
            ApiError: 401.
        """
        if self._api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given, expected = key.strip().encode("latin-1"), self._api_key.encode()  # the bytes that were sent
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, expected):
            raise ApiError(
                401,
                "authorization: expected `Bearer` and this server's API key",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
