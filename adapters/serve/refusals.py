"""Errors as responses, in the shapes of OpenAI and of Ollama."""

import secrets
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.errors import ApiError, as_api_error, one_line

__all__ = ["ollama_refusal", "refusal", "unexpected", "unrouted"]


def ollama_refusal(request: Request, error: ApiError) -> Response:
    """An error in Ollama's shape.

    Args:
        request: that is refused.
        error: what its client is told.

    Returns:
        The response.
    """
    return refusal(request, error, {"error": str(error)})


def refusal(request: Request, error: ApiError, body: dict[str, Any] | None = None) -> Response:
    """An error in OpenAI's shape, and a line of the log.

    Args:
        request: that is refused.
        error: what its client is told.
        body: in place of that shape.

    Returns:
        The response.
    """
    request_id = getattr(request.state, "id", None) or f"req-{secrets.token_hex(12)}"
    why = " ".join(filter(None, (error.code, error.param))) or error.kind
    LOGGER.info("%s %s: %d %s", one_line(request.url.path), request_id, error.status, why)
    LOGGER.debug("%s: %s", request_id, error)  # it quotes the client
    return JSONResponse(
        body or error.body(), status_code=error.status, headers={**error.headers, "x-request-id": request_id}
    )


async def unrouted(request: Request, error: Exception) -> Response:
    """No such path, or another method than it takes."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _in_its_shape(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours; the server's log gets the rest."""
    return _in_its_shape(request, as_api_error(error))


def _in_its_shape(request: Request, error: ApiError) -> Response:
    """Where no endpoint says how it refuses, its path does."""
    refuse = ollama_refusal if request.url.path.startswith("/api/") else refusal
    return refuse(request, error)
