"""`posttrainllm zoo list`: the presets as a table."""

import click
from rich.console import Console
from rich.table import Table

from posttrainllm.evals.zoo.presets import PRESETS

__all__ = ["list_presets"]

_COLUMNS = ("preset", "parameters", "layers", "width", "heads", "KV heads", "vocabulary", "bf16 MB", "for")
_WIDEST = 120  # a pipe has no width, and rich would then cut the table at 80


@click.command("list")
def list_presets() -> None:
    """Show the presets: exact parameter counts, shapes, and what each is for."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if number in (0, len(_COLUMNS) - 1) else "right", no_wrap=True)
    for name, preset in PRESETS.items():
        shape = preset.shape
        heads = (f"{shape.heads} x {shape.head_size}", str(shape.kv_heads))
        size = f"{preset.parameters * 2 / 1e6:,.1f}"
        sizes = (f"{preset.parameters:,}", str(shape.layers), str(shape.hidden), *heads, f"{shape.vocab_size:,}", size)
        table.add_row(name, *sizes, preset.purpose)
    Console(width=_WIDEST, highlight=False).print(table)
