"""What a server says of itself: its state, its model, its API."""

import asyncio
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from posttrainllm.adapters.serve.body import parse_object, read_body
from posttrainllm.adapters.serve.errors import as_api_error
from posttrainllm.adapters.serve.ollama import served_name
from posttrainllm.adapters.serve.ollama_models import model_card, model_details, running_model
from posttrainllm.adapters.serve.openapi import openapi
from posttrainllm.adapters.serve.request_options import unknown_model
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.speculation import speculation

__all__ = ["Reports"]


class Reports:
    """The endpoints that generate nothing.

    Args:
        scheduler: whose state is told.
        settings: what requests are held against.
        encoder: a thread for what would keep the event loop from its streams.
    """

    def __init__(self, scheduler: Scheduler, settings: ServeSettings, encoder: Executor) -> None:
        self._scheduler, self._settings, self._encoder = scheduler, settings, encoder
        self._document: bytes | None = None

    async def root(self, request: Request) -> Response:
        """GET /: a line for whoever only asks whether somebody is there; its status is that of /health."""
        closed = self._scheduler.admission.closed
        line = "posttrainllm is running" if closed is None else str(as_api_error(closed))
        return PlainTextResponse(f"{line}\n", status_code=200 if closed is None else 503)

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine works, else 503."""
        closed = self._scheduler.admission.closed
        in_rows, waiting = self._scheduler.admission.counts
        body = {
            "status": "ok" if closed is None else "error",
            **({} if closed is None else as_api_error(closed).body()),
            "model": self._settings.name,
            "speculative": self._speculative(),
            "slots": {"total": self._scheduler.engine.rows, "busy": in_rows},
            "queue": {"waiting": waiting},
            "prefix_cache": self._prefix_cache(),
        }
        return JSONResponse(body, status_code=200 if closed is None else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: counts and state, for Prometheus."""
        body, content_type = self._scheduler.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: this API, for programs."""
        if self._document is None:  # it takes too long for the loop, and for every time that somebody asks
            loop = asyncio.get_running_loop()
            self._document = await loop.run_in_executor(self._encoder, self._described)
        return Response(self._document, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        if name not in (self._settings.name, *self._settings.other_names):
            raise unknown_model(name, self._settings)
        return JSONResponse(self._card())

    async def tags(self, request: Request) -> Response:
        """GET /api/tags, Ollama's list of models."""
        return JSONResponse({"models": [model_card(self._settings, self._scheduler.engine.pair)]})

    async def running(self, request: Request) -> Response:
        """GET /api/ps, Ollama's list of models in memory."""
        return JSONResponse({"models": [running_model(self._settings, self._scheduler.engine)]})

    async def show(self, request: Request) -> Response:
        """POST /api/show, what Ollama says of a model."""
        settings = self._settings
        body = await read_body(request, settings.max_body_bytes, seconds=settings.body_timeout_s, any_type=True)
        served_name(parse_object(body), settings)
        return JSONResponse(model_details(settings, self._scheduler.engine.pair))

    async def version(self, request: Request) -> Response:
        """GET /api/version, of this package."""
        return JSONResponse({"version": self._version()})

    def _described(self) -> bytes:
        return bytes(JSONResponse(openapi(self._settings, self._version())).body)

    def _version(self) -> str:
        return self._scheduler.engine.pair.runtime.versions["posttrainllm"]

    def _speculative(self) -> dict[str, Any]:
        engine = self._scheduler.engine
        state = speculation(self._scheduler.standing, engine.width, auto=engine.curves is not None)
        return {**state, "pays": self._scheduler.pays if state["enabled"] else None}

    def _prefix_cache(self) -> dict[str, int] | None:
        prefixes = self._scheduler.engine.prefixes
        if prefixes is None:
            return None
        return {"bytes": prefixes.used, "most_bytes": prefixes.limit, "chunks": len(prefixes)}

    def _card(self) -> dict[str, Any]:
        settings, pair = self._settings, self._scheduler.engine.pair
        return {
            "id": settings.name,
            "object": "model",
            "created": settings.created,
            "owned_by": "posttrainllm",
            "max_model_len": settings.context,
            "dtype": pair.target.dtype,
            "device": pair.runtime.device,
            "speculative": self._speculative(),
        }
