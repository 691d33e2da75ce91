"""How a byte-level tokenizer of a GGUF file cuts a text into words: by a name that llama.cpp knows.

The patterns are those of the tokenizers that the names stand for. Where the pattern of another name was taken, most
texts would look right and some would be other ids, so that a name which is not here is refused.
"""

from typing import Any

import attrs

from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.adapters.loading.gguf_values import shown_value
from posttrainllm.kernel.errors import UnsupportedModelError

__all__ = ["Words", "words_of"]

_KEY = "tokenizer.ggml.pre"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@attrs.frozen(kw_only=True)
class Words:
    """What a name stands for, in the layout of tokenizer.json."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    """Whether a word that is a token is taken whole."""
    add_bos: bool = False
    """Whether a text begins with the bos token where nothing says so."""


def words_of(header: GgufHeader) -> Words:
    """Look a file's name up.

    Args:
        header: of the file.

    Returns:
        What it stands for.

    Raises:
        UnsupportedModelError: it is missing, or is not one that is known here.
    """
    name = header.metadata.get(_KEY)
    found = _NAMES.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedModelError(
            f"{header.path}: {_KEY}: got {shown_value(name)}, expected one of {', '.join(sorted(_NAMES))}: how it cuts "
            "text into words is not known here"
        )
    return found


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> dict[str, Any]:
    """One pattern after the other: each cuts what the ones before it have left."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(use_regex=False)]}


_DIGITS = Words(
    pre_tokenizer={
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    }
)
_OF_LLAMA3 = Words(pre_tokenizer=_split(_LLAMA3), ignore_merges=True, add_bos=True)
_OF_QWEN2 = Words(pre_tokenizer=_split(_QWEN2), normalizer={"type": "NFC"})
_NAMES = {
    "default": Words(pre_tokenizer=_split(*_DEFAULT)),
    "gpt-2": Words(pre_tokenizer=_byte_level(use_regex=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _OF_LLAMA3),
    "smaug-bpe": Words(pre_tokenizer=_split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
}
