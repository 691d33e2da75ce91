"""Every way in which a GGUF file can be wrong is one line that names the file, got and expected."""

import struct

import pytest
from click.testing import CliRunner
from gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    MERGES,
    TEXT,
    U32,
    U64,
    file_bytes,
    item,
    metadata,
    save_gguf,
    tensors,
    text,
    vocabulary,
)

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

TOKENS, KINDS = vocabulary()


def refused(path, contents: bytes | None = None, *, by=CheckpointError) -> str:
    """What is said of a file, its path left out; the command says the same, without a traceback."""
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(by) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    done = CliRunner().invoke(cli, ["sample", str(path), "--prompt", "x"])
    assert (done.exit_code, done.stderr) == (1, f"error: {message}\n")
    return message.removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


# the header


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "magic: got b'', expected b'GGUF'"),
        (b"GGML" + bytes(60), "magic: got b'GGML', expected b'GGUF'"),
        (b"GGUF\3", "truncated: got 5 bytes, expected 8 for version"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version: got 1, expected 2 or 3, little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version: got 4, expected 2 or 3, little-endian"),
        (
            b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
            "version: got 50331648 (the file is big-endian), expected 2 or 3, little-endian",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), f"got {2**60} tensors in 24 bytes, expected 0 at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), f"got {2**60} metadata entries in 24 bytes, expected 1 at most"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(9),
            f"truncated: got 41 bytes, expected {2**63 + 32} for a key",
        ),
    ],
)
def test_a_file_that_is_no_gguf_file_is_refused(contents, said, path):
    assert refused(path, contents) == said


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (struct.pack("<I", 13) + bytes(8), '"x": type: got 13, expected 0 to 12'),
        (struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(12), '"x": got an array of type 9, expected numbers or texts'),
        (struct.pack("<IIQ", ARRAY, TEXT, 2**40), f'"x": got {2**40} texts, expected {2**22} at most'),
        (struct.pack("<IB", BOOL, 2), '"x": got 2, expected 0 or 1'),
        (struct.pack("<I", TEXT) + text(b"\xff"), '"x": got bytes that are no UTF-8, expected text'),
    ],
)
def test_a_value_of_the_metadata_that_cannot_be_is_refused(entry, said, path):
    assert refused(path, file_bytes(metadata() | {"x": entry}, tensors())) == said


def test_an_array_longer_than_the_file_is_refused(path):
    entry = struct.pack("<IIQ", ARRAY, F64, 2**61)
    said = refused(path, file_bytes(metadata() | {"x": entry}, tensors()))
    assert said.startswith("truncated: got ")
    assert said.endswith(' for "x"')


def test_a_key_or_a_tensor_that_is_there_twice_is_refused(path):
    good = file_bytes(metadata(), tensors())
    assert refused(path, good.replace(text("tokenizer.ggml.bos_token_id"), text("tokenizer.ggml.eos_token_id"))) == (
        'metadata: got "tokenizer.ggml.eos_token_id" twice, expected it once'
    )
    assert refused(path, good.replace(text("blk.1.attn_q.weight"), text("blk.0.attn_q.weight"))) == (
        'tensors: got "blk.0.attn_q.weight" twice, expected it once'
    )


@pytest.mark.parametrize("count", [1, 4, 23, 24, 100, 3000, 7000, -1, -33])
def test_a_file_cut_anywhere_is_refused(count, path):
    good = file_bytes(metadata(), tensors())
    said = refused(path, good[:count])
    assert said.startswith(("truncated: ", "magic: ", "got ")), said


# tensors


