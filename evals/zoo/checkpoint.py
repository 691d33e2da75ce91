"""Checkpoints of a run: all that it needs to go on as if it had never stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

from posttrainllm.evals.zoo.optimizer import Moments

__all__ = ["last_checkpoint", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    out: Path, step: int, parameters: dict[str, mx.array], moments: Moments, state: object, texts: mx.array | None
) -> None:
    """Write a checkpoint whole or not at all, then remove the older ones.

    Args:
        out: folder of the run.
        step: updates done.
        parameters: float32, by name.
        moments: of the optimiser.
        state: what JSON can hold.
        texts: of ids, that the run is in the middle of.

    Raises:
        OSError: the disk is full or not to be written.
    """
    final, unfinished = out / f"checkpoint-{step:08}", out / "checkpoint-unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    arrays = {f"parameters:{name}": array for name, array in parameters.items()}
    arrays |= {f"first:{name}": array for name, array in moments.first.items()}
    arrays |= {f"second:{name}": array for name, array in moments.second.items()}
    arrays |= {} if texts is None else {"texts:": texts}
    try:
        mx.save_safetensors(str(unfinished / "state.safetensors"), arrays)
    except RuntimeError as error:  # MLX's word for what the file system refused
        raise OSError(None, f"{unfinished}: {error}") from None
    (unfinished / "state.json").write_text(json.dumps(state), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    for older in out.glob("checkpoint-*"):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)


def last_checkpoint(out: Path) -> Path | None:
    """The latest whole checkpoint of a run's folder, if any."""
    found = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return max(found, default=None)


def load_checkpoint(folder: Path) -> tuple[dict[str, mx.array], Moments, dict[str, Any], mx.array | None]:
    """Read a checkpoint.

    Args:
        folder: of `last_checkpoint`.

    Returns:
        Parameters, moments, and what was given as state and as texts.

    Raises:
        click.ClickException: a file of it is missing or torn.
    """
    parts: dict[str, dict[str, mx.array]] = {"parameters": {}, "first": {}, "second": {}, "texts": {}}
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        arrays = mx.load(str(folder / "state.safetensors"))
        assert isinstance(arrays, dict)
        for name, array in arrays.items():
            part, _, own = name.partition(":")
            parts[part][own] = array
        mx.eval(arrays)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise click.ClickException(f"{folder}: cannot be resumed: {type(error).__name__}: {error}") from None
    moments = Moments(first=parts["first"], second=parts["second"])
    return parts["parameters"], moments, state, parts["texts"].get("")
