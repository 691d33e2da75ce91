"""Tokenizers without transformers: ids and text are the ones that transformers gives, or transformers is asked."""

import json
import random
import shutil

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from posttrainllm.adapters.loading.checkpoint import Checkpoint
from posttrainllm.adapters.loading.fast_tokenizer import fast_backend
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.loading.tokenizer_files import _QWEN_SPLIT

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox, it's said, doesn't jump over 12345 lazy dogs.",
    "naïve café — “quotes” … 東京 мир 🙂 <s> </s>",
    "for  i   in range(10):\tprint('x')\r\n\r\n",
] * 3
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
LONG = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def trained(core, special=("<s>", "</s>"), alphabet=(), vocab_size=400):
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=list(alphabet), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


def with_bytes(pre_tokenizer=None, **options):
    core = tokenizers.Tokenizer(models.BPE(**options))
    core.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return trained(core, alphabet=pre_tokenizers.ByteLevel.alphabet())


def with_bos(core, eos=False):
    ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A", pair="<s> $A $B", special_tokens=ids
    )
    return core


def with_added(core):
    core.add_special_tokens([AddedToken("<|im_start|>", normalized=False), AddedToken("<|im_end|>", lstrip=True)])
    core.add_tokens([AddedToken("<think>"), AddedToken("</think>", rstrip=True), AddedToken("fox", single_word=True)])
    return core


def sentencepiece():
    """As converters make it: spaces become U+2581, unknown characters bytes, the first space is stripped."""
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_bos(
        trained(core, ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))), vocab_size=700)
    )


def metaspace():
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return with_bos(trained(core, ("<unk>", "<s>", "</s>")), eos=True)


def qwen():
    split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    core.normalizer, core.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Sequence([split, last])
    core.decoder, core.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    trained(core, (), pre_tokenizers.ByteLevel.alphabet())
    core.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|endoftext|>", "<|im_start|>")])
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return core


def llama3():
    split = pre_tokenizers.Split(Regex(LONG), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def listed(core):
    """The added tokens as tokenizer_config.json lists them."""
    return {str(index): token.__getstate__() for index, token in core.get_added_tokens_decoder().items()}


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
QWEN_CONFIG = {"bos_token": None, "eos_token": "<|im_start|>", "pad_token": "<|endoftext|>", "unk_token": None}
# name: model_type, tokenizer, tokenizer_config
KINDS = {
    "bytes": ("llama", lambda: with_bytes(), PLAIN),
    "bytes, bos": ("llama", lambda: with_bos(with_bytes()), PLAIN | NAMED),
    "bytes, added tokens": ("llama", lambda: with_added(with_bos(with_bytes())), PLAIN | NAMED),
    "bytes, bos and eos, said so": (
        "llama",
        lambda: with_bos(with_bytes(), eos=True),
        PLAIN | NAMED | {"add_bos_token": True, "add_eos_token": True},
    ),
    "as llama 3": (
        "llama",
        lambda: with_added(with_bos(with_bytes(llama3(), ignore_merges=True))),
        PLAIN | NAMED | {"clean_up_tokenization_spaces": True, "model_max_length": 131072},
    ),
    "bytes, by llama's class": (
        "llama",
        lambda: with_bos(with_bytes()),
        PLAIN | NAMED | {"tokenizer_class": "LlamaTokenizerFast"},
    ),
    "flags beside names": (
        "llama",
        lambda: with_bytes(),
        PLAIN | {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}, "eos_token": "</s>"},
    ),
    "sentencepiece": ("llama", sentencepiece, PLAIN | NAMED | {"unk_token": "<unk>"}),
    "sentencepiece, mistral": (
        "mistral",
        sentencepiece,
        PLAIN | NAMED | {"unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    ),
    "metaspace": ("llama", metaspace, PLAIN | NAMED | {"unk_token": "<unk>"}),
    "qwen2": ("qwen2", qwen, PLAIN | QWEN_CONFIG | {"tokenizer_class": "Qwen2Tokenizer", "errors": "replace"}),
    "qwen2, another class named": ("qwen2", qwen, PLAIN | QWEN_CONFIG),
    "qwen3": ("qwen3", qwen, PLAIN | QWEN_CONFIG | {"tokenizer_class": "Qwen2TokenizerFast"}),
    "qwen3, as it stands": ("qwen3", lambda: with_bytes(), PLAIN),
}


def save(path, kind, **changes):
    model_type, make, config = KINDS[kind]
    core = make()
    path.mkdir()
    core.save(str(path / "tokenizer.json"))
    if "added" in kind or "qwen2" in kind:
        config = config | {"added_tokens_decoder": listed(core)}
    return write_config(path, model_type, config | changes)


def write_config(path, model_type, config):
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return checkpoint_of(path, model_type)


def checkpoint_of(path, model_type="llama"):
    config = {"model_type": model_type}
    return Checkpoint(
        path=path, config=config, weight_bytes=0, dtype="float32", context=8, quantized=False, float_bytes={}
    )


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """Ours and transformers' of every kind and of the embedded models."""
    found = {}
    for kind in KINDS:
        checkpoint = save(tmp_path_factory.mktemp("tokenizer") / "model", kind)
        found[kind] = fast_backend(checkpoint), load(checkpoint.path)
    for name in ("target-16m", "draft-3m"):
        found[name] = fast_backend(checkpoint_of(embedded_path(name))), load(embedded_path(name))
    return found


ALL = [*KINDS, "target-16m", "draft-3m"]
WORDS = ["<s>", "</s>", "<|im_start|>", " <|im_end|>", "<think>", "</think> ", "<|endoftext|>", "fox", " fox", "foxes"]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS + CORPUS), st.text(max_size=20)), max_size=6).map("".join)


