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

    from posttrainllm.adapters.loading.checkpoint import read_json
    from posttrainllm.evals.zoo.evaluate import held_out_scores, overall
    from posttrainllm.evals.zoo.model import load_any, losses

    chosen = ("float32" if runtime.device == "cpu" else "bfloat16") if dtype == "auto" else dtype
    found = read_corpus(corpus)
    module = load_any(model, getattr(mx, chosen))
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # the library raises plain exceptions of its own
        raise click.ClickException(f"{model / 'tokenizer.json'}: cannot be read: {error}") from None
    tokenizer.encode_special_tokens = True
    ends = read_json(model / "config.json").get("eos_token_id", 0)
    forward = mx.compile(lambda tokens, counted: (losses(module(tokens[:, :-1]), tokens[:, 1:]) * counted).sum())
    end_of_text = ends[0] if isinstance(ends, list) and ends else ends
    if type(end_of_text) is not int or not 0 <= end_of_text < tokenizer.get_vocab_size():
        raise click.ClickException(f"{model}: eos_token_id: got {ends!r}, expected an id of its tokenizer")
    sources = held_out_ids(found, tokenizer, limit_characters, end_of_text=end_of_text)
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
