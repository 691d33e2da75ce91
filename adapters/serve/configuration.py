"""`--config FILE`: options of a command from a TOML file, below the command line and the environment."""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from posttrainllm.kernel.errors import UsageError

__all__ = ["came_from", "config_option", "read_config", "read_small_file", "unknown_variables"]

_MOST_BYTES = 2**20
_SECRET = ("api_key",)
_ELSEWHERE = ("POSTTRAINLLM_BLAS",)
_Command = TypeVar("_Command", bound=Callable[..., Any])
_KINDS = (  # bool comes before int, which it is a subclass of
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "a table"),
)


def config_option() -> Callable[[_Command], _Command]:
    """--config: fills in what neither the command line nor the environment says."""

    def fill_in(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
        if path is not None:
            ctx.default_map = read_config(Path(path), ctx.command)

    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,  # before the options that it fills in
        expose_value=False,
        callback=fill_in,
        help="TOML file whose keys are these options' names without dashes in front. The command line and variables "
        "come first.",
    )


def read_config(path: Path, command: click.Command) -> dict[str, Any]:
    """Read a configuration file.

    Args:
        path: of a TOML file: option names, without the dashes in front, and values.
        command: whose options they are.

    Returns:
        Values by parameter name, for click's `default_map`.

    Raises:
        UsageError: the file cannot be read, or has a key or a type that no option has; in one line.
    """
    options = {_key(param): param for param in command.params if param.name != "config"}
    found: dict[str, Any] = {}
    for key, value in _read_toml(path).items():
        param = options.get(key)
        if param is None or param.name is None:
            close = difflib.get_close_matches(key, options, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"--config: {path}: got the key {key[:60]!r}, expected an option of `serve`{hint}")
        kinds, expected = _expected(param)
        if not _fits(value, kinds) or (param.name in _SECRET and not value):
            got = "an empty text" if value == "" else _kind(value)
            shown = got if isinstance(value, (list, dict)) or param.name in _SECRET else f"{got}, {str(value)[:60]!r}"
            raise UsageError(f"--config: {path}: {key}: got {shown}, expected {expected}")
        found[param.name] = value
    return found


def read_small_file(path: Path, option: str, *, most: int, expected: str) -> bytes:
    """Read a file that an option names, and no more of it than such a file may hold.

    Args:
        path: of the file.
        option: for the message.
        most: bytes.
        expected: for the message.

    Returns:
        What it holds.

    Raises:
        UsageError: it cannot be read, or is longer; in one line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > most:
        raise UsageError(f"{option}: {path}: got a file of more than {most} bytes, expected {expected}")
    return data


def unknown_variables(command: click.Command, environment: Iterable[str], *, prefix: str) -> list[str]:
    """Variables that look like options and are none: most likely a slip of the pen.

    Args:
        command: whose options can be variables.
        environment: names.
        prefix: of its variables, with the underscore.

    Returns:
        Their names, sorted; never a value.
    """
    known = {f"{prefix}{(param.name or '').upper()}" for param in command.params} | set(_ELSEWHERE)
    return sorted(name for name in environment if name.startswith(prefix) and name not in known)


def came_from(ctx: click.Context, name: str) -> int:
    """How much a value counts: 3 for the command line, 2 for a variable, 1 for the file, 0 for a default."""
    ranks: Mapping[ParameterSource | None, int] = {
        ParameterSource.COMMANDLINE: 3,
        ParameterSource.ENVIRONMENT: 2,
        ParameterSource.DEFAULT_MAP: 1,
    }
    return ranks.get(ctx.get_parameter_source(name), 0)


def _key(param: click.Parameter) -> str:
    """The name of an option as a file has it."""
    return max(param.opts, key=len).lstrip("-")


def _read_toml(path: Path) -> dict[str, Any]:
    data = read_small_file(path, "--config", most=_MOST_BYTES, expected="options in TOML")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"--config: {path}: byte {error.start} is no UTF-8, expected TOML") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--config: {path}: got no TOML: {error}") from None


def _expected(param: click.Parameter) -> tuple[tuple[type, ...], str]:
    """Types that an option takes from a file, and their name."""
    if isinstance(param, click.Option) and param.multiple:
        return (list,), "a list of texts"
    if isinstance(param, click.Option) and param.is_flag:
        return (bool,), "true or false"
    if param.type is click.INT:
        return (int,), "a whole number"
    if param.type is click.FLOAT:
        return (int, float), "a number"
    if isinstance(param.type, click.types.FuncParamType):
        return (int, str), "a whole number or a text"
    return (str,), "a text"


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, list):
        return list in kinds and all(isinstance(entry, str) for entry in value)
    return type(value) in kinds  # a bool is an int, too


def _kind(value: Any) -> str:
    return next((words for kind, words in _KINDS if isinstance(value, kind)), "a date or a time")
