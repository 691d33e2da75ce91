"""Tokenizers of GGUF files: the ids of the tokenizer that the file was made of, both ways."""

import io
import json
import random

import numpy as np
import pytest
import tokenizers
from gguf_files import ARRAY, BOOL, F32, I32, MERGES, SPECIAL, TEMPLATE, TEXT, U32, item, save_gguf, vocabulary

from posttrainllm.adapters.loading.checkpoint import read_checkpoint
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.loading.tokenizer import load_tokenizer

TEXTS = (
    "hello world",
    "Hello, we can use 1234 things; it's 3.14\n\n  or so\t\n",
    "Café déjà vu. 日本語のテキスト 🎉 ½ ²",
    "  leading and   inner spaces   ",
    "def f(x):\n    return x**2  # don't\r\n",
    "",
    " ",
)


def loaded(path, family="llama", **extra):
    stored = {f"tokenizer.ggml.{name}": entry for name, entry in extra.items()}
    save_gguf(path, family, extra=stored)
    return load_tokenizer(read_checkpoint(path))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def words(core, text):
    return [piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)]


def test_merges_are_taken_in_their_order_and_bytes_are_the_rest(path):
    tokenizer = loaded(path)
    ids = {token: index for index, token in enumerate(vocabulary()[0])}
    assert tokenizer.encode("hello world") == [ids["hello"], ids["Ġworld"]]
    assert tokenizer.encode("worin") == [ids["w"], ids["or"], ids["in"]]
    assert tokenizer.encode("é") == [ids["Ã"], ids["©"]]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_and_ends_are_those_of_the_file(path):
    tokenizer = loaded(path)
    assert tokenizer.special_ids == tokenizer.added_ids == {0, 1, 2}
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|> is a control token that ends text everywhere
    assert tokenizer.encode("<|im_end|>hello")[0] == 2
    assert tokenizer.decode([2, *tokenizer.encode("hello")]) == "hello"
    assert tokenizer.backend.special_tokens == {
        **{"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0], "pad_token": SPECIAL[2]}
    }
    asked = [{"role": "user", "content": "hello"}]
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert TEMPLATE.count("im_start") == 2
    assert tokenizer.encode_chat(asked) == tokenizer.encode(expected)


def test_an_end_of_turn_is_an_end_too(path):
    assert loaded(path, eot_token_id=item(U32, 5)).eos_ids == {0, 2, 5}


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_text_begins_and_ends_as_the_file_says(bos, eos, path):
    tokenizer = loaded(path, add_bos_token=item(BOOL, bos), add_eos_token=item(BOOL, eos))
    plain = tokenizer.backend.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1] * bos + plain + [2] * eos


def test_llama_3s_text_begins_with_bos_where_nothing_says_so(path):
    assert loaded(path, pre=item(TEXT, "llama-bpe"), add_bos_token=None).encode("hello")[0] == 1
    assert loaded(path, pre=item(TEXT, "smollm"), add_bos_token=None).encode("hello")[0] != 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "it's 123 a  b", ["it", "'s", "Ġ", "1", "2", "3", "Ġa", "Ġ", "Ġb"]),
        ("gpt-2", "it's 123 a  b", ["it", "'s", "Ġ123", "Ġa", "Ġ", "Ġb"]),
        ("llama-bpe", "It'S 12345 a\n\n b.\n", ["It", "'S", "Ġ", "123", "45", "Ġa", "ĊĊ", "Ġb", ".Ċ"]),
        ("qwen2", "It'S 123 a\n\n b.\n", ["It", "'S", "Ġ", "1", "2", "3", "Ġa", "ĊĊ", "Ġb", ".Ċ"]),
        ("default", "a+=12345, b", ["a", "+=", "123", "45", ",", "Ġb"]),
    ],
)
def test_words_are_cut_by_their_name(name, text, expected, path):
    assert words(loaded(path, pre=item(TEXT, name)).backend.core, text) == expected


def test_qwens_text_is_normalised_and_llama_3_takes_a_word_that_is_a_token(path):
    assert loaded(path, pre=item(TEXT, "qwen2")).encode("e\u0301") == loaded(path).encode("\u00e9")
    assert loaded(path).encode("e\u0301") != loaded(path).encode("\u00e9")
    tokens = vocabulary()[0]
    merges = item(ARRAY, [merge for merge in MERGES if merge != "hell o"])
    assert loaded(path, merges=merges).encode("hello") == [tokens.index("hell"), tokens.index("o")]
    assert loaded(path, merges=merges, pre=item(TEXT, "llama-bpe")).encode("hello") == [tokens.index("hello")]


def test_rows_that_fill_the_matrix_are_no_tokens(path):
    tokens, kinds = vocabulary()
    last = len(tokens) - 1
    merges = item(ARRAY, MERGES[:-1])
    extra = {"tokens": item(ARRAY, [*tokens[:-1], f"[PAD{last}]"]), "token_type": item(ARRAY, [*kinds[:-1], 5], I32)}
    tokenizer = loaded(path, merges=merges, **extra)
    assert tokenizer.size == last
    assert f"[PAD{last}]" not in tokenizer.vocabulary.values()


