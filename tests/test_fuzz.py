"""Files that were changed at random end in our own errors, or load; seeds are fixed, so no run is unlucky.

A traceback of another kind is a failure of the test as it stands: nothing here catches it.
"""

import copy
import json
import re
import struct
from collections import Counter

import numpy as np
import pytest
from support import save_tiny_llama
from tinygpt_files import body_of, file_bytes, header_of, random_weights

from posttrainllm.adapters.loading.pair import load_pair
from posttrainllm.kernel.errors import LoadError, MemoryLimitError

SIZES = {"layers": 1, "dModel": 8, "ctx": 8, "heads": 2, "dMlp": 12, "vocabSize": 16}
WRAPPED = re.compile(r": (its weights )?cannot be read: \w+Error: ")
SWITCHES = {"nExperts": 1, "slidingWindow": None, "useMoD": False, "kviBits": 0, "tokenizerSource": None}
EVIL = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 2**31, 2**32, 2**63, 2**64, 10**30, -(2**70), 0.5, -0.0, 1e308, 1e-9),
    *(float("nan"), float("inf"), "", "0", "8", "fp16", "\0", "\ud800", "../..", "x" * 5000, [], {}, [[]], [0], [1, 2]),
    *([8, 12], [16, 8], [2**62, 4], {"name": "x"}, {"shape": [1]}, [1] * 5000, {"a": {"b": {"c": []}}}),
)


def places_in(value, path=()):
    """Paths to everything inside a JSON value, itself left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield (*path, key)
        yield from places_in(entry, (*path, key))


def with_evil_values(value, generator):
    """A copy with one to three entries replaced, dropped or put somewhere else."""
    value = copy.deepcopy(value)
    for _ in range(generator.integers(1, 4)):
        shallow = generator.integers(2)  # most of a header are the entries of its tensors
        paths = [path for path in places_in(value) if len(path) <= 2 or not shallow]
        if not paths:
            break
        *outer, key = paths[generator.integers(len(paths))]
        holder = value
        for name in outer:
            holder = holder[name]
        kind = generator.integers(10)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other = paths[generator.integers(len(paths))]
            found = value
            for name in other:
                found = found[name] if not isinstance(found, list) or name < len(found) else None
            holder[key] = copy.deepcopy(found)
        else:
            holder[key] = copy.deepcopy(EVIL[generator.integers(len(EVIL))])
    return value


def with_evil_bytes(contents, generator, *, end):
    """A copy with some of the first `end` bytes replaced, dropped or doubled."""
    changed = bytearray(contents)
    for _ in range(generator.integers(1, 6)):
        place, kind = int(generator.integers(end)), generator.integers(4)
        if kind == 0:
            del changed[place : place + int(generator.integers(1, 5))]
        elif kind == 1:
            changed[place:place] = changed[place : place + int(generator.integers(1, 9))]
        elif kind == 2:
            changed[place : place + 1] = bytes([generator.integers(256)])
        else:  # of the same kind, so that more of it stays readable
            changed[place : place + 1] = b'0123456789,:{}[]"-e. '[generator.integers(21) :][:1]
    return bytes(changed)


def truncated(contents, generator, *, end):
    """The file's beginning, mostly cut in its header."""
    return contents[: generator.integers(end if generator.integers(4) else len(contents))]


def evil_tinygpt(seed):
    """A `.tinygpt` file of one layer, changed in its bytes or in its JSON."""
    generator = np.random.default_rng(seed)
    layout = ("training", "inference")[seed % 2]
    header, body = header_of(SIZES, layout, **SWITCHES), body_of(random_weights(SIZES, seed=1), layout)
    good = file_bytes(header, body)
    end = len(good) - len(body)
    kind = generator.integers(4)
    if kind == 0:
        return truncated(good, generator, end=end)
    if kind == 1:
        return with_evil_bytes(good, generator, end=end)
    text = json.dumps(with_evil_values(header, generator)).encode()
    if kind == 2:  # the length in the prefix is right, whatever the text
        text = with_evil_bytes(text, generator, end=len(text))
    return file_bytes(text, body)


