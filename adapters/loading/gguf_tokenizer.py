"""The tokenizer of a GGUF file, built from its metadata as a tokenizer.json.

`gpt2` is a byte-level BPE with its merges, whose way to cut a text into words is named and not written out; `llama` is
SentencePiece's BPE, whose merges are the order of its scores. gguf_words.py has the words.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from posttrainllm.adapters.loading.fast_tokenizer import FastBackend
from posttrainllm.adapters.loading.gguf_header import GgufHeader
from posttrainllm.adapters.loading.gguf_merges import scored_merges, stated_merges
from posttrainllm.adapters.loading.gguf_values import shown_value
from posttrainllm.adapters.loading.gguf_vocabulary import CONTROL, KEY, Kinds, read_flag, read_tokens, token_id
from posttrainllm.adapters.loading.gguf_words import words_of
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

__all__ = ["gguf_backend", "tokenizer_json"]

_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_NORMAL, _UNKNOWN, _USER, _UNUSED = 1, 2, 4, 5  # kinds of tokens, beside CONTROL
_SPACE = "▁"


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
    tokens, _ = read_tokens(header)
    ids = {name: token_id(header, f"{key}_token_id", len(tokens)) for key, name in _NAMED.items()}
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
    tokens, kinds = read_tokens(header)
    # rows that fill a matrix up; the tokenizer that the file was made of has no such tokens
    filler = {index for index, token in enumerate(tokens) if kinds[index] == _UNUSED and token == f"[PAD{index}]"}
    vocabulary = {token: index for index, token in enumerate(tokens) if index not in filler}
    kind = header.metadata.get(f"{KEY}model")
    if kind == "gpt2":
        parts, starts = _byte_level(header, vocabulary)
    elif kind == "llama":
        parts, starts = _sentence_piece(header, tokens, kinds), True
    else:
        raise UnsupportedModelError(f"{header.path}: {KEY}model: got {shown_value(kind)}, expected gpt2 or llama")
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
            if kinds[index] in (_UNKNOWN, CONTROL, _USER) and token
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


def _sentence_piece(header: GgufHeader, tokens: Sequence[str], kinds: Kinds) -> dict[str, Any]:
    if read_flag(header, "remove_extra_whitespaces", default=False):
        raise UnsupportedModelError(
            f"{header.path}: {KEY}remove_extra_whitespaces: got true, expected false: it is not implemented"
        )
    prefixed = read_flag(header, "add_space_prefix", default=True)
    unknown = token_id(header, "unknown_token_id", len(tokens))
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
        if read_flag(header, f"add_{name}_token", default=default):
            index = token_id(header, f"{name}_token_id", len(tokens))
            if index is not None:
                around[name].append(index)
            elif f"{KEY}add_{name}_token" in header.metadata:
                raise CheckpointError(f"{header.path}: {KEY}add_{name}_token: got true, expected {name}_token_id, too")
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


def _template(header: GgufHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"{header.path}: tokenizer.chat_template: got {shown_value(template)}, expected a text")
    return template
