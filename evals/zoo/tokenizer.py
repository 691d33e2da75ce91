"""One byte-level BPE for every preset: a smaller vocabulary is the first ids of the larger one."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = [
    "END_OF_TEXT",
    "VOCAB_SIZE",
    "cut_tokenizer",
    "digest",
    "read_tokenizer",
    "tokenizer_config",
    "train_tokenizer",
]

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 16384
# a word takes one sign in front of it (".name", "(self"), numbers go by three digits, and a line's end takes the next
# line's indentation: of the splits tried, the one with most characters a token on held-out text at 4096 ids
_SPLIT = r"[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE.

    Args:
        texts: documents.
        vocab_size: ids, the end of text and the 256 bytes included.

    Returns:
        The tokenizer; it decodes what it encoded to the same text, whatever the text.
    """
    made = Tokenizer(models.BPE())
    # the two classes take what they are given, whatever their stubs say of it
    made.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def cut_tokenizer(text: str, vocab_size: int) -> str:
    """Keep the first ids of a tokenizer.

    Args:
        text: a tokenizer.json.
        vocab_size: how many ids to keep.

    Returns:
        A tokenizer.json with exactly that many.

    Raises:
        click.ClickException: it has fewer, or it is no byte-level BPE.
    """
    content: dict[str, Any] = json.loads(text)
    vocabulary: dict[str, int] = content["model"]["vocab"]
    if len(vocabulary) < vocab_size:
        raise click.ClickException(f"tokenizer: got {len(vocabulary):,} ids, expected at least {vocab_size:,}")
    kept = {piece: index for piece, index in vocabulary.items() if index < vocab_size}
    # a merge's result has a higher id than its parts: what makes an id that is kept needs only such ids
    merges = [pair for pair in content["model"]["merges"] if "".join(pair) in kept]
    content["model"] |= {"vocab": kept, "merges": merges}
    return json.dumps(content, ensure_ascii=False)


def read_tokenizer(file: Path, vocab_size: int) -> tuple[str, Tokenizer]:
    """Read a tokenizer.json for a preset.

    Args:
        file: with `vocab_size` ids or more.
        vocab_size: of the preset.

    Returns:
        The tokenizer.json to ship with the model, and the tokenizer.

    Raises:
        click.ClickException: the file is missing or no such tokenizer.
    """
    try:
        text = cut_tokenizer(file.read_text(encoding="utf-8"), vocab_size)
        made = Tokenizer.from_str(text)
    except FileNotFoundError:
        raise click.ClickException(f"{file}: no such file; `posttrainllm zoo tokenizer` makes it") from None
    except click.ClickException as error:
        raise click.ClickException(f"{file}: {error.message}") from None
    except Exception as error:  # the library raises plain exceptions of its own
        raise click.ClickException(f"{file}: is no byte-level BPE: {type(error).__name__}: {error}") from None
    if made.token_to_id(END_OF_TEXT) != 0:
        raise click.ClickException(f"{file}: {END_OF_TEXT}: got id {made.token_to_id(END_OF_TEXT)}, expected 0")
    made.encode_special_tokens = True  # a document that quotes the mark does not end there
    return text, made


def tokenizer_config(context: int) -> dict[str, object]:
    """What tokenizer_config.json says.

    Args:
        context: positions of the model.

    Returns:
        The content.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "bos_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }


def digest(text: str) -> str:
    """SHA-256 of a tokenizer.json, with the version of the library that reads it."""
    return hashlib.sha256(f"{tokenizers.__version__}\n{text}".encode()).hexdigest()
