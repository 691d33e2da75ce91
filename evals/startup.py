"""`python -m posttrainllm.evals.startup`: seconds from the shell to the first token, and where they go.

Every run is a process of its own, on warm file caches: the first of each row is left out. Rows take turns. The phases
are those of `sample` on the embedded pair, marked in a process that does the same one after the other.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import click

from posttrainllm.evals.bench.start_up import first_output
from posttrainllm.evals.entry import run_command

__all__ = ["command", "mark_phases"]

_PROMPT = "def add(a, b):"
_SAMPLE = ("-m", "posttrainllm", "sample", "--prompt", _PROMPT, "--max-tokens", "8", "--quiet")
_MLX_LM_HEADER = b"=\n"  # mlx-lm draws a line in front of its text


def mark_phases() -> None:
    """Do what `sample` does up to the first step, and print when each phase ended, in ns of the monotonic clock."""
    marks = []

    def mark(name: str) -> None:
        marks.append((name, time.monotonic_ns()))

    import posttrainllm.adapters.cli

    mark("Python, the command line")
    import posttrainllm.adapters.sample.command

    mark("the command")
    from posttrainllm.adapters.runtime import start

    start()
    mark("MLX and the BLAS")
    import posttrainllm.adapters.loading.fast_tokenizer
    import posttrainllm.adapters.loading.variants  # noqa: F401

    mark("code that loads")
    from posttrainllm.adapters.loading.pair import load_pair

    pair = load_pair()
    mark("tokenizers and weights")
    from posttrainllm.adapters.gate.heed import unless_broken

    pair = unless_broken(pair, 4)
    mark("verdicts on file")
    from posttrainllm.adapters.engine import Engine
    from posttrainllm.adapters.rows import RowRequest
    from posttrainllm.adapters.shapes import capacity_for

    mark("code that decodes, NumPy")
    ids = pair.tokenizer.encode(_PROMPT)
    engine = Engine(pair, capacity=capacity_for(len(ids) + 8, 5), width=5)
    engine.insert(0, RowRequest(prompt=ids, limit=len(ids) + 8, draft_k=4))
    mark("the prompt: trace, compile, run")
    engine.step()
    mark("the first step: trace, compile, run")
    print(json.dumps(marks))


def _phases() -> list[tuple[str, float]]:
    """Milliseconds of each phase of one start."""
    code = "from posttrainllm.evals.startup import mark_phases; mark_phases()"
    started = time.monotonic_ns()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, before = [], started
    for name, at in json.loads(done.stdout):
        found.append((name, (at - before) / 1e6))
        before = at
    return found


def _rows(*, mlx_lm: bool) -> dict[str, Callable[[], float]]:
    rows = {
        "posttrainllm sample": lambda: first_output([sys.executable, *_SAMPLE]),
        "posttrainllm sample --forward module": lambda: first_output([sys.executable, *_SAMPLE, "--forward", "module"]),
    }
    if mlx_lm:
        from posttrainllm.adapters.loading.pair import embedded_path

        model = ["-m", "mlx_lm", "generate", "--model", str(embedded_path("target-16m")), "--prompt", _PROMPT]
        options = ["--max-tokens", "8", "--ignore-chat-template"]
        rows["mlx_lm.generate, the target alone"] = lambda: first_output(
            [sys.executable, *model, *options], ignore=_MLX_LM_HEADER
        )
    return rows


@click.command(help="Measure the time from the shell to the first token on the embedded pair.")
@click.option("--runs", type=click.IntRange(1), default=9, show_default=True, help="Of each row, after a first one.")
@click.option("--no-mlx-lm", is_flag=True, help="Leave mlx-lm's own command out.")
def command(*, runs: int, no_mlx_lm: bool) -> None:
    """Run, print; one JSON object on the last line."""
    rows = _rows(mlx_lm=not no_mlx_lm)
    times: dict[str, list[float]] = {name: [] for name in rows}
    phases: dict[str, list[float]] = {}
    for run in range(runs + 1):
        for name, measure in rows.items():
            seconds = measure()
            if run:
                times[name].append(seconds)
        for name, milliseconds in _phases() if run else ():
            phases.setdefault(name, []).append(milliseconds)
    for name, values in times.items():
        click.echo(f"{name:40} {statistics.median(values):6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    for name, values in phases.items():
        click.echo(f"  {name:38} {statistics.median(values):6.0f} ms ({min(values):.0f} to {max(values):.0f})")
    click.echo(json.dumps({"benchmark": "startup", "runs": runs, "seconds": times, "phases_ms": phases}))


if __name__ == "__main__":
    run_command(command)
