"""`posttrainllm zoo`: models of our own from a corpus. Names its commands by import string, as the main group does."""

import click

from posttrainllm.adapters.lazy import LazyGroup

__all__ = ["zoo"]

_COMMANDS = {
    "corpus": ("posttrainllm.evals.zoo.corpus.command:corpus", "Build the corpus from pinned packages."),
    "evaluate": ("posttrainllm.evals.zoo.evaluate_command:evaluate", "Measure a model on the held-out text."),
    "list": ("posttrainllm.evals.zoo.list_command:list_presets", "Show the presets."),
    "tokenizer": ("posttrainllm.evals.zoo.tokenizer_command:tokenizer", "Train the tokenizer of every preset."),
    "train": ("posttrainllm.evals.zoo.train_command:train", "Train a preset, alone or after a target."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
def zoo() -> None:
    """Train small models for trying and measuring: a corpus, a tokenizer, presets."""
