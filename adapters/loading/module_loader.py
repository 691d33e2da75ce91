"""mlx-lm's own module for a checkpoint, its weights in memory."""

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from posttrainllm.adapters.loading.adapter import Adapter
from posttrainllm.adapters.loading.checkpoint import Checkpoint, readable
from posttrainllm.adapters.loading.gguf_module import gguf_module
from posttrainllm.adapters.loading.llama_config import lifted_rope
from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:  # a model that needs no mlx-lm does not load MLX's layers either
    from mlx.nn.layers.base import Module

__all__ = ["build_module", "load_module"]


def build_module(checkpoint: Checkpoint, dtype: str) -> "Module":
    """Build the architecture over the tensors of a checkpoint, none of which is read from its files yet.

    Args:
        checkpoint: a checked directory, or a GGUF file, whose weights are read.
        dtype: see `load_module`; for a GGUF file.

    Returns:
        The module, its weights as they are stored.

    Raises:
        CheckpointError: weights and config do not fit.
        UnsupportedModelError: mlx-lm does not know the architecture.
    """
    from mlx_lm.utils import load_model  # pulls in transformers: seconds

    said = io.StringIO()
    try:
        module: Module
        if checkpoint.gguf is not None:
            module = gguf_module(checkpoint.gguf, dtype)
        else:
            with contextlib.redirect_stdout(said):  # architectures print what they miss; a command's output is its own
                module = load_model(checkpoint.path, lazy=True, model_config=lifted_rope(checkpoint.config))[0]
    except Exception as error:  # whatever an architecture makes of a config that it does not expect
        raise _translate(checkpoint.path, checkpoint.config, error) from None
    except SystemExit:  # of one that misses a package
        family, text = checkpoint.config.get("model_type"), collapsed(said.getvalue())
        raise UnsupportedModelError(
            f"{checkpoint.path}: mlx-lm cannot load {family!r:.100} here: {text:.300}"
        ) from None
    return module


def load_module(checkpoint: Checkpoint, dtype: str, adapter: Adapter | None = None) -> "Module":
    """Build the architecture, read the weights and cast them.

    Args:
        checkpoint: a checked directory.
        dtype: "float32", "float16" or "bfloat16"; quantised weights keep their bits and take it for the rest.
        adapter: put on it, by mlx-lm's own layers; None for none.

    Returns:
        The module, its weights in memory.

    Raises:
        CheckpointError: weights and config do not fit, or the adapter does not.
        UnsupportedModelError: mlx-lm does not know the architecture.
    """
    module = build_module(checkpoint, dtype)
    module.set_dtype(getattr(mx, dtype))
    module.eval()
    mx.eval(module.parameters())  # type: ignore[no-untyped-call] # as MLX declares it
    if adapter is not None:
        from posttrainllm.adapters.loading.adapter_layers import adapt_module

        with readable(adapter.path, "does not fit the model"):
            adapt_module(module, adapter, dtype)
    return module


def _translate(path: Path, config: dict[str, Any], error: Exception) -> CheckpointError | UnsupportedModelError:
    text = collapsed(error) or type(error).__name__
    if isinstance(error, ValueError) and "not supported" in text:
        return UnsupportedModelError(
            f"{path}: model_type {config.get('model_type')!r:.100} is not one that mlx-lm knows"
        )
    if isinstance(error, TypeError) and "required positional" in text:
        return CheckpointError(f"{path}/config.json: lacks {text.rsplit(':', 1)[-1].strip()}")
    if isinstance(error, KeyError):
        return CheckpointError(f"{path}/config.json: lacks {text}")
    return CheckpointError(f"{path}: weights and config.json do not fit: {text[:300]}")
