"""`python -m posttrainllm.evals.demo`: what a draft does to one text, in one look.

The embedded pair decodes a prompt speculatively while you watch; the target then decodes it alone, at the width of the
verification and at width 1. The ids must be the same; the rates must not.
"""

import sys
from collections import Counter
from collections.abc import Callable

import click
from rich.console import Console
from rich.table import Table

from posttrainllm.adapters.facade import load
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.evals.entry import run_command

__all__ = ["main"]

PROMPT = """def parse_arguments():
    parser = argparse.ArgumentParser(description="Count words in files")
    parser.add_argument("""


@click.command()
@click.option("--prompt", default=PROMPT, help="Text to continue.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--draft-k", default=4, show_default=True)
def main(prompt: str, max_tokens: int, draft_k: int) -> None:
    """Decode a prompt with the embedded pair and with its target alone."""
    console = Console(highlight=False)
    pair = load()
    assert pair.draft is not None
    from posttrainllm.adapters.generation import Generation
    from posttrainllm.adapters.params import SamplingParams
    from posttrainllm.adapters.result import Result

    def run(with_pair: Pair, width: int, echo: Callable[[str], None] = lambda _: None) -> tuple[Result, list[int]]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        generation, counts = Generation(with_pair, prompt, params, draft_k=draft_k, plain_width=width), []
        for chunk in generation:
            counts.append(len(chunk.token_ids))
            echo(chunk.text)
        return generation.result(), counts

    console.print(f"target {pair.target.label}, draft {pair.draft.label}, K={draft_k}", style="dim")
    console.print(pair.runtime.description, style="dim", end="\n\n")
    click.secho(prompt, nl=False, dim=True)
    drafted, counts = run(pair, 1, lambda text: click.echo(text, nl=False))
    click.echo("\n")
    plain = pair.plain("demo")
    reference, usual = run(plain, draft_k + 1)[0], run(plain, 1)[0]
    table = Table("T=0", "tokens/s", "steps", "tokens a step", "same tokens")
    for name, result in (
        (f"with the draft, K={draft_k}", drafted),
        (f"target alone, width {draft_k + 1}", reference),
        ("target alone, width 1", usual),
    ):
        rate, timings = result.timings.decode_tokens_per_s or 0, result.timings
        same = "-" if result is drafted else "yes" if result.token_ids == drafted.token_ids else "no"
        table.add_row(name, f"{rate:.1f}", str(timings.steps), f"{timings.tokens_per_step or 0:.2f}", same)
    console.print(table)
    usage = drafted.usage
    console.print(
        f"draft: {usage.draft_accepted} of {usage.draft_proposed} proposals accepted ({usage.accept_rate or 0:.3f})"
    )
    console.print("steps by the tokens they emitted (the last one may be cut):")
    for size, count in sorted(Counter(counts).items()):
        console.print(f"  {size} {'█' * count} {count}")
    if reference.token_ids != drafted.token_ids:
        console.print("the draft changed the output: this is a bug")
        sys.exit(3)
    ratio = (drafted.timings.decode_tokens_per_s or 0) / (usual.timings.decode_tokens_per_s or 1)
    console.print(
        f"The same {len(drafted.token_ids)} tokens with and without the draft, {ratio:.2f}x the rate of width 1."
    )


if __name__ == "__main__":
    run_command(main)
