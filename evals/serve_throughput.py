"""`python -m posttrainllm.evals.serve_throughput`: what the draft gains whoever asks a server.

The workload of `posttrainllm bench`, through HTTP: prompts of 64 tokens, all different, 128 tokens generated, greedy,
end of text ignored. Every prompt is asked for with `speculative` true and false, in turns, after a warm-up. A row that
does not speculate costs a whole step on a server with a draft, so a second server, without one, is asked as well: the
ratio is to the faster of the two.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from posttrainllm.adapters.loading.changes import UNCHANGED, ModelChanges
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.hub import locate
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.loading.tokenizer import Tokenizer, load_tokenizer
from posttrainllm.adapters.options import check_draft_k, model_options
from posttrainllm.evals.accept_rate import HELD_OUT, read_prompts
from posttrainllm.evals.bench.asking import Asker
from posttrainllm.evals.bench.machine import cpu_count
from posttrainllm.evals.bench.server import running_server
from posttrainllm.evals.bench.serving import Contender, format_serving, measure_serving, summarize_serving
from posttrainllm.evals.entry import run_command
from posttrainllm.evals.throughput import choose_prompts
from posttrainllm.kernel.errors import PosttrainllmError, UsageError

__all__ = ["command", "run"]

_FAILED = 3  # exit status: a text with speculation is not the one without
_EMBEDDED_TARGET = "target-16m"


@click.command(help="Measure `posttrainllm serve` with speculation and without; one JSON line on the last line.")
@model_options()
@click.option("--draft-k", type=int, default=4, show_default=True, help="Tokens the draft proposes a step, 1 to 32.")
@click.option("--slots", type=int, metavar="N", help="Of the server. Default: as --parallel.")
@click.option("--max-context", type=int, metavar="N", help="Of the server.")
@click.option("--url", help="Ask this running server instead of starting one; MODEL names its tokenizer.")
@click.option("--api-key", metavar="KEY", envvar="POSTTRAINLLM_API_KEY", help="Of the server.")
@click.option("--parallel", default=1, show_default=True, help="Requests at a time.")
@click.option("--repeats", default=8, show_default=True, help="Prompts measured, a multiple of --parallel.")
@click.option("--prompt-tokens", default=64, show_default=True, help="Tokens of each prompt.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens generated for each.")
@click.option("--prompts-file", metavar="FILE", help='JSON lines with a "text". Default: 40 from held-out packages.')
@click.option("--no-plain", is_flag=True, help="Start no second server without a draft.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line alone.")
def command(*, as_json: bool, **options: Any) -> None:
    """Run, print; exit status 3 when speculation changed a text."""
    result = run(**options)
    if not as_json:
        click.echo("\n".join([*format_serving(result), _setting_line(result)]))
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
    draft_k: int = 4,
    slots: int | None = None,
    max_context: int | None = None,
    url: str | None = None,
    api_key: str | None = None,
    parallel: int = 1,
    repeats: int = 8,
    prompt_tokens: int = 64,
    max_tokens: int = 128,
    prompts_file: str | None = None,
    no_plain: bool = False,
) -> dict[str, Any]:
    """Start what is to be asked, and ask.

    Args:
        model: as `serve` takes it; with `url`, the one that is served there.
        draft_model: the same.
        dtype: the same.
        forward: the same.
        changes: the same.
        draft_k: the same.
        slots: the same; None is `parallel`.
        max_context: the same; None is the server's own.
        url: of a running server; None starts one.
        api_key: where that wants one.
        parallel: requests at a time.
        repeats: prompts measured.
        prompt_tokens: of each.
        max_tokens: generated for each.
        prompts_file: JSON lines with a "text"; None for the held-out ones.
        no_plain: whether to leave the second server out.

    Returns:
        What the JSON line holds.

    Raises:
        UsageError: an option is out of range, or there are too few prompts.
        LoadError: the tokenizer cannot be read.
        PosttrainllmError: a server does not start, does not speculate, or answers with an error.
    """
    check_draft_k(draft_k)
    counts = {"parallel": parallel, "repeats": repeats, "prompt-tokens": prompt_tokens, "max-tokens": max_tokens}
    for name, got in counts.items():
        if got < 1:
            raise UsageError(f"--{name}: got {got}, expected 1 or more")
    if repeats % parallel:
        raise UsageError(f"--repeats: got {repeats}, expected a multiple of --parallel, {parallel}")
    if url is None and model is not None and draft_model is None:
        raise UsageError("got MODEL without --draft-model, expected both: there is nothing to speculate with")
    texts = read_prompts(Path(prompts_file) if prompts_file is not None else HELD_OUT)
    prompts = choose_prompts(_tokenizer(model), texts, prompt_tokens, repeats + parallel, warm_up=parallel)
    served = ["--dtype", dtype, "--forward", forward, "--slots", str(slots or parallel), "--queue", str(parallel)]
    served += changes.target_options
    served += ["--prefix-cache-mb", "0"]  # every prompt is asked for more than once, and is to be read each time
    served += [] if max_context is None else ["--max-context", str(max_context)]
    with ExitStack() as stack:
        if url is None:
            # gating in idle time would be measured, too; a broken verdict is heeded all the same
            drafted = [*served, "--gate", "off", "--draft-k", str(draft_k)]
            drafted += [] if draft_model is None else ["--draft-model", draft_model]
            drafted += changes.draft_options
            address = stack.enter_context(running_server([*_named(model), *drafted]))
        else:
            address = url
        asker = stack.enter_context(_asker(address, api_key, parallel, local=url is None))
        card = asker.card()
        _check_speculates(card)
        contenders = [
            Contender(name="speculative: true", asker=asker, speculative=True),
            Contender(name="speculative: false", asker=asker, speculative=False),
        ]
        if url is None and not no_plain:
            plain = stack.enter_context(running_server([*_named(model), *served, "--no-draft"]))
            asker = stack.enter_context(_asker(plain, api_key, parallel, local=True))
            contenders.append(Contender(name="server without a draft", asker=asker, speculative=None))
        rounds = measure_serving(contenders, prompts, max_tokens, parallel)
    return {
        "benchmark": "serve-throughput",
        "server": card,
        "url": url,
        "temperature": 0,
        "draft_k": card["speculative"]["draft_k"],
        "parallel": parallel,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "cpus": cpu_count(),
        **summarize_serving([contender.name for contender in contenders], rounds),
    }


@contextmanager
def _asker(url: str, api_key: str | None, parallel: int, *, local: bool) -> Iterator[Asker]:
    asker = Asker(url, api_key=api_key, parallel=parallel, local=local)
    try:
        yield asker
    finally:
        asker.close()


def _named(model: str | None) -> list[str]:
    return [] if model is None else [model]


def _tokenizer(model: str | None) -> Tokenizer:
    """The target's alone: its weights are the server's to load."""
    return load_tokenizer(read_checkpoint(locate(model if model is not None else embedded_path(_EMBEDDED_TARGET))))


def _check_speculates(card: dict[str, Any]) -> None:
    state = card.get("speculative")
    if not isinstance(state, dict) or "enabled" not in state:
        raise PosttrainllmError("the server does not say whether it speculates, expected one of `posttrainllm serve`")
    if not state["enabled"]:
        raise PosttrainllmError(f"the server does not speculate: {state.get('reason')}")


def _setting_line(result: dict[str, Any]) -> str:
    server = result["server"]
    return (
        f"\n{server.get('id')}, {server.get('device')}, {server.get('dtype')}, K={result['draft_k']}, T=0, "
        f"{result['prompt_tokens']} + {result['max_tokens']} tokens, {result['repeats']} prompts, "
        f"{result['parallel']} at a time; tok/s end to end, decode by the server's clock"
    )


if __name__ == "__main__":
    run_command(command)
