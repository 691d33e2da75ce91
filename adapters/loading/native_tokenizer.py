"""The tokenizer of a `.tinygpt` file: that of the directory which it names, or bytes."""

from pathlib import Path

import attrs
import tokenizers

from posttrainllm.adapters.loading.checkpoint import Checkpoint, read_json
from posttrainllm.adapters.loading.fast_tokenizer import FastBackend
from posttrainllm.adapters.loading.tinygpt_header import TinyGptHeader
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["byte_tokenizer", "native_tokenizer", "tokenizer_folder"]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Every byte of the UTF-8 text is a token, and its value the id.

    It is a byte-level BPE without a merge, so that it can be written as a tokenizer.json, and its pieces compared.
    """
    pieces = {piece: byte for byte, piece in enumerate(_pieces())}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return core


def tokenizer_folder(header: TinyGptHeader) -> Path | None:
    """The directory of a file's tokenizer.

    A file that has moved still finds a directory of the same name beside it.

    Args:
        header: of the file.

    Returns:
        The directory; None where tokens are bytes.

    Raises:
        CheckpointError: there is none with a tokenizer.json.
    """
    if header.tokenizer_source is None:
        return None
    beside = header.path.parent
    named = beside / Path(header.tokenizer_source).expanduser()  # an absolute one stays as it is
    for folder in (named, beside / Path(header.tokenizer_source).name):
        if (folder / "tokenizer.json").is_file():
            return folder
    raise CheckpointError(
        f"{header.path}: tokenizerSource: got {header.tokenizer_source}, expected a directory with tokenizer.json "
        "there, or of that name beside the file"
    )


def native_tokenizer(checkpoint: Checkpoint) -> tuple[Checkpoint, FastBackend | None]:
    """What to load a tokenizer from.

    Args:
        checkpoint: of a `.tinygpt` file.

    Returns:
        The checkpoint, as that of the directory which has the tokenizer, and the tokenizer itself where tokenizer.json
        is all that there is; None leaves it to the loaders of directories.

    Raises:
        CheckpointError: there is no such directory, or a file in it cannot be read.
    """
    assert checkpoint.native is not None, "a directory has its own"
    folder = tokenizer_folder(checkpoint.native)
    if folder is None:
        return checkpoint, _backend(byte_tokenizer())
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    # the family that reads a tokenizer as it stands, where nothing names another
    checkpoint = attrs.evolve(checkpoint, path=folder, config={"model_type": "llama", **config})
    if (folder / "tokenizer_config.json").is_file():
        return checkpoint, None
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.no_truncation()
    core.no_padding()
    return checkpoint, _backend(core)


def _backend(core: tokenizers.Tokenizer) -> FastBackend:
    return FastBackend(core=core, special_tokens={}, chat_template=None)


def _pieces() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it is printed, else a spare."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printed else next(spare)) for byte in range(256)]
