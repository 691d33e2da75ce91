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
    from posttrainllm.adapters.loading.tinygpt_header import is_tinygpt
    from posttrainllm.adapters.loading.tokenizer import load_tokenizer
    from posttrainllm.adapters.runtime import start

    check_not_empty("FILE", file, "a .tinygpt file")
    check_not_empty("--out", out, "a directory to write")
    checkpoint = read_checkpoint(Path(file)) if is_tinygpt(Path(file)) else None
    if checkpoint is None or checkpoint.native is None:
        raise CheckpointError(f"{file}: got {_kind(Path(file))}, expected a .tinygpt file")
    start()  # MLX, with its BLAS in front
    from posttrainllm.adapters.loading.export import export_directory
    from posttrainllm.adapters.loading.memory import check_weights

    check_weights([checkpoint], [checkpoint.dtype])
    export_directory(checkpoint.native, Path(out), eos_ids=load_tokenizer(checkpoint).eos_ids)
    click.echo(
        f"{out}: {checkpoint.native.layers} layers, {checkpoint.weight_bytes / 1e6:.1f} MB of {checkpoint.dtype}"
    )


def _kind(path: Path) -> str:
    from posttrainllm.adapters.loading.gguf_types import is_gguf

    if is_gguf(path):
        return "a GGUF file, which `posttrainllm convert` writes"
    return "a directory" if path.is_dir() else "a file of another kind" if path.exists() else "nothing there"
