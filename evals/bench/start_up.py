"""From the shell to the first token: whole processes, started one after the other."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from posttrainllm.kernel.errors import PosttrainllmError

__all__ = ["first_output", "measure_start_up"]

_PROMPT = "def parse_arguments():\n    parser ="
_TOKENS = 8


def measure_start_up(
    repeats: int, *, model: str, draft_model: str | None, dtype: str, mlx_lm: bool = True
) -> list[dict[str, Any]]:
    """Start `posttrainllm sample`, and mlx-lm's `generate` on the target beside it.

    Args:
        repeats: of each, after one that fills the file cache.
        model: directory of the target.
        draft_model: of the draft; None decodes plainly.
        dtype: as `sample` takes it.
        mlx_lm: whether mlx-lm takes part.

    Returns:
        For each the median and the range of the seconds until the first token is on standard output.

    Raises:
        PosttrainllmError: one of them printed nothing, or failed.
    """
    ours = [sys.executable, "-m", "posttrainllm", "sample", model, "--dtype", dtype]
    ours += ["--draft-model", draft_model] if draft_model is not None else []
    ours += ["--prompt", _PROMPT, "--max-tokens", str(_TOKENS), "--ignore-eos", "--quiet"]
    theirs = [sys.executable, "-m", "mlx_lm", "generate", "--model", model, "--ignore-chat-template"]
    theirs += ["--prompt", _PROMPT, "--max-tokens", str(_TOKENS)]
    commands = {"posttrainllm sample": (ours, b"")}
    if mlx_lm:
        commands["mlx_lm.generate"] = (theirs, b"=\n")  # it draws a line before it decodes
    found: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(repeats + 1):
        for name, (command, frame) in commands.items():
            seconds = first_output(command, ignore=frame)
            if repeat:
                found[name].append(seconds)
    return [
        {
            "name": name,
            "first_token_s": round(statistics.median(times), 3),
            "range_s": [round(min(times), 3), round(max(times), 3)],
        }
        for name, times in found.items()
    ]


def first_output(command: Sequence[str], *, ignore: bytes = b"") -> float:
    """Seconds from the start of a command to its first byte of output.

    Args:
        command: with its arguments.
        ignore: bytes that are no answer.

    Returns:
        The seconds; the command has ended when this returns.

    Raises:
        PosttrainllmError: it printed nothing else, or failed.
    """
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, bufsize=0) as run:
            assert run.stdout is not None
            elapsed = None
            while elapsed is None and (byte := run.stdout.read(1)):
                if byte not in ignore:
                    elapsed = time.perf_counter() - started
            run.stdout.read()
        if elapsed is None or run.returncode:
            log.seek(0)
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            printed, said = "no token" if elapsed is None else "a token", lines[-1] if lines else "nothing"
            raise PosttrainllmError(
                f"{' '.join(command[1:4])} printed {printed} and ended with {run.returncode}: {said}"
            )
    return elapsed
