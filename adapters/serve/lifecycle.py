"""One server process: bind, boot, answer, drain, exit."""

import ipaddress
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.app import make_app
from posttrainllm.adapters.serve.boot import EngineThread, Served, ServeOptions
from posttrainllm.kernel.errors import BackendError, UsageError

__all__ = ["bind", "serve_until_stopped"]

_DRAIN_S = 30
_LINGER_S = 3.0  # how long a failed server goes on saying so before it exits
_JOIN_S = 10.0


def bind(host: str, port: int) -> socket.socket:
    """Take the address before gigabytes are read; nobody can connect until the server answers.

    Args:
        host: a name or an address.
        port: 0 takes a free one.

    Returns:
        The bound socket.

    Raises:
        UsageError: there is no such host.
        BackendError: the address is taken, or not ours to take.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host: got {host!r}: {getattr(error, 'strerror', None) or error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BackendError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from None
    return listener


def serve_until_stopped(options: ServeOptions, listener: socket.socket, *, cors_origins: Sequence[str]) -> int:
    """Boot, then answer until a signal or a failure of the engine.

    Args:
        options: of the command.
        listener: from `bind`.
        cors_origins: origins whose pages may read the answers.

    Returns:
        The exit status: 0 after SIGTERM or SIGINT, 1 after a failure of the engine.

    Raises:
        PosttrainllmError: the engine cannot be started.
    """
    process = _Process()
    engine = EngineThread(options, process.engine_failed)
    engine.start()
    served = engine.ready.result()
    _announce(served, listener)
    app = make_app(served.scheduler, served.settings, cors_origins=tuple(cors_origins))
    process.run(uvicorn.Server(_config(app)), listener)
    served.scheduler.admission.close()
    engine.join(_JOIN_S)
    return 1 if process.failed else 0


class _Process:
    """Signals and failures, and the one server that they stop."""

    def __init__(self) -> None:
        self.failed = False
        self._server: uvicorn.Server | None = None

    def engine_failed(self) -> None:
        """Called from the engine's thread: say so for a while, then exit."""
        self.failed = True
        threading.Timer(_LINGER_S, self._stop).start()

    def run(self, server: uvicorn.Server, listener: socket.socket) -> None:
        """Answer until told to stop, then finish what is under way, for 30 seconds at most."""
        self._server = server
        # uvicorn raises the signal again once it has drained, and the default would then kill us
        previous = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            server.run(sockets=[listener])
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _announce(served: Served, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    settings, scheduler = served.settings, served.scheduler
    engine, standing = scheduler.engine, scheduler.standing
    pair = engine.pair
    models = (
        pair.target.label if pair.draft is None else f"{pair.target.label} + {pair.draft.label}, K={engine.width - 1}"
    )
    if not standing.enabled:
        models += f", no speculation: {standing.reason}"
    elif standing.verdict is not None:
        models += f", gate: {standing.verdict}"
    LOGGER.info(
        "serving %s as %s on http://%s:%d/v1 | slots %d, context %d | %s, %s",
        *(models, settings.name, shown, port, engine.rows, settings.context, pair.runtime.device, pair.target.dtype),
    )
    if settings.api_key is None and not ipaddress.ip_address(host).is_loopback:
        LOGGER.warning("%s can be reached from other machines, and there is no --api-key", shown)