def evil_safetensors(contents, seed):
    """Weights whose header was cut, or changed in its bytes or in its JSON."""
    generator = np.random.default_rng(seed)
    (length,) = struct.unpack("<Q", contents[:8])
    kind = generator.integers(3)
    if kind == 0:
        return truncated(contents, generator, end=8 + length)
    if kind == 1:
        return with_evil_bytes(contents, generator, end=8 + length)
    text = json.dumps(with_evil_values(json.loads(contents[8 : 8 + length]), generator)).encode()
    return struct.pack("<Q", len(text)) + text + contents[8 + length :]


def evil_json(contents, seed):
    """A JSON file that was cut, or changed in its bytes or in its values."""
    generator = np.random.default_rng(seed)
    kind = generator.integers(3)
    if kind == 0:
        return truncated(contents, generator, end=len(contents))
    if kind == 1:
        return with_evil_bytes(contents, generator, end=len(contents))
    return json.dumps(with_evil_values(json.loads(contents), generator)).encode()


def outcome(path) -> str:
    """What refused it, or "loaded"; an error of another kind is the test's failure.

    So is one of ours that only wraps what Python or a library raised: our own readers are to know what is wrong.
    """
    try:
        load_pair(path)
    except (LoadError, MemoryLimitError) as error:
        refused = error
    else:
        return "loaded"
    assert str(path) in str(refused) or isinstance(refused, MemoryLimitError), refused
    assert len(str(refused)) < 2000
    assert not WRAPPED.search(str(refused)), refused
    return type(refused).__name__


def check_tinygpt(folder, seeds):
    path, found = folder / "model.tinygpt", Counter()
    for seed in seeds:
        path.write_bytes(evil_tinygpt(seed))
        found[outcome(path)] += 1
    # most are refused, and some are changed where it does no harm: both ends were reached
    assert found["CheckpointError"] > 0.7 * len(seeds)
    assert found["UnsupportedModelError"] > 0
    assert found["loaded"] > 0.005 * len(seeds)


def check_directory(folder, good, name, seeds):
    folder.mkdir()
    for file in good.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    contents, found = (good / name).read_bytes(), Counter()
    for seed in seeds:
        changed = evil_safetensors(contents, seed) if name.endswith(".safetensors") else evil_json(contents, seed)
        (folder / name).write_bytes(changed)
        found[outcome(folder)] += 1
    assert found["CheckpointError"] > 0.4 * len(seeds), found


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("good") / "model", seed=1, layers=1)


FILES = ("model.safetensors", "config.json", "tokenizer_config.json")


def test_the_files_that_are_changed_load_as_they_are(good, tmp_path):
    (tmp_path / "model.tinygpt").write_bytes(
        file_bytes(header_of(SIZES, "training"), body_of(random_weights(SIZES, seed=1), "training"))
    )
    assert outcome(tmp_path / "model.tinygpt") == outcome(good) == "loaded"


def test_500_changed_tinygpt_files_end_in_our_errors_or_load(tmp_path):
    check_tinygpt(tmp_path, range(500))


@pytest.mark.slow
def test_10000_changed_tinygpt_files_end_in_our_errors_or_load(tmp_path):
    check_tinygpt(tmp_path, range(1000, 11_000))


@pytest.mark.parametrize("name", FILES)
def test_500_changed_files_of_a_directory_end_in_our_errors_or_load(name, good, tmp_path):
    check_directory(tmp_path / "model", good, name, range(500 // len(FILES) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_10000_changed_files_of_a_directory_end_in_our_errors_or_load(name, good, tmp_path):
    check_directory(tmp_path / "model", good, name, range(1000, 1000 + 10_000 // len(FILES) + 1))
