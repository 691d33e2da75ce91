"""The tokenizer of a GGUF file, built from its metadata as a tokenizer.json.

`gpt2` is a byte-level BPE with its merges, whose way to cut a text into words is named and not written out; `llama` is
SentencePiece's BPE, whose merges are the order of its scores. gguf_words.py has the words.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from posttrainllm.adapters.loading.fast_tokenizer import FastBackend
from posttrainllm.adapters.loading.gguf_config import whole_number
from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.adapters.loading.gguf_merges import scored_merges, stated_merges
from posttrainllm.adapters.loading.gguf_values import shown_value
from posttrainllm.adapters.loading.gguf_words import words_of
from posttrainllm.adapters.loading.tinygpt_layout import shown
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["gguf_backend", "text_ids", "tokenizer_json"]

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# control tokens that end a reply beside the eos token: the file names one of them at most, as llama.cpp knows
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<|end_of_turn|>", "<EOT>", "</s>"),
    }
)
_SPACE = "▁"
_Kinds = npt.NDArray[np.integer[Any]]


def text_ids(header: GgufHeader, rows: int) -> dict[str, Any]:
    """Ids that begin and end a text, for config.json.

    Args:
        header: of the file.
        rows: of the embedding.

    Returns:
        `bos_token_id` and `eos_token_id`, the second a list; None of what there is not.

    Raises:
        CheckpointError: the vocabulary is missing, or does not fit; with got and expected.
    """
    tokens, kinds = _tokens(header)
    if len(tokens) > rows:
        raise CheckpointError(f"{header.path}: {_KEY}tokens: got {len(tokens)}, expected {rows} at most, one a row")
    named = {name: _id(header, f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    ends = {named[name] for name in ("eos", "eot", "eom")} - {None}
    ends |= {index for index, token in enumerate(tokens) if kinds[index] == _CONTROL and token in _ENDS}
    return {"bos_token_id": named["bos"], "eos_token_id": sorted(ends) or None}


def gguf_backend(header: GgufHeader) -> FastBackend:
    """Build a tokenizer.

    Args:
        header: of the file.

    Returns:
        The tokenizer, with its template.

    Raises:
        CheckpointError: the metadata contradict themselves; with got and expected.
        UnsupportedModelError: the tokenizer is one that is not built here; it is named.
    """
    tokens, _ = _tokens(header)
    ids = {name: _id(header, f"{key}_token_id", len(tokens)) for key, name in _NAMED.items()}
    return FastBackend(
        core=tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(header))),
        special_tokens={name: tokens[index] for name, index in ids.items() if index is not None},
        chat_template=_template(header),
    )


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """What `gguf_backend` is built from.

    Args:
        header: of the file.

    Returns:
        Plain values, in the layout of tokenizer.json.

    Raises:
        CheckpointError: the metadata contradict themselves; with got and expected.
        UnsupportedModelError: the tokenizer is one that is not built here; it is named.
    """
    tokens, kinds = _tokens(header)
    # rows that fill a matrix up; the tokenizer that the file was made of has no such tokens
    filler = {index for index, token in enumerate(tokens) if kinds[index] == _UNUSED and token == f"[PAD{index}]"}
    vocabulary = {token: index for index, token in enumerate(tokens) if index not in filler}
    kind = header.metadata.get(f"{_KEY}model")
    if kind == "gpt2":
        parts, starts = _byte_level(header, vocabulary)
    elif kind == "llama":
        parts, starts = _sentence_piece(header, tokens, kinds), True
    else:
        raise UnsupportedModelError(f"{header.path}: {_KEY}model: got {shown_value(kind)}, expected gpt2 or llama")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **{"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False},
                **{"normalized": False, "special": int(kinds[index]) != _USER},
            }
            for index, token in enumerate(tokens)
            if kinds[index] in (_UNKNOWN, _CONTROL, _USER) and token
        ],
        **parts,
        "post_processor": _frame(header, tokens, starts=starts),
    }


def _byte_level(header: GgufHeader, vocabulary: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    """Its parts, and whether a text begins with the bos token where nothing says so."""
    words = words_of(header)
    model = {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False},
        "ignore_merges": words.ignore_merges,
        "vocab": vocabulary,
        "merges": stated_merges(header, vocabulary),
    }
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    parts = {
        "normalizer": words.normalizer,
        "pre_tokenizer": words.pre_tokenizer,
        "decoder": decoder,
        "model": model,
    }
    return parts, words.add_bos


def _sentence_piece(header: GgufHeader, tokens: Sequence[str], kinds: _Kinds) -> dict[str, Any]:
    if _flag(header, "remove_extra_whitespaces", default=False):
        raise UnsupportedModelError(
            f"{header.path}: {_KEY}remove_extra_whitespaces: got true, expected false: it is not implemented"
        )
    prefixed = _flag(header, "add_space_prefix", default=True)
    unknown = _id(header, "unknown_token_id", len(tokens))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefixed else []), replace],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            **{"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None},
            "unk_token": None if unknown is None else tokens[unknown],
            **{"fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": scored_merges(
                header, tokens, normal={index for index in range(len(tokens)) if kinds[index] == _NORMAL}
            ),
        },
    }


def _frame(header: GgufHeader, tokens: Sequence[str], *, starts: bool) -> dict[str, Any] | None:
    """What stands around a text."""
    around: dict[str, list[int]] = {"bos": [], "eos": []}
    for name, default in (("bos", starts), ("eos", False)):
        if _flag(header, f"add_{name}_token", default=default):
            index = _id(header, f"{name}_token_id", len(tokens))
            if index is not None:
                around[name].append(index)
            elif f"{_KEY}add_{name}_token" in header.metadata:
                raise CheckpointError(f"{header.path}: {_KEY}add_{name}_token: got true, expected {name}_token_id, too")
    if not any(around.values()):
        return None

    def special(index: int, segment: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens[index], "type_id": segment}}

    def framed(name: str, segment: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": name, "type_id": segment}}
        first, last = ([special(index, segment) for index in around[end]] for end in ("bos", "eos"))
        return [*first, middle, *last]

    return {
        "type": "TemplateProcessing",
        "single": framed("A", 0),
        "pair": framed("A", 0) + framed("B", 1),
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
            for index in (*around["bos"], *around["eos"])
        },
    }


def _tokens(header: GgufHeader) -> tuple[list[str], _Kinds]:
    """Pieces and their kinds; no piece twice."""
    tokens = header.metadata.get(f"{_KEY}tokens")
    if not isinstance(tokens, list) or len(tokens) < 2:
        raise CheckpointError(f"{header.path}: {_KEY}tokens: got {shown_value(tokens)}, expected a list of texts")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise CheckpointError(f"{header.path}: {_KEY}tokens: got {shown(twice)} twice, expected it once")
    kinds = header.metadata.get(f"{_KEY}token_type")
    if kinds is None:
        return tokens, np.ones(len(tokens), dtype=np.int32)
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {_KEY}token_type: got {shown_value(kinds)}, expected {len(tokens)} whole numbers"
        )
    return tokens, kinds


def _id(header: GgufHeader, name: str, size: int) -> int | None:
    """An id of the vocabulary, None where the file names none."""
    key = f"{_KEY}{name}"
    if key not in header.metadata:
        return None
    index = whole_number(header, key, least=0)
    if index >= size:
        raise CheckpointError(f"{header.path}: {key}: got {index}, expected an id below {size}")
    return index


def _flag(header: GgufHeader, name: str, *, default: bool) -> bool:
    value = header.metadata.get(f"{_KEY}{name}", default)
    if type(value) is not bool:
        raise CheckpointError(f"{header.path}: {_KEY}{name}: got {shown_value(value)}, expected true or false")
    return value


def _template(header: GgufHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"{header.path}: tokenizer.chat_template: got {shown_value(template)}, expected a text")
    return template
