"""The routes: parse, ask the engine's thread, format."""

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.answers import EventStream
from posttrainllm.adapters.serve.body import parse_object, read_body
from posttrainllm.adapters.serve.dialect import CHAT, COMPLETIONS, OLLAMA_CHAT, OLLAMA_GENERATE, Dialect
from posttrainllm.adapters.serve.errors import ApiError, as_api_error, renamed
from posttrainllm.adapters.serve.metrics import Ending, ending_of
from posttrainllm.adapters.serve.ollama import served_name
from posttrainllm.adapters.serve.ollama_models import model_card, model_details, running_model
from posttrainllm.adapters.serve.openapi import openapi
from posttrainllm.adapters.serve.prepare import count_choices
from posttrainllm.adapters.serve.refusals import ollama_refusal, refusal, unexpected, unrouted
from posttrainllm.adapters.serve.request_options import unknown_model
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.speculation import speculation
from posttrainllm.adapters.serve.submission import ClientGoneError, Submission, unless_gone
from posttrainllm.adapters.serve.target import OriginForm
from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["make_app"]

_CLIENT_GONE = 499  # nobody reads it
_Result = TypeVar("_Result")
_Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
_Refused: TypeAlias = Callable[[Request, ApiError], Response]


def make_app(scheduler: Scheduler, settings: ServeSettings, *, cors_origins: tuple[str, ...] = ()) -> Starlette:
    """The ASGI application.

    Args:
        scheduler: runs on another thread.
        settings: what requests are held against.
        cors_origins: origins whose pages may read the answers; "*" is every one.

    Returns:
        The application.
    """
    api = _Api(scheduler, settings)
    routes = [  # GET is HEAD, too
        Route("/", api.root, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
        Route("/metrics", api.guarded(api.metrics), methods=["GET"]),
        Route("/openapi.json", api.guarded(api.openapi), methods=["GET"]),
        Route("/v1/models", api.guarded(api.models), methods=["GET"]),
        Route("/v1/models/{name:path}", api.guarded(api.model), methods=["GET"]),
        Route("/v1/chat/completions", api.generating(CHAT), methods=["POST"]),
        Route("/v1/completions", api.generating(COMPLETIONS), methods=["POST"]),
        Route("/api/chat", api.generating(OLLAMA_CHAT, ollama_refusal), methods=["POST"]),
        Route("/api/generate", api.generating(OLLAMA_GENERATE, ollama_refusal), methods=["POST"]),
        Route("/api/ps", api.guarded(api.running, refused=ollama_refusal), methods=["GET"]),
        Route("/api/tags", api.guarded(api.tags, refused=ollama_refusal), methods=["GET"]),
        Route("/api/show", api.guarded(api.show, refused=ollama_refusal), methods=["POST"]),
        Route("/api/version", api.guarded(api.version, refused=ollama_refusal), methods=["GET"]),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=cors_origins,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    app = Starlette(
        routes=routes,
        middleware=[Middleware(OriginForm), *([cors] if cors_origins else [])],
        exception_handlers={HTTPException: unrouted, Exception: unexpected},
    )
    app.router.redirect_slashes = False  # a path with a slash behind it is another one: 404
    return app


class _Api:
    """The endpoints.

    Args:
        scheduler: what answers.
        settings: what requests are held against.
    """

    def __init__(self, scheduler: Scheduler, settings: ServeSettings) -> None:
        self._scheduler, self._settings = scheduler, settings
        self._document: bytes | None = None
        # long prompts take seconds to encode, and the loop has streams to send
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")

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
            made = await self._aside(lambda: JSONResponse(openapi(self._settings, self._version())).body)
            self._document = bytes(made)
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
        served_name(parse_object(await self._body(request, any_type=True)), self._settings)
        return JSONResponse(model_details(self._settings, self._scheduler.engine.pair))

    async def version(self, request: Request) -> Response:
        """GET /api/version, of this package."""
        return JSONResponse({"version": self._version()})

    def generating(self, dialect: Dialect, refused: _Refused | None = None) -> _Endpoint:
        """The endpoint of a dialect."""

        async def generated(request: Request) -> Response:
            try:
                return await self._generate(request, dialect)
            except PosttrainllmError as error:
                raise renamed(as_api_error(error), dialect.names) from None

        return self.guarded(generated, dialect.name, refused=refused)

    def guarded(self, endpoint: _Endpoint, counted: str | None = None, *, refused: _Refused | None = None) -> _Endpoint:
        """Ask for the key first, turn our errors into answers, and count a request under a name where it has one."""
        refuse = refused or refusal

        async def answered(request: Request) -> Response:
            request.state.endpoint = counted
            try:
                self._check_key(request)
                return await endpoint(request)
            except PosttrainllmError as error:
                told = as_api_error(error)
                self._ended(request, ending_of(told))
                return refuse(request, told)
            except Exception:  # a fault of ours, which is told elsewhere
                self._ended(request, "failed")
                raise

        return answered

    def _ended(self, request: Request, ending: Ending) -> None:
        """Count a request, once: the first to tell knows how it ended."""
        endpoint, request.state.endpoint = request.state.endpoint, None
        if endpoint is not None:
            self._scheduler.metrics.ended(endpoint, ending)

    async def _generate(self, request: Request, dialect: Dialect) -> Response:
        arrived = time.perf_counter()
        request_id = request.state.id = f"{dialect.id_prefix}-{secrets.token_hex(12)}"
        settings, scheduler = self._settings, self._scheduler
        tokenizer = scheduler.engine.pair.tokenizer
        data = await self._body(request, any_type=dialect.any_type)
        headers = {"x-request-id": request_id}
        try:
            body = await unless_gone(request, self._aside(lambda: dialect.parse(parse_object(data), settings)))
            if body is None:
                assert dialect.nothing is not None, "a dialect says what it answers to nothing"
                self._ended(request, "ok")
                return JSONResponse(dialect.nothing(settings), headers=headers)
            LOGGER.debug("%s: %s", request_id, body)
            with scheduler.admission.room(count_choices(body)) as put:
                work = await unless_gone(request, self._aside(lambda: dialect.prepare(body, settings, tokenizer)))
                seconds = settings.request_timeout_s
                submission = Submission(put, work, request_id, arrived=arrived, seconds=seconds)
            shape = dialect.shape_of(
                request_id=request_id,
                created=int(time.time()),
                model=settings.name,
                fingerprint=lambda: f"{settings.fingerprint}-w{scheduler.engine.width}",
                tokenizer=tokenizer,
            )

            def finish() -> None:
                submission.close()
                self._ended(request, submission.ending)
                LOGGER.info("%s %s", request.url.path, submission.summary)

            if work.stream:
                return EventStream(dialect.stream(submission, work, shape), finish, headers, dialect.media_type)
            try:
                return JSONResponse(await unless_gone(request, dialect.whole(submission, work, shape)), headers=headers)
            finally:
                finish()
        except ClientGoneError:
            if request.state.endpoint is not None:  # else `finish` has said so
                self._ended(request, "cancelled")
                LOGGER.info("%s %s: the client left while its request was read", request.url.path, request_id)
            return Response(status_code=_CLIENT_GONE)

    async def _body(self, request: Request, *, any_type: bool) -> bytes:
        settings = self._settings
        return await read_body(request, settings.max_body_bytes, seconds=settings.body_timeout_s, any_type=any_type)

    async def _aside(self, work: Callable[[], _Result]) -> _Result:
        """Parse or encode on the encoder's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def _check_key(self, request: Request) -> None:
        if self._settings.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given, expected = key.strip().encode("latin-1"), self._settings.api_key.encode()  # the bytes that were sent
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, expected):
            raise ApiError(
                401,
                "authorization: expected `Bearer` and this server's API key",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

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
