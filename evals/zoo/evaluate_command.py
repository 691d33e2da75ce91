"""`posttrainllm zoo evaluate`: a model's loss on the held-out text."""

import json
from pathlib import Path

import click

from posttrainllm.evals.zoo.data import held_out_ids, read_corpus

__all__ = ["evaluate"]


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--corpus", type=click.Path(path_type=Path), required=True, help="Folder that `zoo corpus` wrote.")
@click.option("--limit-characters", type=click.IntRange(min=1), help="Of each source; all by default.")
@click.option("--sequence", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens of a window.")
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Windows at once.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON line in place of the table.")
def evaluate(
    model: Path, corpus: Path, limit_characters: int | None, sequence: int, batch: int, dtype: str, as_json: bool
) -> None:
    """Print nats a token and bits a character of MODEL, a directory that mlx-lm loads, for every held-out source."""
    from posttrainllm.adapters.runtime import start

    runtime = start()
    import mlx.core as mx
    from tokenizers import Tokenizer

    from posttrainllm.evals.zoo.evaluate import held_out_scores, overall
    from posttrainllm.evals.zoo.model import load_any, losses

    chosen = ("float32" if runtime.device == "cpu" else "bfloat16") if dtype == "auto" else dtype
    found = read_corpus(corpus)
    module = load_any(model, getattr(mx, chosen))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    forward = mx.compile(lambda tokens, counted: (losses(module(tokens[:, :-1]), tokens[:, 1:]) * counted).sum())
    sources = held_out_ids(found, tokenizer, limit_characters)
    scores = held_out_scores(forward, sources, rows=batch, sequence=sequence)
    sums = [score for kind in ("code", "prose", "") if (score := overall(scores, kind)) is not None]
    if as_json:
        rows = {
            score.name: {
                "nats_per_token": score.nats_per_token,
                "bits_per_character": score.bits_per_character,
                "tokens": score.tokens,
                "characters": score.characters,
            }
            for score in (*scores, *sums)
        }
        click.echo(json.dumps({"model": str(model), "corpus_sha256": found.sha256, "dtype": chosen, "sources": rows}))
        return
    click.echo(f"{'source':24} {'nats/token':>10} {'bits/character':>14} {'tokens':>10} {'characters':>11}")
    for score in (*scores, *sums):
        numbers = f"{score.nats_per_token:10.4f} {score.bits_per_character:14.4f}"
        click.echo(f"{score.name:24} {numbers} {score.tokens:10,} {score.characters:11,}")
