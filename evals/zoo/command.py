"""`posttrainllm zoo`: models of our own from a corpus. Names its commands by import string, as the main group does."""

import importlib

import click

__all__ = ["zoo"]

_COMMANDS = {
    "corpus": ("posttrainllm.evals.zoo.corpus.command:corpus", "Build the corpus from pinned packages."),
    "evaluate": ("posttrainllm.evals.zoo.evaluate_command:evaluate", "Measure a model on the held-out text."),
    "list": ("posttrainllm.evals.zoo.list_command:list_presets", "Show the presets."),
    "tokenizer": ("posttrainllm.evals.zoo.tokenizer_command:tokenizer", "Train the tokenizer of every preset."),
    "train": ("posttrainllm.evals.zoo.train_command:train", "Train a preset, alone or after a target."),
}


class _LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def zoo() -> None:
    """Train small models for trying and measuring: a corpus, a tokenizer, presets."""
