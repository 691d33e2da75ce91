"""Texts that a model writes itself. Acceptance is measured on what the target writes, so a draft may train on that."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

__all__ = ["Writing", "target_texts", "write_texts"]


@attrs.frozen(kw_only=True)
class Writing:
    """What texts are to be written."""

    rows: int
    """How many."""
    batch: int
    """Of them at once; draws at temperature 1 depend on it."""
    sequence: int
    """Tokens of each, and one more."""
    prompt: int
    """Of them the training text's, and not the model's own."""
    seed: int
    """Of prompts and draws."""
    greedy_share: float
    """Of the rows; the rest is drawn at temperature 1."""


def target_texts(
    target: nn.Module,
    ids: "np.ndarray[Any, Any]",
    wanted: Writing,
    *,
    origin: str,
    folder: Path,
) -> "np.ndarray[Any, Any]":
    """What `write_texts` makes, kept for a run that resumes.

    Args:
        target: mlx-lm's module.
        ids: uint16[N], the training text.
        wanted: what to write.
        origin: what names the target and the training text.
        folder: where they are kept for a run that resumes.

    Returns:
        uint16[rows, sequence + 1] of `wanted`.
    """
    key = hashlib.sha256(f"{origin} {wanted}".encode()).hexdigest()[:16]
    file = folder / f"on_policy-{key}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # none, or one that was cut off: it is made again
        kept: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
        if kept.shape == (wanted.rows, wanted.sequence + 1):
            return kept
    found = write_texts(target, ids, wanted)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(file, found)
    return found


def write_texts(module: nn.Module, ids: "np.ndarray[Any, Any]", wanted: Writing) -> "np.ndarray[Any, Any]":
    """Continue windows of the training text, some greedily and the rest at temperature 1.

    Args:
        module: mlx-lm's module of the model that writes.
        ids: uint16[N], the training text.
        wanted: what to write.

    Returns:
        uint16[rows, sequence + 1] of `wanted`.
    """
    starts = np.random.default_rng([wanted.seed, wanted.rows]).integers(0, len(ids) - wanted.prompt, wanted.rows)
    prompts = np.stack([ids[start : start + wanted.prompt] for start in starts]).astype(np.int32)
    greedy = np.arange(wanted.rows) % 100 < 100 * wanted.greedy_share
    parts = []
    for first in range(0, wanted.rows, wanted.batch):
        part = slice(first, first + wanted.batch)
        random = mx.random.key(wanted.seed + 1 + first)
        parts.append(_continue(module, prompts[part], greedy[part], wanted.sequence + 1, random))
    mx.clear_cache()  # what the caches took is for training now
    return np.concatenate(parts).astype(np.uint16)


def _continue(
    module: nn.Module, prompts: "np.ndarray[Any, Any]", greedy: "np.ndarray[Any, Any]", length: int, key: mx.array
) -> "np.ndarray[Any, Any]":
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(module)
    temperature_0 = mx.array(greedy)
    tokens = mx.array(prompts)
    pieces = [tokens]
    for _ in range(length - prompts.shape[1]):
        logits = module(tokens, cache=cache)[:, -1].astype(mx.float32)  # [B, V]
        key, own = mx.random.split(key)
        drawn = mx.random.categorical(logits, key=own)
        tokens = mx.where(temperature_0, logits.argmax(axis=-1), drawn).astype(mx.int32)[:, None]  # [B, 1]
        pieces.append(tokens)
        mx.async_eval(tokens, key)
    return np.array(mx.concatenate(pieces, axis=1))
