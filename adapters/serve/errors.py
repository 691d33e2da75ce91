"""Errors as OpenAI's API has them: a status, and {"error": {message, type, param, code}}."""

import re
from collections.abc import Mapping
from typing import Any

from posttrainllm.kernel.errors import CapacityError, NonFiniteError, PosttrainllmError, UsageError

__all__ = ["ApiError", "as_api_error", "busy", "failed", "invalid", "one_line", "renamed", "stopped", "timed_out"]

_LONGEST = 600


class ApiError(PosttrainllmError):
    """What a client is told instead of an answer. Whatever of it the client wrote itself becomes one line of text.

    Args:
        status: of HTTP.
        message: what is wrong.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: the field that is at fault.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(one_line(message))
        self.status, self.kind, self.code, self.headers = status, kind, code, headers or {}
        self.param = None if param is None else one_line(param)

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def one_line(text: str) -> str:
    """Text of a client, fit for a log and for JSON.

    Args:
        text: any, half a surrogate pair included.

    Returns:
        Its beginning, with what cannot be printed escaped.
    """
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never work."""
    return ApiError(400, message, param=param, code=code)


def busy(count: int, in_rows: int, waiting: int, most: int, retry_after_s: int) -> ApiError:
    """429: the line is full."""
    return ApiError(
        429,
        f"the server is busy: got {count} choice{'s' if count > 1 else ''} beside {in_rows} that decode and {waiting} "
        f"that wait, expected at most {most} in all; try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": str(retry_after_s)},
    )


def stopped() -> ApiError:
    """503: the server is going down."""
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")


def failed(message: str = "the engine failed; the server is going down") -> ApiError:
    """500: nothing that the client could mend."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out(seconds: float) -> ApiError:
    """504: the answer took longer than --request-timeout."""
    return ApiError(
        504,
        f"the answer took longer than the {seconds:g} s that this server allows",
        kind="server_error",
        code="timeout",
    )


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error by the names that its client knows.

    Args:
        error: any.
        names: of fields, by ours.

    Returns:
        It, with its field called otherwise where that has another name.
    """
    message, param = str(error), error.param
    if param is None or param not in names or not message.startswith(param):
        return error
    told = f"{names[param]}{message.removeprefix(param)}"
    return ApiError(error.status, told, kind=error.kind, code=error.code, param=names[param], headers=error.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of ours.

    Args:
        error: any.

    Returns:
        400 with the field's name as the API has it for what the client can mend; else 500, with no more than is the
        client's business.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (UsageError, CapacityError)):
        return _of_a_field(str(error))
    if isinstance(error, NonFiniteError):
        return failed(str(error))
    return failed("an error inside the server; its log says more")


def _of_a_field(message: str) -> ApiError:
    """The command line's "--top-p: got ..." is the API's "top_p: got ..."."""
    found = re.match(r"(?:--)?([a-z][a-z0-9_-]*): ", message)
    if found is None:
        return invalid(message)
    param = found[1].replace("-", "_")
    code = "context_length_exceeded" if "the context of" in message else None
    return invalid(f"{param}: {message[found.end() :]}", param=param, code=code)
