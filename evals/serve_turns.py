"""`python -m posttrainllm.evals.serve_turns`: what a chat's second turn gains where the server keeps prompts.

Two servers, one of which keeps nothing (`--prefix-cache-mb 0`). Each conversation is a first prompt and its reply, then
a second prompt: the first one, the reply, and a question. Both servers are asked in turns, greedily; the first
conversation warms up. All begin differently, so that nothing is found but what their own first turn left. Times to the
first token are the servers' own: queue and HTTP are left out.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import click

from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.loading.tokenizer import Tokenizer, load_tokenizer
from posttrainllm.adapters.options import model_options
from posttrainllm.evals.accept_rate import HELD_OUT, read_prompts
from posttrainllm.evals.bench.asking import Asker
from posttrainllm.evals.bench.machine import cpu_count
from posttrainllm.evals.bench.server import running_server
from posttrainllm.evals.entry import run_command
from posttrainllm.kernel.errors import PosttrainllmError, UsageError

__all__ = ["Turn", "command", "run", "summarize"]

_FAILED = 3  # exit status: a reply is not the one of the server that keeps nothing
_EMBEDDED_TARGET = "target-16m"
_BETWEEN = 37  # ids from the beginning of one conversation to that of the next


@attrs.frozen(kw_only=True)
class Turn:
    """One turn of a conversation on one server."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@click.command(help="Measure a chat's second turn with prompts kept and without; one JSON line on the last line.")
@model_options()
@click.option("--no-draft", is_flag=True, help="Decode plainly.")
@click.option("--prompt-tokens", default=448, show_default=True, help="Tokens of the first prompt.")
@click.option("--reply-tokens", default=64, show_default=True, help="Tokens of each reply.")
@click.option("--question-tokens", default=32, show_default=True, help="Tokens that the second prompt adds.")
@click.option("--repeats", default=8, show_default=True, help="Conversations measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line alone.")
def command(*, as_json: bool, **options: Any) -> None:
    """Run, print; exit status 3 when a kept prompt changed a reply."""
    result = run(**options)
    if not as_json:
        click.echo("\n".join(_table(result)))
    click.echo(json.dumps(result, ensure_ascii=False))
    if result["failed"]:
        sys.exit(_FAILED)


def run(
    *,
    model: str | None = None,
    draft_model: str | None = None,
    dtype: str = "auto",
    forward: str = "auto",
    changes: ModelChanges = UNCHANGED,
    no_draft: bool = False,
    prompt_tokens: int = 448,
    reply_tokens: int = 64,
    question_tokens: int = 32,
    repeats: int = 8,
) -> dict[str, Any]:
    """Start both servers, and ask.

    Args:
        model: as `serve` takes it.
        draft_model: the same.
        dtype: the same.
        forward: the same.
        changes: the same.
        no_draft: the same.
        prompt_tokens: of the first prompt.
        reply_tokens: of each reply.
        question_tokens: that the second prompt has behind the first reply.
        repeats: conversations measured.

    Returns:
        What the JSON line holds.

    Raises:
        UsageError: an option is out of range.
        PosttrainllmError: a server does not start, or answers with an error.
    """
    counts = {"prompt": prompt_tokens, "reply": reply_tokens, "question": question_tokens}
    for name, got in {**{f"{name}-tokens": count for name, count in counts.items()}, "repeats": repeats}.items():
        if got < 1:
            raise UsageError(f"--{name}: got {got}, expected 1 or more")
    tokenizer = load_tokenizer(read_checkpoint(locate(model if model is not None else embedded_path(_EMBEDDED_TARGET))))
    source = [index for text, rest in read_prompts(HELD_OUT) for index in tokenizer.encode(text + rest)]
    arguments = ["--dtype", dtype, "--forward", forward, "--gate", "off"]
    arguments += [] if draft_model is None else ["--draft-model", draft_model]
    arguments += ["--no-draft"] if no_draft else []
    arguments += changes.options
    arguments += [] if model is None else [model]
    with ExitStack() as stack:
        askers = []
        for kept in ([], ["--prefix-cache-mb", "0"]):
            asker = Asker(stack.enter_context(running_server([*arguments, *kept])), local=True)
            stack.callback(asker.close)
            askers.append(asker)
        card = askers[0].card()
        conversations = []
        for number in range(repeats + 1):
            ids = [
                source[(number * _BETWEEN + place) % len(source)] for place in range(prompt_tokens + question_tokens)
            ]
            order = askers if number % 2 else askers[::-1]
            turns = {id(asker): _converse(asker, tokenizer, ids, prompt_tokens, reply_tokens) for asker in order}
            conversations.append([turns[id(asker)] for asker in askers])
    return {
        "benchmark": "serve-turns",
        "server": card,
        **{f"{name}_tokens": count for name, count in counts.items()},
        "repeats": repeats,
        "cpus": cpu_count(),
        **summarize(conversations[1:]),
    }