def changed(name="blk.0.attn_q.weight", **changes):
    """The bytes of a file of which one tensor's kind or shape is stated otherwise."""
    stored = tensors()
    kind, shape, raw, floats = stored[name]
    stored[name] = (changes.get("kind", kind), changes.get("shape", shape), raw, floats)
    offsets = {name: changes["offset"]} if "offset" in changes else None
    return file_bytes(metadata(), stored, offsets=offsets)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": ()}, '"blk.0.attn_q.weight": got 0 axes, expected 1 to 4'),
        ({"shape": (1,) * 5}, '"blk.0.attn_q.weight": got 5 axes, expected 1 to 4'),
        ({"shape": (64, 0)}, '"blk.0.attn_q.weight": shape: got [64, 0], expected sizes from 1 up'),
        ({"shape": (2**32, 2**32)}, f'"blk.0.attn_q.weight": shape: got [{2**32}, {2**32}], expected sizes from 1 up'),
        ({"shape": (32, 64)}, "blk.0.attn_q.weight: got the shape [32, 64], expected [64, 64]"),
        ({"shape": (4096,)}, "blk.0.attn_q.weight: got the shape [4096], expected [64, 64]"),
        ({"kind": 99}, '"blk.0.attn_q.weight": type: got 99, expected one that is known here'),
        ({"kind": 12}, '"blk.0.attn_q.weight": got rows of 64, expected a multiple of 256, a block of Q4_K'),
        ({"offset": 33}, '"blk.0.attn_q.weight": offset: got 33, expected a multiple of 32'),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(changes, said, path):
    assert refused(path, changed(**changes)) == said


def test_tensors_that_overlap_or_lie_behind_the_end_are_refused(path):
    assert "overlaps another: got byte" in refused(path, changed(offset=0))
    said = refused(path, changed(offset=2**62))
    assert said.startswith("truncated: got ")
    assert said.endswith('for the tensor "blk.0.attn_q.weight"')


def test_a_tensor_that_is_missing_or_one_too_many_is_refused(path):
    stored = tensors()
    assert refused(path, file_bytes(metadata(), {k: v for k, v in stored.items() if k != "output_norm.weight"})) == (
        "output_norm.weight is missing, expected it with the shape [64]"
    )
    assert refused(path, file_bytes(metadata(), {k: v for k, v in stored.items() if k != "token_embd.weight"})) == (
        "token_embd.weight: got nothing, expected a matrix of 2 rows or more"
    )
    more = {**stored, "blk.0.attn_q.bias": stored["output_norm.weight"]}
    assert refused(path, file_bytes(metadata(), more), by=UnsupportedModelError) == (
        'got a tensor "blk.0.attn_q.bias", expected those of the config alone'
    )


def test_a_type_that_mlx_does_not_read_is_named_with_the_remedy(path):
    save_gguf(path, kinds={"0.attn_v.weight": "Q6_K"}, sizes={"hidden": 256, "heads": 4, "mlp": 32})
    assert refused(path, by=UnsupportedModelError) == (
        "blk.0.attn_v.weight is Q6_K: got a type that MLX does not read, expected F32, F16, BF16, Q4_0, Q4_1 or Q8_0; "
        "`posttrainllm convert` makes a directory of it"
    )


# the model


@pytest.mark.parametrize(
    ("key", "entry", "said"),
    [
        ("general.architecture", item(TEXT, "gemma2"), 'got "gemma2", expected one of llama, qwen2, qwen3'),
        ("general.type", item(TEXT, "adapter"), 'got "adapter", expected model'),
        (
            "split.count",
            item(U32, 3),
            "got one of 3 parts, expected a whole model (`llama-gguf-split --merge` makes one)",
        ),
        ("llama.expert_count", item(U32, 8), "got 8, expected 0: anything else is not implemented"),
        ("llama.logit_scale", item(F32, 2.0), "got 2.0, expected no such key: it is not implemented"),
        ("llama.rope.scaling.type", item(TEXT, "longrope"), 'got "longrope", expected none, linear or yarn'),
        ("llama.rope.dimension_count", item(U32, 8), "got 8, expected 16, a head's size"),
        ("llama.attention.value_length", item(U32, 8), "got 8, expected 16, a head's size"),
    ],
)
def test_what_is_not_implemented_is_named(key, entry, said, path):
    save_gguf(path, extra={key: entry})
    assert refused(path, by=UnsupportedModelError) == f"{key}: {said}"


