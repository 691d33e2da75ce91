"""All modules, one after the other."""

from collections.abc import Callable
from importlib.metadata import version

from posttrainllm.adapters.runtime import start
from posttrainllm.evals.architectures.configurations import configurations, helpers, stateful
from posttrainllm.evals.architectures.examine import examine
from posttrainllm.evals.architectures.table import render

__all__ = ["page"]


def page(tell: Callable[[str], None] = lambda name: None) -> str:
    """Examine every module and write the page.

    Args:
        tell: called with each one's name before it.

    Returns:
        Markdown.
    """
    outcomes = []
    for configuration in configurations():
        tell(configuration.module)
        outcomes.append(examine(configuration))
    refusals = []
    for configuration in stateful():
        tell(configuration.module)
        refusals.append((configuration, examine(configuration)))
    versions = f"MLX {version('mlx')}, mlx-lm {version('mlx-lm')}, {start().device}"
    return render(outcomes, refusals, helpers(), versions=versions)
