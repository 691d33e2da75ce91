"""One server process: bind, boot, answer, drain, exit."""

import contextlib
import ipaddress
import resource
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType

import attrs
import uvicorn
from starlette.applications import Starlette

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.app import make_app
from posttrainllm.adapters.serve.boot import Served, ServeOptions, boot
from posttrainllm.adapters.serve.connection import guarded_protocol
from posttrainllm.adapters.serve.doors import DoorLimits, Doors
from posttrainllm.adapters.serve.entrance import GuardedServer
from posttrainllm.adapters.serve.gauges import ConnectionsCollector
from posttrainllm.kernel.errors import BackendError, UsageError

__all__ = ["bind", "listen", "serve_until_stopped"]

_OTHER_FILES = 128  # beside connections: traces, models, pipes
_QUEUE = 2048  # clients that wait to be taken, where the system allows so many
_DRAIN_S = 30
_CUT_S = 3  # for errors to be sent
_LINGER_S = 3.0  # how long a failed server goes on saying so before it exits


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
        raise _cannot_listen(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect.

    Args:
        listener: from `bind`.

    Raises:
        BackendError: somebody else has listened there first; the system tells no sooner.
    """
    try:
        listener.listen(_QUEUE)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> BackendError:
    return BackendError(f"{host}:{port}: cannot listen there: {error.strerror or error}")


def serve_until_stopped(
    options: ServeOptions, listener: socket.socket, *, cors_origins: Sequence[str], limits: DoorLimits
) -> int:
    """Boot, then answer until a signal or a failure of the engine.

    MLX works on the calling thread, which must be the main one: its streams belong to threads, and one that dies with
    work behind it aborts the process. HTTP has a thread of its own.

    Args:
        options: of the command.
        listener: from `bind`.
        cors_origins: origins whose pages may read the answers.
        limits: of connections.

    Returns:
        The exit status: 0 after SIGTERM or SIGINT, 1 after a failure.

    Raises:
        PosttrainllmError: the engine cannot be started.
    """
    served = boot(options)
    scheduler = served.scheduler
    app = make_app(scheduler, served.settings, cors_origins=tuple(cors_origins))
    limits = _with_files(limits)
    most = options.slots + options.queue
    if 2 * limits.connections <= most:
        LOGGER.warning(
            "%d connections at most are let in, and %d requests may be answered or wait: then nobody else is heard, "
            "who asks for /health neither; raise --max-connections, or lower --slots and --queue",
            *(2 * limits.connections, most),
        )
    doors = Doors(limits, closed=lambda: scheduler.admission.closed)
    scheduler.metrics.registry.register(ConnectionsCollector(doors))
    server = GuardedServer(_config(app, doors), doors, listener)
    listen(listener)

    crashed = threading.Event()

    def answer() -> None:
        try:
            server.run()
        except BaseException:  # nobody else sees what ends a thread
            crashed.set()
            LOGGER.exception("the HTTP side failed")
        finally:
            scheduler.admission.close()  # drained, or failed: the engine has nobody to work for

    # whoever is still not answered at the end of the drain is told so, before uvicorn cuts the connections
    deadline = threading.Timer(_DRAIN_S, scheduler.admission.close)
    deadline.daemon = True

    def stop(number: int, frame: FrameType | None) -> None:
        if server.should_exit:  # a second signal does not wait
            scheduler.admission.close()
        else:
            deadline.start()
            # not from here: this may interrupt the writing of another line, and what that raises would end up there
            threading.Thread(target=_say_stopping, args=scheduler.admission.counts, daemon=True).start()
        server.should_exit = True

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    http = threading.Thread(target=answer, name="http", daemon=True)
    try:
        http.start()
        _announce(served, listener)
        scheduler.run()
        failed = False
    except Exception:
        LOGGER.exception("the engine failed; what was under way is answered with an error")
        failed = True
        http.join(_LINGER_S)
        server.should_exit = True
    http.join()
    deadline.cancel()
    for number, handler in previous.items():
        signal.signal(number, handler)
    return 1 if failed or crashed.is_set() or not server.started else 0


def _with_files(limits: DoorLimits) -> DoorLimits:
    """Make the system allow a file for each connection, or have fewer of those."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * limits.connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        if soft < wanted:
            connections = max((soft - _OTHER_FILES) // 2, 1)
            LOGGER.warning("the system allows %d open files: %d connections", soft, connections)
            return attrs.evolve(limits, connections=connections)
    return limits


def _config(app: Starlette, doors: Doors) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=guarded_protocol(doors),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S + _CUT_S,
    )


def _say_stopping(under_way: int, waiting: int) -> None:
    LOGGER.info(
        "stopping: %d choices under way and %d waiting have %d s; a second signal ends them",
        *(under_way, waiting, _DRAIN_S),
    )


def _lengths(engine: Engine) -> str:
    return f"{engine.width - 1}" if engine.curves is None else f"auto up to {engine.width - 1}"


def _announce(served: Served, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    settings, scheduler = served.settings, served.scheduler
    engine, standing = scheduler.engine, scheduler.standing
    pair = engine.pair
    models = (
        pair.target.label if pair.draft is None else f"{pair.target.label} + {pair.draft.label}, K={_lengths(engine)}"
    )
    state = f"gate: {standing.verdict}" if standing.enabled else f"no speculation: {standing.reason}"
    LOGGER.info(
        "serving %s on http://%s:%d/v1 | %s | %s | slots %d, context %d, %s | %s, %s",
        *(settings.name, shown, port, models, state, engine.rows, settings.context),
        "with a key" if settings.api_key is not None else "no key",
        *(pair.runtime.device, pair.target.dtype),
    )
    if settings.api_key is None and not ipaddress.ip_address(host).is_loopback:
        LOGGER.warning("%s can be reached from other machines, and there is no --api-key", shown)
