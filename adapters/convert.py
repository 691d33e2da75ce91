"""`posttrainllm convert`: parse, call, print."""

from pathlib import Path

import click

from posttrainllm.adapters.checks import check_not_empty
from posttrainllm.kernel.errors import CheckpointError, UsageError

__all__ = ["convert"]


@click.command()
@click.argument("model")
@click.option("--out", required=True, metavar="DIR", help="The directory to write; new, or empty.")
@click.option(
    "--layers",
    type=int,
    metavar="N",
    help="Keep the first N layers: a draft of the model's own, with its tokenizer. Without it, all of them.",
)
@click.option(
    "--dtype",
    type=click.Choice(("auto", "float32", "float16", "bfloat16")),
    default="auto",
    show_default=True,
    help="Type of a GGUF file's weights. auto: packed ones stay packed where MLX reads them, others become float16.",
)
def convert(*, model: str, out: str, layers: int | None, dtype: str) -> None:
    """Write MODEL, a GGUF file, as a directory in mlx-lm's layout.

    With --layers, MODEL may also be such a directory, or an id of the hub: its first layers are written.
    """
    from posttrainllm.adapters.loading.checkpoint import read_checkpoint, readable
    from posttrainllm.adapters.loading.gguf_model import read_gguf
    from posttrainllm.adapters.loading.gguf_types import is_gguf
    from posttrainllm.adapters.loading.hub import locate
    from posttrainllm.adapters.runtime import start

    check_not_empty("MODEL", model, "a GGUF file or a model directory")
    check_not_empty("--out", out, "a directory to write")
    path = locate(model)
    if not path.exists():
        raise CheckpointError(f"{model}: got nothing there, expected a GGUF file or a model directory")
    start()  # MLX, with its BLAS in front
    from posttrainllm.adapters.loading.conversion import convert_gguf, cut_directory, first_layers

    if is_gguf(path):
        with readable(path, "cannot be converted"):
            file = read_gguf(path, packed=dtype == "auto")
            file = file if layers is None else first_layers(file, layers)
            size = convert_gguf(file, Path(out), dtype=None if dtype == "auto" else dtype)
        kept = file.config["num_hidden_layers"]
    else:
        if layers is None:
            raise UsageError(f"--layers: got none for {model}, which is no GGUF file, expected how many to keep")
        if dtype != "auto":
            raise UsageError(f"--dtype: got {dtype} for {model}, which is no GGUF file, expected auto")
        checkpoint = read_checkpoint(path)
        if checkpoint.native is not None:
            raise CheckpointError(f"{model}: got a .tinygpt file, expected a directory; export-mlx writes one")
        size, kept = cut_directory(checkpoint, Path(out), layers=layers), layers
    click.echo(f"{out}: {kept} layers, {size / 1e6:.1f} MB")
