"""`posttrainllm serve`: parse, check, run."""

import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from posttrainllm.adapters.gate.command import FAILED
from posttrainllm.adapters.options import accept_rule_option, draft_options, model_options
from posttrainllm.adapters.params import check_width, is_text
from posttrainllm.adapters.runtime import LOGGER, start
from posttrainllm.adapters.serve.api_key import check_variables, find_key
from posttrainllm.adapters.serve.configuration import config_option, unknown_variables
from posttrainllm.kernel.errors import GateError, UsageError

__all__ = ["serve"]


_PREFIX = "POSTTRAINLLM"


@click.command(context_settings={"auto_envvar_prefix": _PREFIX})
@config_option()
@model_options(envvar="POSTTRAINLLM_MODEL")
@draft_options()
@accept_rule_option()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8090, show_default=True, help="0 takes a free one.")
@click.option("--slots", type=int, default=1, show_default=True, help="Requests that decode together.")
@click.option(
    "--max-context", type=int, metavar="N", help="Most tokens of prompt and reply. Default: the model's, 4096 at most."
)
@click.option("--max-tokens-limit", type=int, metavar="N", help="Most tokens of a reply. Default: the context.")
@click.option(
    "--prefix-cache-mb",
    type=int,
    metavar="MIB",
    help="Most memory for prompts that later ones may begin like. 0: none. Default: a quarter of what is left, 1024 at "
    "most.",
)
@click.option("--queue", type=int, default=64, show_default=True, help="Requests that may wait for a slot.")
@click.option(
    "--gate",
    type=click.Choice(("auto", "full", "strict", "off")),
    default="auto",
    show_default=True,
    help="Proof at start that the draft changes nothing. auto: a verdict on file, else 8 prompts now and 100 in idle "
    "time. full: 100 now. strict: 100, and exit with 3 unless identical.",
)
@click.option(
    "--api-key", metavar="KEY", help="Clients must send it as a Bearer token; better from a file or a variable."
)
@click.option("--api-key-file", metavar="FILE", help="File that holds the key, in one line.")
@click.option("--cors-origin", multiple=True, metavar="ORIGIN", help="Web origin that may read answers; * is any.")
@click.option("--served-model-name", metavar="NAME", help="What clients call the model. Default: its directory's name.")
@click.option("--request-timeout", type=float, metavar="S", help="Most seconds that an answer may take.")
@click.option(
    "--header-timeout",
    type=float,
    default=10,
    show_default=True,
    metavar="S",
    help="Most seconds that the headers of a request may take to arrive.",
)
@click.option(
    "--body-timeout",
    type=float,
    default=30,
    show_default=True,
    metavar="S",
    help="Most seconds that its body may take to arrive.",
)
@click.option(
    "--max-connections",
    type=int,
    default=512,
    show_default=True,
    metavar="N",
    help="Connections at one time; a further one takes the place of the one that has kept the server waiting longest.",
)
@click.option("--record-dir", metavar="DIR", help="Write a trace of every request there, for `posttrainllm replay`.")
@click.option(
    "--log-level",
    type=click.Choice(("error", "warning", "info", "debug")),
    default="info",
    show_default=True,
    help="info: a line a request, without its text. debug: prompts, too.",
)
def serve(
    *,
    model: str | None,
    draft_model: str | None,
    no_draft: bool,
    host: str,
    port: int,
    cors_origin: tuple[str, ...],
    log_level: str,
    request_timeout: float | None,
    header_timeout: float,
    body_timeout: float,
    max_connections: int,
    record_dir: str | None,
    api_key: str | None,
    api_key_file: str | None,
    **options: Any,
) -> None:
    """Serve MODEL (a directory in mlx-lm's layout, a .tinygpt or GGUF file, or a hub id) as OpenAI's API does.

    No MODEL: the embedded pair. A draft alone: the embedded target. MODEL alone: plain decoding.

    Each option can be set as a variable: POSTTRAINLLM_PORT for --port, POSTTRAINLLM_API_KEY for --api-key, and so on;
    or in a file, see --config.
    """
    check_variables()
    options["api_key"] = find_key(click.get_current_context(), api_key, api_key_file)
    _check(port=port, cors_origin=cors_origin, max_connections=max_connections, **options)
    for name, seconds in (
        ("request-timeout", request_timeout),
        ("header-timeout", header_timeout),
        ("body-timeout", body_timeout),
    ):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise UsageError(f"--{name}: got {seconds:g}, expected seconds, more than 0")
    _set_up_log(log_level)
    unknown = unknown_variables(serve, os.environ, prefix=f"{_PREFIX}_")
    if unknown:
        LOGGER.warning("no option of this command: %s", ", ".join(unknown))
    folder = None if record_dir is None else _folder(record_dir)
    start()  # the BLAS comes before MLX, and the next lines import MLX
    from posttrainllm.adapters.serve.boot import ServeOptions
    from posttrainllm.adapters.serve.doors import DoorLimits
    from posttrainllm.adapters.serve.lifecycle import bind, serve_until_stopped

    checked = ServeOptions(
        model=model,
        draft_model=draft_model,
        speculate=not no_draft,
        request_timeout_s=request_timeout,
        body_timeout_s=body_timeout,
        record_dir=folder,
        **options,
    )
    try:
        with bind(host, port) as listener:
            limits = DoorLimits(header_s=header_timeout, body_s=body_timeout, connections=max_connections)
            code = serve_until_stopped(checked, listener, cors_origins=cors_origin, limits=limits)
    except GateError as error:
        click.echo(f"error: {error}", err=True)
        code = FAILED
    sys.exit(code)


def _check(
    *,
    port: int,
    slots: int,
    queue: int,
    max_context: int | None,
    max_tokens_limit: int | None,
    prefix_cache_mb: int | None,
    max_connections: int,
    cors_origin: tuple[str, ...],
    served_model_name: str | None,
    **_: Any,
) -> None:
    """Refuse what can never work before anything is loaded."""
    check_width("port", port, 0, 65535)
    check_width("slots", slots, 1, 256)
    check_width("queue", queue, 0, 2**20)
    check_width("max-connections", max_connections, 1, 2**20)
    for name, count, least in (
        ("max-context", max_context, 2),
        ("max-tokens-limit", max_tokens_limit, 1),
        ("prefix-cache-mb", prefix_cache_mb, 0),
    ):
        if count is not None:
            check_width(name, count, least, 2**24)
    if served_model_name is not None and not (is_text(served_model_name) and served_model_name.isprintable()):
        raise UsageError("--served-model-name: got an empty text or one that cannot be printed, expected text")
    for origin in cors_origin:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):  # anything else no browser would send
            raise UsageError(f"--cors-origin: got {origin!r}, expected * or an origin like https://app.example")


def _folder(name: str) -> Path:
    """The folder of --record-dir, made where it is missing."""
    if not name:
        raise UsageError("--record-dir: got an empty text, expected a directory")
    folder = Path(name)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts will be in there
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        raise UsageError(f"--record-dir: {name}: {getattr(error, 'strerror', None) or error}") from None
    return folder


def _set_up_log(level: str) -> None:
    """One line an event on standard error, with the time."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=level.upper(), force=True)
    # theirs say the same again, and uvicorn warns of every noise that comes
    for name, least in (("uvicorn", logging.ERROR), ("httpx", logging.WARNING), ("asyncio", logging.WARNING)):
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else least)
