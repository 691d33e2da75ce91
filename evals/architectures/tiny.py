"""A random model of a configuration, as a directory."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path

from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.messages import collapsed
from posttrainllm.evals.architectures.configurations import Configuration
from posttrainllm.kernel.errors import UnsupportedModelError

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

__all__ = ["random_module", "save_model"]

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def random_module(configuration: Configuration, *, seed: int = 0) -> "Module":
    """Build mlx-lm's module and draw its weights.

    Args:
        configuration: of the module.
        seed: of the weights.

    Returns:
        The module, float32.

    Raises:
        UnsupportedModelError: mlx-lm cannot build it here.
    """
    from mlx_lm.utils import _get_classes

    generator = np.random.default_rng(seed)

    def draw(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        noise = mx.array(generator.standard_normal(array.shape).astype(np.float32))
        if array.ndim >= 2:
            size = 1.5 / array.shape[-1] ** 0.5  # products keep the size of what they multiply, and a little more
            return noise * size
        # mlx-lm draws biases from a global generator; norms stay near 1
        return 0.1 * noise if path.endswith("bias") else array + 0.1 * noise

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # one says in print what it lacks, and leaves the process
            model_class, args_class = _get_classes(config=json.loads(json.dumps(configuration.config)))
            module: Module = model_class(args_class.from_dict(json.loads(json.dumps(configuration.config))))
    except (Exception, SystemExit) as error:
        text = collapsed(said.getvalue() or error, 200)
        raise UnsupportedModelError(f"{configuration.module}: mlx-lm cannot build it here: {text}") from None
    module.update(tree_map_with_path(draw, module.parameters()))  # type: ignore[no-untyped-call] # as MLX declares it
    module.eval()
    mx.eval(module.parameters())  # type: ignore[no-untyped-call] # as MLX declares it
    return module


def save_model(module: "Module", config: dict[str, Any], path: Path) -> None:
    """Write a model as mlx-lm does, with the embedded models' tokenizer.

    Args:
        module: of the config.
        config: for config.json.
        path: the directory, made here.
    """
    from mlx_lm.utils import save_model as save_weights

    path.mkdir(parents=True)
    save_weights(path, module)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in _TOKENIZER:
        shutil.copyfile(embedded_path("target-16m") / name, path / name)
