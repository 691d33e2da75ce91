"""Models small enough for tests, and the loops that several test files share."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.models import llama

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.llama import LlamaWeights
from posttrainllm.adapters.loading.llama_config import read_config
from posttrainllm.adapters.loading.llama_reader import fuse_llama
from posttrainllm.adapters.loading.module import Model
from posttrainllm.adapters.loading.pair import Pair, embedded_path
from posttrainllm.adapters.loading.tokenizer import Tokenizer
from posttrainllm.adapters.loading.variants import model_from_weights
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.runtime import start
from posttrainllm.kernel.noise import root_key
from posttrainllm.kernel.state import DecodeState, Sampling

PROMPTS = (
    "def fibonacci(n):\n",
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self, rows, columns):\n",
    "x",
    "# Read the file and count how often every word occurs in it\nwith open(path) as stream:\n",
)
FAMILY_CONFIG = {  # what a family's own keys and a vocab_size are added to
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def tiny_config(*, layers: int = 2, vocab: int = 4096, context: int = 512, heads: int = 4, kv_heads: int = 2) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }


def tiny_module(config: dict, *, seed: int, dtype: mx.Dtype = mx.float32, noise_on=None, scale: float = 0.0):
    """A random Llama, or another one's weights with noise of the given scale on them."""
    module = llama.Model(llama.ModelArgs.from_dict(config))
    random_weights(module, seed=seed, dtype=dtype, noise_on=noise_on, scale=scale)
    return module


def fused_weights(module, config: dict, dtype: str = "float32") -> LlamaWeights:
    """A module's own arrays as our forwards take them."""
    weights = fuse_llama(dict(tree_flatten(module.parameters())), read_config(config), dtype)
    assert weights is not None
    return weights


def tiny_model(module, config: dict, *, name: str, dtype: str, context: int) -> Model:
    """A model as loading makes it: with the forward of ours that fits this machine."""
    model = model_from_weights(fused_weights(module, config, dtype), name=name, dtype=dtype, context=context)
    return attrs.evolve(model, module_loader=lambda: module)


def random_weights(module, *, seed: int, dtype: mx.Dtype, noise_on=None, scale: float = 0.0) -> None:
    """Draw every matrix and bias of a module, or add noise of a scale to another one's; norms stay as they are."""
    generator = np.random.default_rng(seed)

    def draw(array: mx.array) -> mx.array:
        return mx.array(generator.standard_normal(array.shape).astype(np.float32) * (1.5 / array.shape[-1] ** 0.5))

    parameters = tree_map_with_path(
        lambda path, array: draw(array) if array.ndim == 2 or path.endswith("bias") else array, module.parameters()
    )
    if noise_on is not None:
        parameters = tree_map(lambda base, random: base + scale * random, noise_on.parameters(), parameters)
    module.update(parameters)
    module.set_dtype(dtype)
    mx.eval(module.parameters())


def tiny_pair(
    *,
    dtype: str = "float32",
    draft: str = "random",
    vocab: int = 512,
    draft_vocab: int | None = None,
    context: int = 512,
) -> Pair:
    """A random target with a draft that is "same", "noisy" or "random"."""
    as_dtype = getattr(mx, dtype)
    config = draft_config = tiny_config(vocab=vocab, context=context)
    target = tiny_module(config, seed=1, dtype=as_dtype)
    if draft == "same":
        draft_module = target
    elif draft == "noisy":
        base = tiny_module(config, seed=1)
        draft_module = tiny_module(config, seed=7, dtype=as_dtype, noise_on=base, scale=0.05)
    else:
        draft_config = tiny_config(layers=1, vocab=draft_vocab or vocab)
        draft_module = tiny_module(draft_config, seed=2, dtype=as_dtype)
    return Pair(
        target=tiny_model(target, config, name="tiny target", dtype=dtype, context=context),
        draft=tiny_model(draft_module, draft_config, name="tiny draft", dtype=dtype, context=context),
        tokenizer=bare_tokenizer(vocab),
        runtime=start(),
        reason=None,
    )


def table_pair(*, vocab: int = 512, context: int = 512) -> Pair:
    """A target that drafts for itself and keeps no cache: its logits have the same bits at every width."""
    table = mx.array(np.random.default_rng(5).normal(size=(vocab, vocab)).astype(np.float32) * 2)
    model = Model(
        forward=table_forward(table),
        name="table",
        dtype="float32",
        vocab_size=vocab,
        context=context,
        kv_shapes=(),
        kv_dtype=mx.float32,
    )
    return Pair(target=model, draft=model, tokenizer=bare_tokenizer(vocab), runtime=start(), reason=None)


