"""Every way in which a `.tinygpt` file can be wrong is one line that names the file, got and expected."""

import json
import struct

import pytest
from click.testing import CliRunner
from tinygpt_files import LAYOUTS, SIZES, body_of, file_bytes, header_of, random_weights, save_tinygpt

from posttrainllm.adapters.cli import cli
from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

WEIGHTS = random_weights(SIZES, seed=1)


def refused(tmp_path, contents, message, error=CheckpointError):
    path = tmp_path / "model.tinygpt"
    path.write_bytes(contents)
    with pytest.raises(error, match=message) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert len(text.splitlines()) == 1
    assert "expected" in text
    assert len(text) < len(str(path)) + 400


def edited(edit, layout="training"):
    """A file whose header was changed after it was made."""
    header = header_of(SIZES, layout)
    edit(header)
    return file_bytes(header, body_of(WEIGHTS, layout))


GOOD = file_bytes(header_of(SIZES, "training"), body_of(WEIGHTS, "training"))


def test_the_good_one_is_read(tmp_path):
    (tmp_path / "model.tinygpt").write_bytes(GOOD)
    checkpoint = read_checkpoint(tmp_path / "model.tinygpt")
    assert (checkpoint.dtype, checkpoint.context) == ("float32", 64)
    assert checkpoint.weight_bytes == sum(array.size for array in WEIGHTS.values()) * 4


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", r"magic: got b'', expected b'TGPT'"),
        (b"TGP", r"magic: got b'TGP', expected b'TGPT'"),
        (b"GGUF" + GOOD[4:], r"magic: got b'GGUF', expected b'TGPT'"),
        (GOOD[:9], "truncated: got 9 bytes, expected 12 before the header"),
        (GOOD[:4] + struct.pack("<I", 1) + GOOD[8:], r"version: got 1 \(version 1 has no manifest\), expected 2"),
        (GOOD[:4] + struct.pack("<I", 3) + GOOD[8:], "version: got 3, expected 2"),
        (GOOD[:8] + b"\xff" * 4 + GOOD[12:], r"truncated: got \d+ bytes, expected 4294967311 before the tensors"),
        (GOOD[:1000], "truncated: got 1000 bytes, expected"),
        (GOOD[:-1], r"truncated: got \d+ bytes, expected \d+"),
        (GOOD + b"\0", r"longer than its tensors: got \d+ bytes, expected \d+"),
        (file_bytes(b"{config", b""), "header: got what is no JSON, expected an object"),
        (file_bytes(b"\xff\xfe", b""), "header: got what is no JSON, expected an object"),
        (file_bytes(b"[" * 100_000, b""), "header: got what is no JSON, expected an object"),
        (file_bytes(b"[]", b""), r"header: got \[\], expected an object"),
        (file_bytes(b"{}", b""), "config: got nothing, expected an object"),
    ],
    ids=range(15),
)
def test_a_file_that_is_torn_or_another(contents, message, tmp_path):
    refused(tmp_path, contents, message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("nExperts", 4), ("nExperts", True), ("moeTopK", 2), ("slidingWindow", 128), ("kviBits", 4)),
        *(("streamingSink", 4), ("streamingWindow", 512), ("useMoD", True), ("useDifferentialAttention", True)),
        *(("useYOCO", True), ("useDeepNorm", True), ("useEmbeddingRMSNorm", True), ("useMoD", 1), ("kviBits", "4")),
    ],
)
def test_a_switch_that_is_not_implemented_is_named(name, value, tmp_path):
    contents = edited(lambda header: header["config"].update({name: value}))
    refused(tmp_path, contents, f"{name}: got {json.dumps(value)}, expected it off", UnsupportedModelError)


