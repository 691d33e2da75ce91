"""What becomes of one configuration: saved, loaded as any model is, and compared."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posttrainllm.adapters.loading.families import family_forward
from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.evals.architectures.comparing import compare
from posttrainllm.evals.architectures.configurations import Configuration, features
from posttrainllm.evals.architectures.tiny import random_module, save_model
from posttrainllm.kernel.errors import PosttrainllmError, UnsupportedModelError

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

    from posttrainllm.adapters.loading.module import Model

__all__ = ["TOLERANCE", "Outcome", "examine"]

TOLERANCE = 1e-5
"""Largest difference of a logit, as a share of the largest one."""
_LEAST_INFLUENCE = 1e-3
_MORE_SLOTS = "compared with a cache that holds as many positions as the module's mask admits; mlx-lm's holds one fewer"
_KINDS = {
    "KVCache": "everything",
    "RotatingKVCache": "a window",
    "ChunkedKVCache": "chunks",
    "CacheList": "lists",
}


@attrs.frozen(kw_only=True)
class Outcome:
    """A row of the table."""

    module: str
    features: str
    """What the layers are made of, beside attention and a feed-forward part."""
    caches: str = ""
    """What mlx-lm's caches keep."""
    own_forward: bool = False
    """Whether it runs by a forward of `adapters/loading/families`, and not as mlx-lm's module is."""
    verdict: str
    """"exact", "within", "differs" or "refused"."""
    reason: str = ""
    """Of a refusal, or how far it is off; else what the comparison needed."""

    @property
    def supported(self) -> bool:
        """Whether it decodes what mlx-lm does."""
        return self.verdict in ("exact", "within")


def examine(configuration: Configuration, *, draft: bool = False) -> Outcome:
    """Build, save, load and compare.

    Args:
        configuration: of the module.
        draft: whether it is loaded as a draft of the embedded target; then it is not compared.

    Returns:
        What became of it; whatever our own errors say is a refusal.
    """
    name = configuration.module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        try:
            save_model(random_module(configuration), configuration.config, path)
            pair = load_pair(None, path) if draft else load_pair(path, dtype="float32", forward="module")
        except PosttrainllmError as error:
            reason = str(error).removeprefix(f"{path}: ").removeprefix(f"{name}: ")
            return Outcome(module=name, features=features(configuration), verdict="refused", reason=reason)
        model = pair.draft if draft else pair.target
        assert model is not None
        return _compared(configuration, model)


def _compared(configuration: Configuration, model: "Model") -> Outcome:
    module = model.module
    if module is None:
        raise UnsupportedModelError(f"{configuration.module}: got a model without mlx-lm's module, expected one")
    found = compare(model, module, more_slots=configuration.more_slots)
    if not found.finite:
        verdict, reason = "differs", "logits that are not finite"
    elif found.influence < _LEAST_INFLUENCE:
        verdict, reason = "differs", f"the first id changes the last logits by {found.influence:.1e} alone"
    elif found.error > TOLERANCE:
        verdict, reason = "differs", f"by {found.error:.1e} of the largest logit"
    else:
        verdict, reason = "exact" if found.error == 0 else "within", _MORE_SLOTS if configuration.more_slots else ""
    return Outcome(
        module=configuration.module,
        features=features(configuration),
        caches=_kept(module),
        own_forward=family_forward(model.family) is not None,
        verdict=verdict,
        reason=reason,
    )


def _kept(module: "Module") -> str:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(module)
    return ", ".join(dict.fromkeys(_KINDS[type(cache).__name__] for cache in caches))
