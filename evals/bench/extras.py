"""What `posttrainllm bench` measures on request, and the options that ask for it. Imports no MLX: --help reads this."""

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import click

from posttrainllm.adapters.loading.pair import DTYPES
from posttrainllm.evals.bench.shapes import SHAPES
from posttrainllm.kernel.errors import UsageError

__all__ = ["Extras", "extra_options", "extras_from"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SIMULATED = 0.8  # random weights accept what nobody can predict: shapes are measured at a stated rate
_MOST_ROWS = 64
_KINDS = ("static", "eager")


@attrs.frozen(kw_only=True)
class Extras:
    """What is measured beside the two engines of this process."""

    accept_rate: float | None = None
    """Simulated chance that a proposal stands; None for what the draft is worth."""
    as_installed: tuple[str, ...] = ()
    """Dtypes of mlx-lm in a process without our BLAS."""
    transformers: tuple[str, ...] = ()
    """"static" (cache, with torch.compile) and "eager"."""
    transformers_python: str | None = None
    """Interpreter that has them and torch; None for this one."""
    rows: tuple[int, ...] = ()
    """B of our engine."""
    sampled: bool = False
    """Whether steps at T=1 are timed."""
    start_up: int = 0
    """How many times whole processes are started."""


def extra_options(command: _Command) -> _Command:
    """The options of `Extras`, and --shapes."""
    options = (
        click.option(
            "--shapes",
            metavar="TARGET+DRAFT",
            help=f"Random weights in place of models, two of {', '.join(SHAPES)}; at accept rate {_SIMULATED}.",
        ),
        click.option(
            "--accept-rate", type=float, metavar="RATE", help="Simulate a draft whose proposals stand that often."
        ),
        click.option(
            "--as-installed",
            is_flag=False,
            flag_value="bfloat16,float32",
            metavar="DTYPES",
            help="Also mlx-lm without our BLAS, in a process of its own. Alone: bfloat16,float32.",
        ),
        click.option(
            "--transformers",
            is_flag=False,
            flag_value="static",
            metavar="KINDS",
            help="Also transformers on CUDA: static (cache, compiled), eager or both. Alone: static.",
        ),
        click.option(
            "--transformers-python",
            metavar="PATH",
            help="Interpreter that has torch and this package, where torch and MLX want different CUDA libraries.",
        ),
        click.option("--rows", metavar="LIST", help="Also our engine with that many rows, such as 1,8."),
        click.option("--sampled", is_flag=True, help="Also the time of a step at T=1, with both accept rules."),
        click.option(
            "--start-up", type=int, default=0, metavar="N", help="Also N times from the shell to the first token."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def extras_from(
    *,
    shapes: str | None = None,
    accept_rate: float | None = None,
    as_installed: str | None = None,
    transformers: str | None = None,
    transformers_python: str | None = None,
    rows: str | None = None,
    sampled: bool = False,
    start_up: int = 0,
    repeats: int,
) -> Extras:
    """Check what was asked for.

    Args:
        shapes: of --shapes; it brings a simulated accept rate.
        accept_rate: from 0 to 1.
        as_installed: dtypes with commas between them.
        transformers: kinds with commas between them.
        transformers_python: an interpreter; None for this one.
        rows: whole numbers with commas between them.
        sampled: as it is.
        start_up: 0 or more.
        repeats: of --repeats: every row decodes a prompt of its own.

    Returns:
        The extras.

    Raises:
        UsageError: a value is out of range, or a library is missing.
    """
    if accept_rate is not None and not 0 <= accept_rate <= 1:
        raise UsageError(f"--accept-rate: got {accept_rate}, expected 0 to 1")
    if start_up < 0:
        raise UsageError(f"--start-up: got {start_up}, expected 0 or more")
    kinds = _names("transformers", transformers, _KINDS)
    here = kinds if transformers_python is None else ()
    missing = [name for name in ("torch", "transformers") if here and importlib.util.find_spec(name) is None]
    if transformers_python is not None and shutil.which(transformers_python) is None:
        raise UsageError(f"--transformers-python: got {transformers_python!r}, expected a program that runs")
    if missing:
        raise UsageError(f"--transformers: got no {missing[0]}, expected it to be installed: pip install {missing[0]}")
    return Extras(
        accept_rate=_SIMULATED if accept_rate is None and shapes is not None else accept_rate,
        as_installed=_names("as-installed", as_installed, DTYPES),
        transformers=kinds,
        transformers_python=transformers_python,
        rows=_rows(rows, repeats),
        sampled=sampled,
        start_up=start_up,
    )


def _names(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = () if text is None else tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--{option}: got {unknown[0]!r}, expected some of {', '.join(known)}")
    return names


def _rows(text: str | None, repeats: int) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        rows = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise UsageError(f"--rows: got {text!r}, expected whole numbers with commas between them") from None
    most = min(repeats, _MOST_ROWS)
    if not all(1 <= row <= most for row in rows):
        raise UsageError(
            f"--rows: got {text}, expected 1 to {most} each: every row decodes one of the --repeats prompts"
        )
    return rows
