"""`posttrainllm export-mlx`: parse, call, print."""

from pathlib import Path

import click

from posttrainllm.adapters.checks import check_not_empty
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["export_mlx"]


@click.command("export-mlx")
@click.argument("file")
@click.option("--out", required=True, metavar="DIR", help="The directory to write; new, or empty.")
def export_mlx(*, file: str, out: str) -> None:
    """Write FILE, a .tinygpt checkpoint, as a directory in mlx-lm's layout.

    Its weights are FILE's, as stored and without an optimizer's state, so that its logits are FILE's, too.
    """
    from posttrainllm.adapters.loading.checkpoint import read_checkpoint
    from posttrainllm.adapters.loading.tokenizer import load_tokenizer
    from posttrainllm.adapters.runtime import start

    check_not_empty("FILE", file, "a .tinygpt file")
    check_not_empty("--out", out, "a directory to write")
    if not Path(file).is_file():
        got = "a directory" if Path(file).is_dir() else "nothing there"
        raise CheckpointError(f"{file}: got {got}, expected a .tinygpt file")
    checkpoint = read_checkpoint(Path(file))
    if checkpoint.native is None:
        raise CheckpointError(
            f"{file}: got a GGUF file, expected a .tinygpt file; `posttrainllm convert` writes GGUF files"
        )
    start()  # MLX, with its BLAS in front
    from posttrainllm.adapters.loading.export import export_directory
    from posttrainllm.adapters.loading.memory import check_weights

    check_weights([checkpoint], [checkpoint.dtype])
    export_directory(checkpoint.native, Path(out), eos_ids=load_tokenizer(checkpoint).eos_ids)
    click.echo(
        f"{out}: {checkpoint.native.layers} layers, {checkpoint.weight_bytes / 1e6:.1f} MB of {checkpoint.dtype}"
    )
