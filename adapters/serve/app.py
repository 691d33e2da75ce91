"""The routes: what is asked where, and what stands before it."""

from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from posttrainllm.adapters.serve.dialect import CHAT, COMPLETIONS, OLLAMA_CHAT, OLLAMA_GENERATE
from posttrainllm.adapters.serve.generating import Generating
from posttrainllm.adapters.serve.guard import Guard
from posttrainllm.adapters.serve.refusals import ollama_refusal, unexpected, unrouted
from posttrainllm.adapters.serve.reports import Reports
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.target import OriginForm

__all__ = ["make_app"]


def make_app(scheduler: Scheduler, settings: ServeSettings, *, cors_origins: tuple[str, ...] = ()) -> Starlette:
    """The ASGI application.

    Args:
        scheduler: runs on another thread.
        settings: what requests are held against.
        cors_origins: origins whose pages may read the answers; "*" is every one.

    Returns:
        The application.
    """
    guard = Guard(scheduler, settings.api_key)
    encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
    reports, generating = Reports(scheduler, settings, encoder), Generating(scheduler, settings, guard, encoder)
    routes = [  # GET is HEAD, too
        Route("/", reports.root, methods=["GET"]),
        Route("/health", reports.health, methods=["GET"]),
        Route("/metrics", guard.guarded(reports.metrics), methods=["GET"]),
        Route("/openapi.json", guard.guarded(reports.openapi), methods=["GET"]),
        Route("/v1/models", guard.guarded(reports.models), methods=["GET"]),
        Route("/v1/models/{name:path}", guard.guarded(reports.model), methods=["GET"]),
        Route("/v1/chat/completions", generating.endpoint(CHAT), methods=["POST"]),
        Route("/v1/completions", generating.endpoint(COMPLETIONS), methods=["POST"]),
        Route("/api/chat", generating.endpoint(OLLAMA_CHAT, ollama_refusal), methods=["POST"]),
        Route("/api/generate", generating.endpoint(OLLAMA_GENERATE, ollama_refusal), methods=["POST"]),
        Route("/api/ps", guard.guarded(reports.running, refused=ollama_refusal), methods=["GET"]),
        Route("/api/tags", guard.guarded(reports.tags, refused=ollama_refusal), methods=["GET"]),
        Route("/api/show", guard.guarded(reports.show, refused=ollama_refusal), methods=["POST"]),
        Route("/api/version", guard.guarded(reports.version, refused=ollama_refusal), methods=["GET"]),
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
