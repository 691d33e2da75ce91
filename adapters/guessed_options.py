"""What options and commands of mlx-lm, llama.cpp, vLLM and Ollama are called here, for the error of who tries theirs.

Names that click's own suggestion gets right are not listed.
"""

import re
from collections.abc import Sequence

import click

__all__ = ["GUESSED", "GUESSED_COMMANDS", "no_such_option"]

_MODEL = ("the model stands without an option, as in `{command} MODEL`",)
_DRAFT_MODEL = ("--draft-model",)
_DRAFT_K = ("--draft-k",)
_MAX_TOKENS = ("--max-tokens",)
_CONTEXT = ("--max-context", "no context is set, it holds the prompt and --max-tokens")
_KV_BITS = ("--kv-bits",)
_DEVICE = ("every layer is on the device that MLX runs on",)
GUESSED: dict[str, tuple[str, ...]] = {
    # mlx-lm
    "--model": _MODEL,
    "--temp": ("--temperature",),
    "--num-draft-tokens": _DRAFT_K,
    "--max-kv-size": _CONTEXT,
    "--decode-concurrency": ("--slots",),
    "--extra-eos-token": ("--stop",),
    "--num-trials": ("--repeats",),
    "--trust-remote-code": ("a checkpoint's own code is never run",),
    "--system-prompt": ("--system",),
    "-p": ("--prompt", "--prompt-tokens"),
    # llama.cpp; an -m of mlx-lm is the number of tokens
    "-m": (f"{_MODEL[0]}, and the number of tokens is --max-tokens", *_MODEL),
    "-hf": _MODEL,
    "--hf-repo": _MODEL,
    "-md": _DRAFT_MODEL,
    "--model-draft": _DRAFT_MODEL,
    "--draft": _DRAFT_K,
    "--draft-n": _DRAFT_K,
    "--draft-max": _DRAFT_K,
    "--spec-draft-n-max": _DRAFT_K,
    "-n": _MAX_TOKENS,
    "--predict": _MAX_TOKENS,
    "--n-predict": _MAX_TOKENS,
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "-np": ("--slots",),
    "--parallel": ("--slots",),
    "-f": ("--prompt-file",),
    "--file": ("--prompt-file",),
    "-sys": ("--system",),
    "-s": ("--seed",),
    "-r": ("--stop",),
    "--reverse-prompt": ("--stop",),
    "-a": ("--served-model-name",),
    "--alias": ("--served-model-name",),
    "--lora": ("--adapter-path",),
    "-ctk": _KV_BITS,
    "--cache-type-k": _KV_BITS,
    "-ctv": _KV_BITS,
    "--cache-type-v": _KV_BITS,
    "-ngl": _DEVICE,
    "--gpu-layers": _DEVICE,
    "--n-gpu-layers": _DEVICE,
    # vLLM
    "--speculative-config": ("--draft-model and --draft-k",),
    "--speculative-model": _DRAFT_MODEL,
    "--num-speculative-tokens": _DRAFT_K,
    "--max-model-len": _CONTEXT,
    "--max-num-seqs": ("--slots",),
    "--kv-cache-dtype": _KV_BITS,
}
"""By a name of theirs: what it is here, or a sentence; the first of which the command has all that it names."""
GUESSED_COMMANDS = {
    "benchmark": "bench",  # mlx-lm
    "cli": "chat",  # llama.cpp
    "complete": "sample",  # vLLM
    "completion": "sample",  # llama.cpp
    "generate": "sample",  # mlx-lm
    "perplexity": "zoo evaluate",  # llama.cpp, mlx-lm
    "run": "chat",  # Ollama
    "server": "serve",  # mlx-lm, llama.cpp
}
"""By a name of theirs: the command here."""
_OF_A_REQUEST = ("--temperature", "--top-p", "--top-k", "--min-p", "--seed", "--stop", "--max-tokens")
"""Of `sample`, and of each request to a server."""


def no_such_option(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Say what an option is called here that others have by that name.

    Args:
        error: of click.
        words: the command line; of -ngl click tells no more than that there is no -n.

    Returns:
        One line; click's own where nothing is known of the name.
    """
    name = _as_written(error.option_name, words)
    answer = None if error.ctx is None else _answer(name, error.ctx)
    return error.format_message() if answer is None else f"no such option {name}: {answer}"


def _answer(name: str, context: click.Context) -> str | None:
    here = {option for param in context.command.params for option in param.opts}
    arguments = [param.name for param in context.command.params if isinstance(param, click.Argument)]
    if arguments[:1] == ["model"]:
        here.add("MODEL")
    plain = name.replace("_", "-")  # vLLM takes both
    guesses = (plain,) if plain in here else GUESSED.get(plain, (plain,) if plain in _OF_A_REQUEST else ())
    for guess in guesses:
        if here.issuperset(re.findall(r"--[a-z-]+|MODEL", guess)):
            return f"it is {guess} here" if guess.startswith("-") else guess.format(command=context.command_path)
        if context.info_name == "serve" and guess in _OF_A_REQUEST:
            return f"every request has its own {guess[2:].replace('-', '_')}"
    return None


def _as_written(name: str, words: Sequence[str]) -> str:
    """The word that an option of one letter was read from, without a number behind it."""
    if len(name) > 2:
        return name
    written = [found[0] for word in words if (found := re.match("-[A-Za-z]+", word)) and name[1] in found[0]]
    return written[0] if written else name
