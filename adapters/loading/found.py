"""Which models are on this machine: the package's own, those of the hub's cache, those of a folder."""

from pathlib import Path

import attrs

from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.errors import CheckpointError, UsageError

__all__ = ["EMBEDDED", "FoundModel", "embedded_models", "hub_models", "models_in", "parameter_count"]

EMBEDDED = ("target-16m", "draft-3m")
_SUFFIXES = (".tinygpt", ".gguf")  # models that are one file
_MARKS = ("config.json", "model*.safetensors")  # one without the other is a model that is torn


@attrs.frozen(kw_only=True)
class FoundModel:
    """A model that lies here; nothing of it was read."""

    name: str
    """For people: an id of the hub, or the name of the directory or file."""
    path: Path
    """What `read_checkpoint` takes."""


def embedded_models() -> list[FoundModel]:
    """The models of the package."""
    return [FoundModel(name=name, path=embedded_path(name)) for name in EMBEDDED]


def hub_models(folder: Path | None = None) -> list[FoundModel]:
    """The models in the hub's cache on this machine; the hub itself is not asked.

    Args:
        folder: of the cache; None is the one that is set up.

    Returns:
        One a repository, by id: its revision `main`, which an id stands for where the hub cannot be reached, or the
        newest one.

    Raises:
        CheckpointError: the cache cannot be read.
    """
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        scan = huggingface_hub.scan_cache_dir() if folder is None else huggingface_hub.scan_cache_dir(folder)
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be read: {collapsed(error, 200)}") from None
    found = []
    for repository in sorted(scan.repos, key=lambda repository: repository.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            revision = repository.refs.get("main", newest)
            found.append(FoundModel(name=repository.repo_id, path=revision.snapshot_path))
    return found


def models_in(folder: str | Path) -> list[FoundModel]:
    """The models of a folder: itself, or the directories and files in it. It may be a cache of the hub, too.

    Args:
        folder: a directory, or a file that is a model.

    Returns:
        One each, by name. What bears no mark of a model is left out; what bears one may still be torn.

    Raises:
        UsageError: it is not there, or cannot be read.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            raise UsageError(f"--candidates: {folder}: got nothing there, expected a directory of models")
        if _is_model(folder):
            return [FoundModel(name=folder.resolve().name, path=folder)]
        if not folder.is_dir():
            raise UsageError(f"--candidates: {folder}: got a file, expected a model or a directory of models")
        inside = sorted(folder.iterdir())
        found = [FoundModel(name=path.name, path=path) for path in inside if _is_model(path)]
    except OSError as error:
        raise UsageError(f"--candidates: {str(folder)[:100]}: {error.strerror or error}") from None
    return found + (hub_models(folder) if any(path.name.startswith("models--") for path in inside) else [])


def parameter_count(checkpoint: Checkpoint) -> int | None:
    """How many parameters a model has, by the sizes of its tensors.

    Args:
        checkpoint: of the model.

    Returns:
        The number; None where packed weights do not say how many bits one has.
    """
    floats = sum(size // (4 if dtype == "float32" else 2) for dtype, size in checkpoint.float_bytes.items())
    packed = checkpoint.weight_bytes - sum(checkpoint.float_bytes.values())
    if not checkpoint.quantized or not packed:
        return floats
    scheme = checkpoint.config.get("quantization") or checkpoint.config.get("quantization_config")
    bits, group = (scheme.get(name) if isinstance(scheme, dict) else None for name in ("bits", "group_size"))
    if not (type(bits) is int and type(group) is int and bits > 0 and group > 0):
        return None
    weights = packed * 8 // bits
    return weights + max(floats - 2 * weights // group, 0)  # a scale and a bias a group are no parameters


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return any(next(path.glob(mark), None) is not None for mark in _MARKS)
    return path.suffix in _SUFFIXES
