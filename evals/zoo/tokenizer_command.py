"""`posttrainllm zoo tokenizer`: train the tokenizer of every preset on a corpus."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from posttrainllm.evals.zoo.data import read_corpus

__all__ = ["tokenizer"]


@click.command()
@click.option("--corpus", type=click.Path(path_type=Path), required=True, help="Folder that `zoo corpus` wrote.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="tokenizer.json to write.")
@click.option(
    "--characters",
    type=click.IntRange(min=1000),
    default=100_000_000,
    show_default=True,
    help="How much of the corpus to read; its order is fixed, and any beginning is a fair mixture.",
)
def tokenizer(corpus: Path, out: Path, characters: int) -> None:
    """Train one byte-level BPE of 16384 ids; smaller presets take its first ids."""
    from posttrainllm.evals.zoo.tokenizer import VOCAB_SIZE, train_tokenizer

    found = read_corpus(corpus)
    made = train_tokenizer(_until(found.training_texts(), characters))
    if made.get_vocab_size() != VOCAB_SIZE:
        got = f"{made.get_vocab_size():,} ids"
        raise click.ClickException(f"{corpus}: its text gives {got}, expected {VOCAB_SIZE:,}: it is too short")
    text = made.to_str()
    unfinished = out.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(out)
    click.echo(f"{out}: {VOCAB_SIZE:,} ids, sha256 {hashlib.sha256(text.encode()).hexdigest()}")


def _until(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Documents from the beginning, up to the one that reaches a length."""
    read = 0
    for text in texts:
        yield text
        read += len(text)
        if read >= characters:
            return
