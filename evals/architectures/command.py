"""`python -m posttrainllm.evals.architectures`: the table of every decoder module of mlx-lm."""

import os
from pathlib import Path

import click

from posttrainllm.adapters.runtime import start

__all__ = ["command"]


@click.command(
    help="Build every decoder module of mlx-lm tiny, compare it with mlx-lm's own loop, and write the table."
)
@click.argument("modules", nargs=-1)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the page goes. Default: it is printed. Not with MODULES.",
)
def command(modules: tuple[str, ...], out: Path | None) -> None:
    """Examine all, or some and print a line each."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of every configuration that it does not know
    start()  # before anything imports MLX
    from posttrainllm.evals.architectures.configurations import configurations, stateful
    from posttrainllm.evals.architectures.examine import examine
    from posttrainllm.evals.architectures.run import page

    if modules and out is not None:
        raise click.UsageError("--out: got it with MODULES, expected all modules for a page")
    known = {each.module: each for each in (*configurations(), *stateful())}
    for name in modules:
        if name not in known:
            raise click.UsageError(f"MODULES: got {name!r}, expected modules of mlx-lm that are models")
    for name in modules:
        outcome = examine(known[name])
        click.echo(f"{name}: {outcome.verdict} {outcome.reason}".rstrip())
    if modules:
        return
    text = page(lambda name: click.echo(name, err=True))
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
