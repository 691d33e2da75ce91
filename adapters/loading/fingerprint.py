"""Content hashes that name a model and a tokenizer, whatever their directory is called.

A hash covers the names, the sizes and the bytes of the files that decide what a model computes. Files above 1 GiB are
sampled, since reading them whole would take longer than loading: 256 blocks of 1 MiB at even distances, the first (a
safetensors header) and the last among them. A fingerprint with such a file in it ends in "~": two models that differ
between the blocks alone would share it. Training, quantising or merging an adapter changes weights everywhere.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrainllm.adapters.loading.gguf_types import is_gguf
from posttrainllm.adapters.loading.tinygpt_header import is_tinygpt, read_header
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["adapter_fingerprint", "fingerprint", "tokenizer_fingerprint"]

_WHOLE_BYTES = 2**30
_BLOCK_BYTES = 2**20
_BLOCKS = 256
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors", "adapter_model.safetensors")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)


def fingerprint(path: str | Path) -> str:
    """Hash what decides a model's logits: its config and its weights.

    Args:
        path: a model directory (its configs and model*.safetensors), or one file with everything in it.

    Returns:
        "sha256:" and 64 hex digits; with "~" behind them where a file was sampled.

    Raises:
        CheckpointError: there is nothing to hash, or it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        settings = (path / "config.json", path / "hf_quant_config.json")  # the second says how weights are packed
        return _of_files(path, [*settings, *sorted(path.glob("model*.safetensors"))])
    return _of_files(path, [path])


def adapter_fingerprint(path: str | Path) -> str:
    """Hash what an adapter changes of a model's logits: its config and its tensors.

    Args:
        path: its directory.

    Returns:
        As `fingerprint`.

    Raises:
        CheckpointError: there is nothing to hash, or it cannot be read.
    """
    path = Path(path)
    return _of_files(path, [path / name for name in _ADAPTER_FILES])


def tokenizer_fingerprint(path: str | Path) -> str:
    """Hash what decides which text an id stands for.

    Args:
        path: a model directory, or one file with everything in it.

    Returns:
        As `fingerprint`.

    Raises:
        CheckpointError: there is nothing to hash, or it cannot be read.
    """
    path = Path(path)
    if is_tinygpt(path):
        from posttrainllm.adapters.loading.native_tokenizer import byte_tokenizer, tokenizer_folder

        folder = tokenizer_folder(read_header(path))
        if folder is None:  # bytes are the same in every file
            return f"sha256:{hashlib.sha256(byte_tokenizer().to_str().encode()).hexdigest()}"
        path = folder
    if is_gguf(path):
        from posttrainllm.adapters.loading.gguf_header import read_gguf_header
        from posttrainllm.adapters.loading.gguf_tokenizer import gguf_backend

        backend = gguf_backend(read_gguf_header(path))
        parts = [backend.core.to_str(), *sorted(backend.special_tokens.values()), str(backend.chat_template)]
        return f"sha256:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"
    return _of_files(path, [path / name for name in _TOKENIZER_FILES] if path.is_dir() else [path])


def _of_files(path: Path, files: Sequence[Path]) -> str:
    digest, sampled, found = hashlib.sha256(), False, False
    try:
        for file in files:
            if not file.is_file():
                continue
            size, found = file.stat().st_size, True
            sampled |= size > _WHOLE_BYTES
            # the name of a file that stands alone is no content
            name = file.name if file != path else ""
            digest.update(f"{name}\0{size}\0".encode())
            for block in _blocks(file, size):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not found:
        raise CheckpointError(f"{path}: got no file to hash, expected a model directory or file")
    return f"sha256:{digest.hexdigest()}{'~' if sampled else ''}"


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    """All of a file, or its sample when it is large."""
    with file.open("rb") as stream:
        if size <= _WHOLE_BYTES:
            while block := stream.read(_BLOCK_BYTES):
                yield block
            return
        for index in range(_BLOCKS):
            stream.seek(index * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            yield stream.read(_BLOCK_BYTES)
