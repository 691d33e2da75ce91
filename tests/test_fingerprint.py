import shutil

import pytest

from posttrainllm.adapters.loading import fingerprint as module
from posttrainllm.adapters.loading.fingerprint import fingerprint, tokenizer_fingerprint
from posttrainllm.kernel.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 10000.0}')
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    (path / "tokenizer.json").write_text("{}")
    return path


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_a_copy_under_another_name_has_the_same_fingerprint(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    assert fingerprint(copy) == fingerprint(str(checkpoint))
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(checkpoint)
    assert fingerprint(copy).startswith("sha256:")
    assert len(fingerprint(copy)) == 7 + 64


@pytest.mark.parametrize("offset", [0, 8000, -1])
def test_one_bit_of_the_weights_changes_it(checkpoint, offset):
    before = fingerprint(checkpoint)
    flip(checkpoint / "model.safetensors", offset)
    assert fingerprint(checkpoint) != before


def test_the_config_belongs_to_the_model_and_the_tokenizer_does_not(checkpoint):
    model, tokenizer = fingerprint(checkpoint), tokenizer_fingerprint(checkpoint)
    flip(checkpoint / "tokenizer.json", 0)
    assert fingerprint(checkpoint) == model
    assert tokenizer_fingerprint(checkpoint) != tokenizer
    flip(checkpoint / "config.json", 5)
    assert fingerprint(checkpoint) != model


def test_the_config_that_says_how_weights_are_packed_belongs_to_the_model(checkpoint):
    before = fingerprint(checkpoint)
    (checkpoint / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert fingerprint(checkpoint) != before


def test_bytes_that_move_from_one_file_to_the_next_change_it(checkpoint):
    shards = checkpoint / "model-1.safetensors", checkpoint / "model-2.safetensors"
    found = set()
    for cut in (1, 2):
        for shard, data in zip(shards, (b"abc"[:cut], b"abc"[cut:]), strict=True):
            shard.write_bytes(data)
        found.add(fingerprint(checkpoint))
    assert len(found) == 2


def test_a_single_file_is_a_model_and_its_name_is_no_content(checkpoint):
    file = checkpoint / "model.safetensors"
    before = fingerprint(file)
    assert fingerprint(file.rename(checkpoint / "other.bin")) == before


def test_a_large_file_is_sampled_and_says_so(checkpoint, monkeypatch):
    file = checkpoint / "model.safetensors"
    whole = fingerprint(checkpoint)
    monkeypatch.setattr(module, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(module, "_BLOCKS", 8)
    sampled = fingerprint(checkpoint)
    assert sampled.endswith("~")
    assert not whole.endswith("~")
    for offset in (0, 15, -1):
        flip(file, offset)
        assert fingerprint(checkpoint) != sampled
        flip(file, offset)
    assert fingerprint(checkpoint) == sampled
    file.write_bytes(file.read_bytes() + b"x")
    assert fingerprint(checkpoint) != sampled


def test_nothing_to_hash_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="got no file to hash"):
        fingerprint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="got no file to hash"):
        fingerprint(tmp_path)