@pytest.mark.parametrize(
    ("key", "entry", "said"),
    [
        ("general.architecture", None, "got nothing, expected a text"),
        ("general.alignment", item(U32, 48), "got 48, expected a power of two"),
        ("llama.block_count", None, "got nothing, expected a whole number from 1 to 1073741824"),
        ("llama.block_count", item(TEXT, "2"), 'got "2", expected a whole number from 1 to 1073741824'),
        ("llama.block_count", item(BOOL, True), "got true, expected a whole number from 1 to 1073741824"),
        ("llama.embedding_length", item(U64, 2**63), f"got {2**63}, expected a whole number from 1 to 1073741824"),
        (
            "llama.feed_forward_length",
            item(ARRAY, [96, 96], I32),
            "got an array of 2 numbers, expected a whole number from 1 to 1073741824",
        ),
        ("llama.attention.head_count_kv", item(U32, 3), "got 3, expected a divisor of 4 heads"),
        ("llama.context_length", item(U32, 1), "got 1, expected 2 or more"),
        ("llama.attention.layer_norm_rms_epsilon", None, "got nothing, expected a finite number"),
        ("llama.attention.layer_norm_rms_epsilon", item(F32, float("nan")), "got NaN, expected a finite number"),
        ("llama.rope.freq_base", item(F32, -1.0), "got -1.0, expected more than 0"),
    ],
)
def test_metadata_that_describe_no_model_are_refused(key, entry, said, path):
    save_gguf(path, extra={key: entry})
    assert refused(path) == f"{key}: {said}"


def test_more_layers_than_there_are_tensors_are_refused(path):
    save_gguf(path, extra={"llama.block_count": item(U32, 2**30)})
    assert refused(path) == f"got 20 tensors, expected those of {2**30} layers"


# the tokenizer


@pytest.mark.parametrize(
    ("key", "entry", "by", "said"),
    [
        ("tokens", None, CheckpointError, "got nothing, expected a list of texts"),
        ("tokens", item(ARRAY, [1, 2], I32), CheckpointError, "got an array of 2 numbers, expected a list of texts"),
        ("tokens", item(ARRAY, ["a", "b", "a"]), CheckpointError, 'got "a" twice, expected it once'),
        ("token_type", item(ARRAY, ["a"]), CheckpointError, f'got ["a"], expected {len(TOKENS)} whole numbers'),
        (
            "token_type",
            item(ARRAY, KINDS[1:], I32),
            CheckpointError,
            f"got an array of {len(TOKENS) - 1} numbers, expected {len(TOKENS)} whole numbers",
        ),
        (
            "eos_token_id",
            item(U32, len(TOKENS)),
            CheckpointError,
            f"got {len(TOKENS)}, expected an id below {len(TOKENS)}",
        ),
        ("merges", None, CheckpointError, "got nothing, expected a list of texts"),
        (
            "merges",
            item(ARRAY, [*MERGES, "h x"]),
            CheckpointError,
            'got "h x", expected two pieces that make a third, all of them tokens',
        ),
        (
            "merges",
            item(ARRAY, ["he"]),
            CheckpointError,
            'got "he", expected two pieces that make a third, all of them tokens',
        ),
        ("add_bos_token", item(U32, 1), CheckpointError, "got 1, expected true or false"),
        ("model", item(TEXT, "bert"), UnsupportedModelError, 'got "bert", expected gpt2 or llama'),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(key, entry, by, said, path):
    save_gguf(path, extra={f"tokenizer.ggml.{key}": entry})
    path_said = said_of_loading(path, by)
    assert path_said == f"tokenizer.ggml.{key}: {said}"


def test_more_tokens_than_rows_are_refused(path):
    extra = {"tokenizer.ggml.tokens": item(ARRAY, [*TOKENS, "one more"]), "tokenizer.ggml.token_type": None}
    save_gguf(path, extra=extra)
    count = len(TOKENS)
    assert refused(path) == f"tokenizer.ggml.tokens: got {count + 1}, expected {count} at most, one a row"


@pytest.mark.parametrize("name", ["deepseek-llm", None])
def test_words_that_are_not_known_are_named(name, path):
    save_gguf(path, extra={"tokenizer.ggml.pre": None if name is None else item(TEXT, name)})
    got = "nothing" if name is None else f'"{name}"'
    said = said_of_loading(path, UnsupportedModelError)
    assert said.startswith(
        f"tokenizer.ggml.pre: got {got}, expected one of command-r, deepseek-r1-qwen, default, gpt-2,"
    )


def test_a_template_that_is_no_text_is_refused(path):
    save_gguf(path, extra={"tokenizer.chat_template": item(U32, 1)})
    assert said_of_loading(path, CheckpointError) == "tokenizer.chat_template: got 1, expected a text"


def said_of_loading(path, by) -> str:
    from posttrainllm.adapters.loading.pair import load_pair

    with pytest.raises(by) as caught:
        load_pair(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")