def test_a_tokenizer_trained_elsewhere_gives_its_own_ids(path):
    """The embedded pair's, written into a file: its ids are those of its tokenizer.json."""
    source = tokenizers.Tokenizer.from_file(str(embedded_path("target-16m") / "tokenizer.json"))
    described = json.loads(source.to_str())
    parts = described["pre_tokenizer"]
    model = described["model"]
    special = {token["id"] for token in described["added_tokens"]}
    tokens = [source.id_to_token(index) for index in range(source.get_vocab_size())]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    save_gguf_with(path, tokens, [3 if index in special else 1 for index in range(len(tokens))], merges)
    tokenizer = load_tokenizer(read_checkpoint(path))
    # what cuts its text into words is its own; the rest is the file's
    tokenizer.backend.core.pre_tokenizer = source.pre_tokenizer
    assert parts is not None
    code = (embedded_path("target-16m") / "config.json").read_text()
    for text in (*TEXTS, code):
        assert tokenizer.encode(text) == source.encode(text).ids
    assert tokenizer.vocabulary == {index: piece for piece, index in source.get_vocab().items()}


def save_gguf_with(path, tokens, kinds, merges):
    import gguf_files

    entries = gguf_files.metadata(sizes={"layers": 1}) | {
        "tokenizer.ggml.tokens": item(ARRAY, tokens),
        "tokenizer.ggml.token_type": item(ARRAY, kinds, I32),
        "tokenizer.ggml.merges": item(ARRAY, merges),
    }
    stored = gguf_files.tensors(sizes={"layers": 1})
    floats = np.zeros((len(tokens), 64), dtype=np.float32)
    stored["token_embd.weight"] = ("F32", floats.shape, floats.tobytes(), floats)
    path.write_bytes(gguf_files.file_bytes(entries, stored))


# SentencePiece


@pytest.fixture(scope="module")
def sentence_piece():
    """A BPE of sentencepiece's own trainer, with bytes for what it has not seen."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="it is the reference for its own tokenizers")
    generator = random.Random(3)
    stems = ["hello", "world", "token", "izer", "spec", "ulative", "décod", "ing", "the", "model", "日本", "語", "x"]
    lines = [" ".join("".join(generator.choices(stems, k=2)) for _ in range(8)) for _ in range(300)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def write_sentence_piece(path, reference, **extra):
    import gguf_files

    count = reference.get_piece_size()
    kinds = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1
        for i in range(count)
    ]
    entries = gguf_files.metadata(sizes={"layers": 1}) | {
        "tokenizer.ggml.model": item(TEXT, "llama"),
        "tokenizer.ggml.tokens": item(ARRAY, [reference.id_to_piece(i) for i in range(count)]),
        "tokenizer.ggml.token_type": item(ARRAY, kinds, I32),
        "tokenizer.ggml.scores": item(ARRAY, [reference.get_score(i) for i in range(count)], F32),
        **{f"tokenizer.ggml.{name}": entry for name, entry in extra.items()},
    }
    for name in ("merges", "pre", "add_bos_token"):
        entries.pop(f"tokenizer.ggml.{name}", None)
    stored = gguf_files.tensors(sizes={"layers": 1})
    floats = np.zeros((count, 64), dtype=np.float32)
    stored["token_embd.weight"] = ("F32", floats.shape, floats.tobytes(), floats)
    path.write_bytes(gguf_files.file_bytes(entries, stored))
    return load_tokenizer(read_checkpoint(path))


def test_sentence_pieces_scores_give_its_own_ids(sentence_piece, path):
    """2000 random texts, from letters that it merges to characters that it has never seen."""
    tokenizer = write_sentence_piece(path, sentence_piece)
    generator = random.Random(5)
    alphabet = "helowrdtkniz specuaivgm日本語éx  \n0129"
    rare = "ßλ🎉\t\u00a0Ω"
    assert tokenizer.encode("hello")[0] == sentence_piece.bos_id() == 1
    for index in range(2000):
        letters = alphabet if index % 4 else alphabet + rare
        text = "".join(generator.choices(letters, k=generator.randrange(1, 40)))
        ids = tokenizer.backend.encode(text, add_special_tokens=False)
        assert ids == sentence_piece.encode(text), repr(text)
        assert tokenizer.decode(ids) == text


def test_sentence_piece_without_scores_is_refused(sentence_piece, path):
    from posttrainllm.kernel.errors import CheckpointError, UnsupportedModelError

    with pytest.raises(CheckpointError, match="scores: got an array of 2 numbers, expected 420 floats"):
        write_sentence_piece(path, sentence_piece, scores=item(ARRAY, [1.0, 2.0], F32))
    with pytest.raises(UnsupportedModelError, match="remove_extra_whitespaces: got true, expected false"):
        write_sentence_piece(path, sentence_piece, remove_extra_whitespaces=item(BOOL, True))
