"""Reading the body of a request: a JSON object of bounded size, in bounded time."""

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from posttrainllm.adapters.serve.doors import BODY_S
from posttrainllm.adapters.serve.errors import ApiError, invalid

__all__ = ["parse_object", "read_body"]

_DEEPEST = 64
_DIGITS = 100
_MANY_DIGITS = re.compile(rb"[0-9]{%d}" % (_DIGITS + 1))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # UTF-8 has none: only an escape can be half a pair


async def read_body(request: Request, most: int, *, seconds: float = BODY_S, any_type: bool = False) -> bytes:
    """Read a body whole.

    Args:
        request: whose body was not read yet.
        most: bytes.
        seconds: how long it may take to arrive.
        any_type: whether it is JSON whatever it calls itself. Not from a web page (it names its `Origin`): to send what
            says JSON is the one thing that it must ask for.

    Returns:
        The bytes.

    Raises:
        ApiError: 400 for another type than JSON, 408 for a body that does not come, 413 for one that is too large.
    """
    of_a_page = "origin" in request.headers
    kind = request.headers.get("content-type", "" if of_a_page else "application/json")
    kind = kind.partition(";")[0].strip().lower()
    if (of_a_page or not any_type) and kind != "application/json" and not kind.endswith("+json"):
        raise invalid(f"content-type: got {kind[:60]!r}, expected application/json")
    declared = request.headers.get("content-length", "")
    if re.fullmatch("[0-9]{1,18}", declared) and int(declared) > most:  # others are only counted
        raise _too_large(f"{declared} bytes", most)
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise _too_large("more", most)
    except TimeoutError:
        raise ApiError(408, f"got no whole body in {seconds:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise invalid("the client left before its body was whole") from None
    return bytes(data)


def _too_large(got: str, most: int) -> ApiError:
    return ApiError(413, f"body: got {got}, expected at most {most} bytes", code="body_too_large")


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a body.

    Args:
        data: of `read_body`.

    Returns:
        The JSON object.

    Raises:
        ApiError: 400: it is none, or holds what is no text.
    """
    try:
        parse_int = _integer if _MANY_DIGITS.search(data) else None  # a call for every id of a prompt takes its time
        value = json.loads(data.decode("utf-8"), parse_constant=_no_number, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise invalid(f"body: byte {error.start} is no UTF-8, expected a JSON object in UTF-8") from None
    except RecursionError:
        raise invalid("body: got JSON nested too deeply") from None
    except ValueError as error:
        raise invalid(f"body: got no JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"body: got JSON of type {type(value).__name__}, expected an object")
    _check_depth(value)
    if _SURROGATE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise invalid("body: got half a surrogate pair in a text or a name, expected whole characters") from None
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits, expected at most {_DIGITS}")
    return int(text)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(value: dict[str, Any]) -> None:
    """Bound how deep lists and objects are nested; without recursion."""
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        container, depth = left.pop()
        if depth > _DEEPEST:
            raise invalid(f"body: got JSON nested more than {_DEEPEST} deep")
        children = container.values() if isinstance(container, dict) else container
        left += [(child, depth + 1) for child in children if isinstance(child, (dict, list))]