def summarize(conversations: Sequence[Sequence[Sequence[Turn]]]) -> dict[str, Any]:
    """What was gained in each turn.

    Args:
        conversations: of each the turns on the server that keeps prompts, then those on the other.

    Returns:
        Medians, and whether a text differs.
    """
    rows = []
    for turn in range(2):
        kept, other = ([conversation[server][turn] for conversation in conversations] for server in (0, 1))
        drops = [1 - one.ttft_s / plain.ttft_s for one, plain in zip(kept, other, strict=True)]
        rows.append(
            {
                "turn": turn + 1,
                "prompt_tokens": statistics.median(one.prompt_tokens for one in kept),
                "cached_tokens": statistics.median(one.cached_tokens for one in kept),
                "ttft_s": statistics.median(one.ttft_s for one in kept),
                "ttft_s_without": statistics.median(one.ttft_s for one in other),
                "drop": statistics.median(drops),
                "drop_min": min(drops),
                "drop_max": max(drops),
                "same": sum(one.text == plain.text for one, plain in zip(kept, other, strict=True)),
                "of": len(kept),
            }
        )
    return {"rows": rows, "failed": any(row["same"] < row["of"] for row in rows)}


def _converse(asker: Asker, tokenizer: Tokenizer, ids: Sequence[int], first: int, count: int) -> list[Turn]:
    """Both turns on one server."""
    turns = [_turn(asker, ids[:first], count)]
    return [*turns, _turn(asker, [*ids[:first], *tokenizer.encode(turns[0].text), *ids[first:]], count)]


def _turn(asker: Asker, prompt: Sequence[int], count: int) -> Turn:
    value = asker.complete(prompt, count)
    try:
        usage = value["usage"]
        return Turn(
            text=value["choices"][0]["text"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            ttft_s=value["timings"]["ttft_s"],
        )
    except (LookupError, TypeError) as error:
        raise PosttrainllmError(f"got no answer of `posttrainllm serve`: {type(error).__name__}: {error}") from None


def _table(result: dict[str, Any]) -> list[str]:
    line = "{:>4}  {:>7}  {:>7}  {:>10}  {:>10}  {:>6}  {:<14}  {}"
    lines = [line.format("turn", "prompt", "cached", "first, ms", "no cache", "drop", "min-max", "texts the same")]
    for row in result["rows"]:
        lines.append(
            line.format(
                row["turn"],
                f"{row['prompt_tokens']:.0f}",
                f"{row['cached_tokens']:.0f}",
                f"{1e3 * row['ttft_s']:.1f}",
                f"{1e3 * row['ttft_s_without']:.1f}",
                f"{row['drop']:.0%}",
                f"{row['drop_min']:.0%}-{row['drop_max']:.0%}",
                f"{row['same']} of {row['of']}",
            )
        )
    server = result["server"]
    lines.append(
        f"\n{server.get('id')}, {server.get('device')}, {server.get('dtype')}, T=0, {result['repeats']} conversations; "
        "medians, by the server's clock"
    )
    return lines


if __name__ == "__main__":
    run_command(command)