def bare_tokenizer(size: int, eos: Sequence[int] = ()) -> Tokenizer:
    """A tokenizer whose ids are plain characters."""

    class Backend:
        has_chat_template = False

        def decode(self, ids, skip_special_tokens=True):
            return "".join(chr(0x100 + index) for index in ids)

        def encode(self, text, verbose=True):
            return [ord(character) - 0x100 for character in text]

    vocabulary = {index: chr(0x100 + index) for index in range(size)}
    return Tokenizer(path=Path("bare"), backend=Backend(), vocabulary=vocabulary, eos_ids=frozenset(eos))


def mostly_slow(cases: Mapping[str, Any], *fast: str) -> list:
    """Cases by name, a tuple of values each or one value, as parameters; those not named are of the slower set."""
    assert set(fast) <= cases.keys(), sorted(cases)
    each = {name: case if isinstance(case, tuple) else (case,) for name, case in cases.items()}
    return [pytest.param(*case, id=name, marks=() if name in fast else pytest.mark.slow) for name, case in each.items()]


def without_draft(pair: Pair) -> Pair:
    return pair.plain("test")


def save_tiny_llama(path: Path, *, seed: int, layers: int = 2, context: int = 512) -> Path:
    """Write a random Llama in Hugging Face layout, with the embedded pair's tokenizer."""
    path.mkdir(parents=True)
    config = tiny_config(layers=layers, context=context)
    module = tiny_module(config, seed=seed)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_path("target-16m") / name, path / name)
    return path


def plant(hub: Path, name: str, source: Path) -> Path:
    """A model in the hub's cache, as the hub's client lays it out; its files are no links, which it allows."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(source, snapshot)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


def decode(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    width: int,
    count: int,
    capacity: int = 256,
    seeds: Sequence[int] | None = None,
    engine: Engine | None = None,
    **options,
) -> list[list[int]]:
    """Emit `count` ids for every prompt, all as rows of one engine; EOS is an id like any other."""
    engine = engine or Engine(pair, rows=len(prompts), capacity=capacity, width=width)
    options.setdefault("draft_k", width - 1 if pair.draft is not None else 0)
    for row, prompt in enumerate(prompts):
        seed = seeds[row] if seeds is not None else row
        engine.insert(row, RowRequest(prompt=prompt, limit=len(prompt) + count, seed=seed, **options))
    emitted: list[list[int]] = [[] for _ in prompts]
    while any(len(ids) < count for ids in emitted):
        for row, step in engine.step().items():
            assert step.finite
            assert step.accepted <= step.proposed
            emitted[row].extend(step.tokens)
    return emitted


def make_state(tokens: Sequence[Sequence[int]], *, limit: int, capacity: int, seeds=None, target_kv=(), draft_kv=()):
    """A state of rows that hold the given ids, with no prefill."""
    padded = np.zeros((len(tokens), capacity), dtype=np.int32)
    for row, ids in enumerate(tokens):
        padded[row, : len(ids)] = ids
    seeds = range(len(tokens)) if seeds is None else seeds
    return DecodeState(
        tokens=mx.array(padded),
        length=mx.array([len(ids) for ids in tokens], dtype=mx.int32),
        limit=mx.array([limit] * len(tokens), dtype=mx.int32),
        target_kv=target_kv,
        draft_kv=draft_kv,
        key=mx.stack([root_key(seed) for seed in seeds]),
    )


def make_sampling(
    rows: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, draft_k=8, coupled=False, **adjustments
) -> Sampling:
    """The same values for every row, or one value a row where a list is given; a bias is a list of rows."""
    adjustments = {"prompt_length": 0, "presence_penalty": 0.0, "frequency_penalty": 0.0} | adjustments
    bias = adjustments.pop("bias", [[]] * rows)

    def column(value, dtype):
        return mx.array(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return Sampling(
        temperature=column(temperature, mx.float32),
        top_k=column(top_k, mx.int32),
        top_p=column(top_p, mx.float32),
        min_p=column(min_p, mx.float32),
        draft_k=column(draft_k, mx.int32),
        coupled=column(coupled, mx.bool_),
        prompt_length=column(adjustments.pop("prompt_length"), mx.int32),
        repetition_penalty=column(adjustments.pop("repetition_penalty", 1.0), mx.float32),
        bias=mx.array(np.array(bias, dtype=np.float32)),
        **{name: column(value, mx.float32) for name, value in adjustments.items()},
    )


def table_forward(table: mx.array):
    """A model whose next-token logits are a row of a table [V, V], chosen by the token; it keeps no cache."""

    def forward(tokens, kv, position):
        return table[mx.minimum(tokens, table.shape[0] - 1)], kv

    return forward