@pytest.mark.parametrize("kind", ALL)
def test_it_knows_the_ids_that_transformers_knows(backends, kind):
    ours, theirs = backends[kind]
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.has_chat_template == theirs.has_chat_template
    assert states(ours.added_tokens_decoder) == states(theirs.added_tokens_decoder)


def states(tokens):
    return {index: token.__getstate__() for index, token in tokens.items()}


@pytest.mark.parametrize("kind", ALL)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_ids_of_any_text_are_transformers_own(backends, kind, text):
    ours, theirs = backends[kind]
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special, verbose=False)
        assert ids == theirs.encode(text, add_special_tokens=special, verbose=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ALL)
def test_text_of_any_ids_is_transformers_own(backends, kind):
    """Also of ids that no text has: characters that break off, special tokens in the middle."""
    ours, theirs = backends[kind]
    generator, size = random.Random(7), max(ours.get_vocab().values()) + 1
    for _ in range(300):
        ids = [generator.randrange(size) for _ in range(generator.randrange(8))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


TEMPLATES = {
    "names of tokens": "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "blocks and lines": "{% for message in messages %}\n  {% if loop.first %}\n    first\n  {% endif %}\n"
    "    {%- set role = message.role %}\n{{ role }}: {{ message.content | trim }}\n{% endfor %}\n",
    "loop controls": "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{{ message.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "a namespace": "{% set ns = namespace(count=0, self=1) %}{% for message in messages %}"
    "{% set ns.count = ns.count + 1 %}{% endfor %}{{ ns.count }}{{ dict(a=1) }}{{ dict.fromkeys(['x']) }}",
    "marks for training": "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% endfor %}",
    "variables": "{{ enable_thinking }}|{{ style | default('none') }}|{{ tools is none }}|{{ documents is none }}|"
    "{{ nothing }}",
    "a refusal": "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}ok",
    "the date": "{{ strftime_now('%Y') }}",
    "a way out": "{{ messages.append(1) }}",
    "another way out": "{{ ''.__class__.__mro__ }}",
    "a hidden name": "{% set ns = namespace(_x=1) %}",
    "what is no template": "{% for",
}
CONVERSATIONS = [
    [{"role": "user", "content": "  Hello <s> é  "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 < 2 & 3"},
        {"role": "assistant", "content": "yes\n"},
        {"role": "user", "content": ""},
    ],
]


def rendered(backend, messages, **variables):
    """The text of a conversation, or what kind of error there is instead."""
    try:
        return backend.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **variables)
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "style": "<b>", "bos_token": "<B>"}], ids=str)
@pytest.mark.parametrize("kind", ["bytes, bos", "bytes, added tokens", "qwen2"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_gives_the_text_that_transformers_gives(tmp_path, name, kind, variables):
    checkpoint = save(tmp_path / "model", kind, chat_template=TEMPLATES[name])
    ours, theirs = fast_backend(checkpoint), load(checkpoint.path)
    for messages in CONVERSATIONS:
        assert rendered(ours, messages, **variables) == rendered(theirs, messages, **variables)


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
        [{"name": "other", "template": "a"}],
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("file", [None, "of the file\r\n{{ messages[0].content }}\n"], ids=["", "file"])
def test_templates_by_name_and_the_file_for_one_are_taken_as_transformers_takes_them(tmp_path, templates, file):
    checkpoint = save(tmp_path / "model", "bytes", chat_template=templates)
    if file is not None:
        (checkpoint.path / "chat_template.jinja").write_text(file, newline="")
    ours, theirs = fast_backend(checkpoint), load(checkpoint.path)
    assert ours.has_chat_template == theirs.has_chat_template
    assert rendered(ours, CONVERSATIONS[0]) == rendered(theirs, CONVERSATIONS[0])


def test_a_map_of_special_tokens_has_the_last_word_where_no_added_ones_are_listed(tmp_path):
    checkpoint = save(tmp_path / "model", "bytes", eos_token="<s>")
    (checkpoint.path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    ours, theirs = fast_backend(checkpoint), load(checkpoint.path)
    assert ours.eos_token_ids == theirs.eos_token_ids == {1}


OTHERS = {
    "pieces of words by llama's class": ("sentencepiece", {"tokenizer_class": "LlamaTokenizer"}),
    "a class of its own": ("bytes", {"tokenizer_class": "MyTokenizer"}),
    "no class": ("bytes", {"tokenizer_class": None}),
    "another's class": ("bytes", {"tokenizer_class": "GPT2Tokenizer"}),
    "qwen's class over other splits": ("qwen3, as it stands", {"tokenizer_class": "Qwen2Tokenizer"}),
    "code": ("bytes", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
    "a setting not known here": ("bytes", {"do_lower_case": True}),
    "special tokens split": ("bytes", {"split_special_tokens": True}),
    "a space in front": ("bytes", {"add_prefix_space": True}),
    "a token that is not in tokenizer.json": ("bytes", {"eos_token": "<|new|>"}),
    "one more special token": ("bytes", {"additional_special_tokens": ["<|new|>"]}),
    "one more by name": ("bytes", {"extra_special_tokens": {"image": "<|new|>"}}),
    "a list that is none": ("bytes", {"additional_special_tokens": {"a": "<|new|>"}}),
    "flags without a type": ("bytes", {"eos_token": {"content": "<|endoftext|>"}}),
    "a piece made special": ("bytes", {"pad_token": "a"}),
    "an added token made special": ("bytes, added tokens", {"pad_token": "<think>"}),
    "an added token with other flags": (
        "bytes, added tokens",
        {"added_tokens_decoder": {"0": {"content": "<s>", "special": True, "lstrip": True}}},
    ),
    "an added token with another id": ("bytes", {"added_tokens_decoder": {"5": {"content": "<s>", "special": True}}}),
    "added tokens that are none": ("bytes", {"added_tokens_decoder": {"x": 1}}),
    "tokens left out of what is built anew": ("qwen2", {"added_tokens_decoder": {}}),
    "bos asked for": ("bytes", {"add_bos_token": True, **NAMED}),
    "bos not asked for": ("bytes, bos", {"add_bos_token": False}),
    "eos asked for": ("bytes, bos", {"add_eos_token": True}),
    "a template that is none": ("bytes", {"chat_template": 5}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_where_transformers_could_do_more_it_is_asked(tmp_path, name):
    kind, changes = OTHERS[name]
    assert fast_backend(save(tmp_path / "model", kind, **changes)) is None


NOT_QWEN = {
    "another normalisation": lambda file: file.update(normalizer={"type": "NFKC"}),
    "none": lambda file: file.update(normalizer=None),
    "another decoder": lambda file: file.update(decoder={"type": "Fuse"}),
    "splits of its own": lambda file: file["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="a|b"),
    "one part more": lambda file: file["pre_tokenizer"]["pretokenizers"].append({"type": "Whitespace"}),
    "a space in front": lambda file: file["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    "splits of bytes": lambda file: file["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
    "whole words first": lambda file: file["model"].update(ignore_merges=True),
    "bytes for what is unknown": lambda file: file["model"].update(byte_fallback=True),
    "a piece for what is unknown": lambda file: file["model"].update(unk_token="a"),
    "chance": lambda file: file["model"].update(dropout=0.5),
    "a mark inside words": lambda file: file["model"].update(continuing_subword_prefix="##"),
}


@pytest.mark.parametrize("name", NOT_QWEN)
def test_what_qwens_class_would_build_otherwise_is_left_to_transformers(tmp_path, name):
    checkpoint = save(tmp_path / "model", "qwen2")
    file = json.loads((checkpoint.path / "tokenizer.json").read_text())
    NOT_QWEN[name](file)
    if name == "a mark inside words":  # merges of pieces without the mark would not load
        file["model"]["merges"] = []
    (checkpoint.path / "tokenizer.json").write_text(json.dumps(file))
    assert fast_backend(checkpoint) is None


@pytest.mark.parametrize("name", ["tekken.json", "added_tokens.json", "additional_chat_templates"])
def test_files_that_transformers_would_read_are_left_to_it(tmp_path, name):
    checkpoint = save(tmp_path / "model", "bytes")
    (checkpoint.path / name).write_text("{}")
    assert fast_backend(checkpoint) is None


@pytest.mark.parametrize("part", ["truncation", "padding"])
def test_a_tokenizer_that_cuts_or_pads_is_left_to_transformers(tmp_path, part):
    checkpoint = save(tmp_path / "model", "bytes")
    core = tokenizers.Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    core.enable_truncation(4) if part == "truncation" else core.enable_padding(length=4)
    core.save(str(checkpoint.path / "tokenizer.json"))
    assert fast_backend(checkpoint) is None


def test_text_that_is_tidied_up_is_left_to_transformers(tmp_path):
    checkpoint = save(tmp_path / "model", "bytes", clean_up_tokenization_spaces=True)
    core = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), (" ", -2.0)], unk_id=0))
    core.save(str(checkpoint.path / "tokenizer.json"))
    assert fast_backend(checkpoint) is None


def test_other_families_and_directories_without_settings_are_left_to_transformers(tmp_path):
    checkpoint = save(tmp_path / "model", "bytes")
    assert fast_backend(checkpoint_of(checkpoint.path, "gemma2")) is None
    bare = shutil.copytree(checkpoint.path, tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    assert fast_backend(checkpoint_of(bare)) is None
