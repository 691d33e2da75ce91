"""GGUF files that were changed at random end in our own errors, or load; seeds are fixed, so no run is unlucky.

MLX's own reader would abort the process on many of them, which is why it never sees one.
"""

import struct
from collections import Counter

import numpy as np
import pytest
from gguf_files import ARRAY, BOOL, F32, F64, I32, I64, TEXT, U8, U32, U64, file_bytes, item, metadata, tensors, text
from test_fuzz import outcome, truncated, with_evil_bytes

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "mlp": 32, "context": 16}
ENTRIES, STORED = metadata(sizes=SIZES), tensors(sizes=SIZES, kind="Q8_0", kinds={"attn_q.weight": "Q4_0"})
GOOD = file_bytes(ENTRIES, STORED)
END = len(GOOD) - sum(len(raw) + -len(raw) % 32 for _, _, raw, _ in STORED.values())
KEYS = (
    *("general.type", "general.alignment", "split.count", "llama.expert_count", "llama.attention.sliding_window"),
    *(
        "llama.rope.dimension_count",
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.attention.key_length",
    ),
    *("llama.logit_scale", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.scores", "tokenizer.ggml.eot_token_id"),
)
NUMBERS = (0, 1, 2, 3, 5, 7, 8, 16, 31, 32, 64, 256, 270, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e-5, 1.0, 4.0, 1e30, float("inf"), float("nan"))
TEXTS = (
    "",
    "model",
    "llama",
    "qwen2",
    "qwen3",
    "gpt2",
    "smollm",
    "default",
    "qwen2 ",
    "linear",
    "yarn",
    "x" * 3000,
    "\0\n",
)


def evil_item(generator) -> bytes:
    """A value of any type, some of them not well formed."""

    def one(values):
        return values[generator.integers(len(values))]

    kind = one((U8, U32, I32, U64, I64, F32, F64, BOOL, TEXT, ARRAY, "raw"))
    if kind == "raw":
        return struct.pack("<I", one((*range(14), 2**31))) + generator.bytes(int(generator.integers(0, 24)))
    if kind == ARRAY:
        of = one((U8, I32, F32, TEXT, BOOL))
        count = one((0, 1, 2, 270))
        made = {TEXT: [f"t{index}" for index in range(count)], F32: [0.5] * count}.get(of, [1] * count)
        return item(ARRAY, made, of)
    if kind == TEXT:
        return item(TEXT, one(TEXTS)) if generator.integers(4) else struct.pack("<I", TEXT) + text(b"\xff\xfe")
    if kind == BOOL:
        return struct.pack("<IB", BOOL, one((0, 1, 2)))
    if kind in (F32, F64):
        return item(kind, one(FLOATS))
    return item(kind, one(NUMBERS) % (256 if kind == U8 else 2**31 if kind == I32 else 2**64))


def evil_entries(generator) -> dict[str, bytes]:
    """The metadata with one or two entries replaced, dropped or added."""
    entries = dict(ENTRIES)
    for _ in range(generator.integers(1, 3)):
        names = (*ENTRIES, *KEYS) if generator.integers(2) else KEYS
        key = names[generator.integers(len(names))]
        if generator.integers(5) == 0:
            entries.pop(key, None)
        else:
            entries[key] = evil_item(generator)
    return entries


def evil_tensors(generator) -> tuple[dict, dict[str, int]]:
    """The tensors with a shape, a type, a name or an offset of one of them changed, or one missing."""
    stored, offsets = dict(STORED), {}
    name = list(stored)[generator.integers(len(stored))]
    kind, shape, raw, floats = stored[name]
    what = generator.integers(5)
    if what == 0:
        sizes = (0, 1, 2, 32, 64, 2**32, 2**62, 2**64 - 1)
        changed = [sizes[generator.integers(len(sizes))] for _ in range(generator.integers(1, 6))]
        stored[name] = (kind, tuple(changed), raw, floats)
    elif what == 1:
        stored[name] = (int(generator.integers(0, 45)), shape, raw, floats)
    elif what == 2:
        offsets[name] = (0, 1, 32, 64, 2**20, 2**31, 2**63, 2**64 - 32)[generator.integers(8)]
    elif what == 3:
        del stored[name]
    else:
        stored[("", "x", "blk.9.attn_q.weight", "output.weight", "y" * 70)[generator.integers(5)]] = stored.pop(name)
    return stored, offsets


def evil_gguf(seed: int) -> bytes:
    generator = np.random.default_rng(seed)
    kind = generator.integers(6)
    if kind == 0:
        return truncated(GOOD, generator, end=END)
    if kind == 1:  # the vocabulary is most of a header
        return with_evil_bytes(GOOD, generator, end=END if generator.integers(2) else 900)
    if kind == 2:
        counts = [(0, 1, 5, len(STORED), len(ENTRIES), 2**20, 2**40, 2**64 - 1)[generator.integers(8)] for _ in "ab"]
        version = int((0, 1, 2, 3, 4, 2**24, 3 * 2**24, 2**32 - 1)[generator.integers(8)])
        return file_bytes(ENTRIES, STORED, version=version, counts=(counts[0], counts[1]))
    if kind == 3:
        stored, offsets = evil_tensors(generator)
        return file_bytes(ENTRIES, stored, offsets=offsets)
    return file_bytes(evil_entries(generator), STORED)


def check(path, seeds):
    found = Counter()
    for seed in seeds:
        path.write_bytes(evil_gguf(seed))
        found[outcome(path)] += 1
    assert found["CheckpointError"] > 0.5 * len(seeds), found
    assert found["UnsupportedModelError"] > 0.02 * len(seeds), found
    assert found["loaded"] > 0.02 * len(seeds), found


def test_the_file_that_is_changed_loads_as_it_is(tmp_path):
    (tmp_path / "model.gguf").write_bytes(GOOD)
    assert outcome(tmp_path / "model.gguf") == "loaded"


def test_500_changed_gguf_files_end_in_our_errors_or_load(tmp_path):
    check(tmp_path / "model.gguf", range(500))


@pytest.mark.slow
def test_10000_changed_gguf_files_end_in_our_errors_or_load(tmp_path):
    check(tmp_path / "model.gguf", range(1000, 11_000))