@pytest.mark.parametrize(
    "switches",
    [
        {"nExperts": 1, "moeTopK": 1, "slidingWindow": None, "useMoD": False, "kviBits": None, "streamingSink": 0},
        {"nExperts": 0, "useYOCO": None, "useDeepNorm": False, "useEmbeddingRMSNorm": False, "batchSize": 8},
        {"galoreRank": 64, "useGradCheckpoint": True, "backend": "webgpu", "something": {"new": [1]}},
    ],
)
def test_switches_that_are_off_and_keys_that_are_unknown_change_nothing(switches, tmp_path):
    (tmp_path / "model.tinygpt").write_bytes(edited(lambda header: header["config"].update(switches)))
    assert read_checkpoint(tmp_path / "model.tinygpt").context == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: None}, f"{name}: got nothing, expected a whole number") for name in SIZES),
        *(({name: 0}, f"{name}: got 0, expected a whole number") for name in (*SIZES, "vocabSize")),
        ({"layers": "2"}, 'layers: got "2", expected a whole number'),
        ({"layers": True}, "layers: got true, expected a whole number"),
        ({"layers": 2.0}, r"layers: got 2\.0, expected a whole number"),
        ({"layers": 10**9}, "manifest: got 36 tensors, expected those of 1000000000 layers"),
        ({"layers": 10**40}, r"layers: got 1000\d+, expected a whole number"),
        ({"layers": 3}, r"manifest: blocks\.2\.ln1\.weight is missing, expected it with the shape \[32\]"),
        ({"layers": 1}, r'manifest: got "blocks\.1\.[a-z0-9_.]+", expected the 20 tensors of the config alone'),
        ({"dModel": 48}, r"token_embedding\.weight: got the shape \[256, 32\], expected \[256, 48\] by the config"),
        ({"dMlp": 64}, r"blocks\.0\.mlp\.fc_in\.weight: got the shape \[80, 32\], expected \[64, 32\] by the config"),
        ({"ctx": 128}, r"position_embedding\.weight: got the shape \[64, 32\], expected \[128, 32\] by the config"),
        ({"ctx": 1}, "ctx and vocabSize: got 1 and 256, expected 2 or more"),
        ({"vocabSize": 300}, r"token_embedding\.weight: got the shape \[256, 32\], expected \[300, 32\]"),
        ({"heads": 5}, "dModel: got 32, expected a multiple of the 5 heads"),
        ({"tokenizerSource": 5}, "tokenizerSource: got 5, expected the path of a directory"),
        ({"tokenizerSource": "\ud800"}, r'tokenizerSource: got "\\ud800", expected the path of a directory'),
        ({"tokenizerSource": "a\0b"}, "tokenizerSource: got"),
        ({"tokenizerSource": "a" * 5000}, "tokenizerSource: got"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_or_does_not_fit_the_tensors(change, message, tmp_path):
    error = UnsupportedModelError if "alone" in message else CheckpointError
    refused(tmp_path, edited(lambda header: header["config"].update(change)), message, error)


def first(header):
    return header["manifest"][0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda header: header.pop("manifest"), "manifest: got nothing, expected a list of tensors"),
        (lambda header: header.update(manifest={}), r"manifest: got {}, expected a list of tensors"),
        (lambda header: header.update(manifest=[]), r"manifest: got \[\], expected a list of tensors"),
        (lambda header: header["manifest"].append(5), "manifest: got 5, expected an object with a name"),
        (lambda header: header["manifest"].append({"shape": [1]}), r"manifest: got {.*}, expected an object with a n"),
        (
            lambda header: header["manifest"].append(first(header)),
            'got "token_embedding.weight" twice, expected it once',
        ),
        (lambda header: header["manifest"].pop(0), r"manifest: token_embedding\.weight is missing"),
        (lambda header: first(header).update(shape=[32, 256]), r"token_embedding\.weight: got the shape \[32, 256\]"),
        (lambda header: first(header).update(shape=5), "shape: got 5, expected sizes from 1 up"),
        (lambda header: first(header).update(shape=[256, 0]), r"shape: got \[256, 0\], expected sizes from 1 up"),
        (lambda header: first(header).update(shape=[256, -32]), r"shape: got \[256, -32\], expected sizes from 1 up"),
        (lambda header: first(header).update(shape=[256, 32.0]), r"shape: got \[256, 32\.0\], expected sizes from 1"),
        (lambda header: first(header).update(shape=[2**70]), r"shape: got \[\d+\], expected sizes from 1 up"),
        (lambda header: first(header).update(shape=[1] * 10**5), "got the shape a list of 100000, expected"),
        (lambda header: first(header).update(floatOffset=-1), "floatOffset: got -1, expected 0 or more"),
        (lambda header: first(header).update(floatOffset="0"), 'floatOffset: got "0", expected 0 or more'),
        (lambda header: first(header).update(floatOffset=10**4000), r"floatOffset: got 1000\d+\.\.\., expected 0"),
        (lambda header: header.update(weightDtype="bf16"), 'weightDtype: got "bf16", expected fp32 or fp16'),
        (lambda header: header.update(includesOptimizerState=1), "includesOptimizerState: got 1, expected true or"),
        (
            lambda header: header["manifest"].append({"name": "embed_norm.weight", "shape": [32]}),
            'manifest: got "embed_norm.weight", expected the 36 tensors of the config alone',
        ),
        (
            lambda header: header["manifest"].append({"name": "a\nb\x1b" * 100, "shape": [32]}),
            r'manifest: got "a\\nb.*\.\.\., expected the 36 tensors of the config alone',
        ),
    ],
    ids=range(21),
)
def test_a_manifest_that_is_wrong(edit, message, tmp_path):
    refused(tmp_path, edited(edit), message, UnsupportedModelError if "alone" in message else CheckpointError)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, r"overlaps another: got byte \d+, expected \d+ or more"),
        (10**9, r"truncated: got \d+ bytes, expected \d{10}"),
        (2**60 - 1, r"truncated: got \d+ bytes, expected \d{19}"),
        (2**60, r"floatOffset: got 1152921504606846976, expected 0 or more"),
    ],
)
def test_an_offset_that_overlaps_another_tensor_or_leaves_the_file(offset, message, tmp_path):
    contents = edited(lambda header: first(header).update(floatOffset=offset), layout="inference")
    refused(tmp_path, contents, message)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_body_of_another_layout_is_found_by_its_size(layout, tmp_path):
    other = "inference" if layout == "training" else "training"
    contents = file_bytes(header_of(SIZES, layout), body_of(WEIGHTS, other))
    refused(tmp_path, contents, r"got \d+ bytes, expected \d+")


def test_the_command_says_it_in_one_line(tmp_path):
    path = save_tinygpt(tmp_path / "model.tinygpt", useMoD=True)
    result = CliRunner().invoke(cli, ["sample", str(path), "--prompt", "x"])
    assert result.exit_code == 1
    assert result.stderr == f"error: {path}: useMoD: got true, expected it off: it is not implemented\n"
