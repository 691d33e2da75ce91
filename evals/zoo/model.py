"""mlx-lm's Llama with random weights, with those of a directory, and its losses."""

import json
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from posttrainllm.evals.zoo.presets import Preset

__all__ = [
    "build_module",
    "divergences",
    "load_any",
    "losses",
    "read_parameters",
    "same_vocabulary",
    "start_parameters",
    "unlikelihood",
    "with_parameters",
]

_EMBEDDING_SCALE = 0.02
_MATRIX_SCALE = 0.6  # of 1 / sqrt(columns): what a uniform draw within that bound has


def build_module(preset: Preset) -> nn.Module:
    """The module of a preset.

    Args:
        preset: its shape.

    Returns:
        mlx-lm's module; its own random weights are lazy and never made.
    """
    from mlx_lm.models import llama

    return llama.Model(llama.ModelArgs.from_dict(preset.config))


def start_parameters(preset: Preset, seed: int) -> dict[str, mx.array]:
    """Random weights; what writes to the residual stream is scaled down by the number of such writes.

    Args:
        preset: its shape.
        seed: of all draws.

    Returns:
        float32, by name.
    """
    found: dict[str, mx.array] = {}
    key = mx.random.key(seed)
    for name, shape in preset.shape.tensors().items():
        key, own = mx.random.split(key)
        if len(shape) == 1:
            found[name] = mx.ones(shape)
            continue
        scale = _EMBEDDING_SCALE if "embed" in name else _MATRIX_SCALE / shape[1] ** 0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= (2 * preset.shape.layers) ** 0.5
        found[name] = mx.random.normal(shape, scale=scale, key=own)
    mx.eval(found)
    return found


def with_parameters(module: nn.Module, parameters: dict[str, mx.array], dtype: mx.Dtype) -> nn.Module:
    """Put weights into a module.

    Args:
        module: gets them, cast; also while a function is traced.
        parameters: by name.
        dtype: to compute in.

    Returns:
        The module.
    """
    module.update(tree_unflatten([(name, array.astype(dtype)) for name, array in parameters.items()]))
    return module


def losses(logits: mx.array, targets: mx.array) -> mx.array:
    """Next-token loss.

    Args:
        logits: any float[B, T, V].
        targets: int32[B, T].

    Returns:
        float32[B, T], nats.
    """
    return nn.losses.cross_entropy(logits.astype(mx.float32), targets, reduction="none")


def divergences(target_logits: mx.array, draft_logits: mx.array) -> mx.array:
    """KL(target || draft) at temperature 1.

    Args:
        target_logits: any float[B, T, V].
        draft_logits: any float[B, T, V].

    Returns:
        float32[B, T], nats.
    """
    target, draft = target_logits.astype(mx.float32), draft_logits.astype(mx.float32)
    target_logprobs = target - mx.logsumexp(target, axis=-1, keepdims=True)
    draft_logprobs = draft - mx.logsumexp(draft, axis=-1, keepdims=True)
    return (mx.exp(target_logprobs) * (target_logprobs - draft_logprobs)).sum(axis=-1)


def unlikelihood(logits: mx.array, targets: mx.array, counted: mx.array) -> mx.array:
    """What it costs to find tokens likely (Welleck et al. 2019, arXiv:1908.04319).

    Args:
        logits: any float[B, T, V].
        targets: int32[B, T].
        counted: bool[B, T], the tokens that should not be.

    Returns:
        float32[], the mean of -log(1 - p) over them, nats; 0 where there are none.
    """
    others = -mx.expm1(-losses(logits, targets))  # 1 - p, in full where p is nearly 1
    costs = mx.where(counted, -mx.log(mx.maximum(others, 1e-7)), 0.0)
    return costs.sum() / mx.maximum(counted.sum(), 1)


def load_any(folder: Path, dtype: mx.Dtype) -> nn.Module:
    """A checkpoint that mlx-lm knows, in evaluation mode.

    Args:
        folder: model directory.
        dtype: to compute in.

    Returns:
        The module.

    Raises:
        CheckpointError: the directory is none, torn, or of another library.
    """
    from posttrainllm.adapters.loading.checkpoint import read_checkpoint, readable

    read_checkpoint(folder)
    with readable(folder, "cannot be loaded"):
        from mlx_lm.utils import load_model

        module, _ = load_model(folder)
        module.set_dtype(dtype)
        mx.eval(module.parameters())
    loaded: nn.Module = module.eval()
    return loaded


def read_parameters(folder: Path, preset: Preset) -> dict[str, mx.array]:
    """Weights of a directory of the same shape, to start from.

    Args:
        folder: model directory.
        preset: what it must be.

    Returns:
        float32, by name.

    Raises:
        CheckpointError: it is no such directory.
        click.ClickException: it has other weights.
    """
    found = dict(tree_flatten(load_any(folder, mx.float32).parameters()))
    expected = preset.shape.tensors()
    for name in sorted(found.keys() | expected.keys()):
        got = tuple(found[name].shape) if name in found else "nothing"
        if got != expected.get(name):
            raise click.ClickException(f"{folder}: {name}: got {got}, expected {expected.get(name, 'nothing')}")
    return found


def same_vocabulary(folder: Path, tokenizer_text: str, vocab_size: int) -> None:
    """Refuse a target whose ids mean something else.

    Args:
        folder: the target's directory.
        tokenizer_text: tokenizer.json of the draft.
        vocab_size: of the draft.

    Raises:
        CheckpointError: a file of it cannot be read.
        click.ClickException: the vocabularies differ.
    """
    from posttrainllm.adapters.loading.checkpoint import read_json

    config, content = read_json(folder / "config.json"), read_json(folder / "tokenizer.json")
    if config.get("vocab_size") != vocab_size:
        got = config.get("vocab_size")
        raise click.ClickException(f"{folder}: vocabulary: got {got} ids, expected the draft's {vocab_size}")
    own: dict[str, Any] = json.loads(tokenizer_text)
    theirs = content.get("model", {})
    for part in ("vocab", "merges"):
        if theirs.get(part) != own["model"][part]:
            raise click.ClickException(
                f"{folder}: tokenizer.json: its {part} differ from the draft's, expected the same"
            )
    if content.get("pre_tokenizer") != own["pre_tokenizer"]:
        raise click.ClickException(f"{folder}: tokenizer.json: it splits text otherwise than the draft's")
