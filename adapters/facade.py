"""The Python API: load, stream, generate. Mapped into the root package `posttrainllm`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.match.auto import load_chosen
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.kernel.errors import UsageError

if TYPE_CHECKING:  # it imports MLX, and the BLAS must come first
    from posttrainllm.adapters.generation import Generation
    from posttrainllm.adapters.result import Chunk, Result

__all__ = ["generate", "load", "stream"]


def load(
    *,
    model: str | Path | None = None,
    draft_model: str | Path | None = None,
    speculate: bool = True,
    dtype: str = "auto",
    forward: str = "auto",
    draft_k: int | str = 4,
    adapter_path: str | Path | None = None,
    draft_adapter_path: str | Path | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> Pair:
    """Load a target and a draft.

    With no argument this is the embedded pair; a draft alone gets the embedded target; a model alone decodes plainly.

    Args:
        model: directory of the target, in Hugging Face / mlx-lm layout, a `.tinygpt` or GGUF file, or a hub id.
        draft_model: the draft, the same; its tokenizer must agree with the target's. "auto" is the one on this machine
            that pays best, or none, which `Pair.reason` then says why.
        speculate: False loads no draft.
        dtype: "auto", "float32", "float16" or "bfloat16", for both models.
        forward: "auto" takes a forward of our own for Llama-shaped models, "module" mlx-lm's module for all.
        draft_k: K that "auto" chooses a draft for: what `stream` and `generate` will be given.
        adapter_path: directory of a LoRA or DoRA adapter of the target, as mlx-lm or PEFT writes it, or a hub id.
        draft_adapter_path: the same for the draft.
        kv_bits: 8 or 4 quantises the keys and values of both models; None keeps them in the weights' type.
        kv_group_size: how many of their elements share a scale, 32, 64 or 128.

    Returns:
        The pair, to pass to `stream` and `generate`.

    Raises:
        PosttrainllmError: see `posttrainllm.kernel.errors`.
    """
    changes = ModelChanges(
        adapter_path=adapter_path, draft_adapter_path=draft_adapter_path, kv_bits=kv_bits, kv_group_size=kv_group_size
    )
    return load_chosen(
        model,
        draft_model,
        speculate=speculate,
        dtype=dtype,
        forward=forward,
        changes=changes,
        draft_k=DraftLength.parse(draft_k),
        say=LOGGER.info,
    )[0]


def stream(
    *, pair: Pair, prompt: str | Sequence[int], draft_k: int | str = 4, plain_width: int = 1, **options: Any
) -> "Iterator[Chunk]":
    """Check the request, then decode as the iterator is read; each chunk is what a step added.

    Args:
        pair: from `load`.
        prompt: text, or token ids.
        draft_k: tokens the draft proposes a step, 1 to 32; "auto" chooses from step to step, "auto:N" up to N.
        plain_width: width of the target's forward where there is no draft, 1 to 33.
        **options: the fields of `posttrainllm.adapters.params.SamplingParams`: max_tokens, temperature, top_p, top_k,
            min_p, seed, accept_rule, stop, ignore_eos, stop_token_ids, logit_bias, presence_penalty,
            frequency_penalty, repetition_penalty, logprobs.

    Returns:
        An iterator of chunks with `text`, `token_ids`, `logprobs` where asked for and, on the last one,
        `finish_reason`.

    Raises:
        UsageError: an option is unknown or out of range.
        CapacityError: the prompt does not fit, or an id is outside the vocabulary.
        NonFiniteError: the target's logits were not finite.
    """
    return iter(_generation(pair, prompt, draft_k, plain_width, options))


def generate(
    *, pair: Pair, prompt: str | Sequence[int], draft_k: int | str = 4, plain_width: int = 1, **options: Any
) -> "Result":
    """Decode to the end; arguments and errors are those of `stream`.

    Returns:
        Text, ids, why it ended, token counts and timings.
    """
    generation = _generation(pair, prompt, draft_k, plain_width, options)
    for _ in generation:
        pass
    return generation.result()


def _generation(
    pair: Pair, prompt: str | Sequence[int], draft_k: int | str, plain_width: int, options: dict[str, Any]
) -> "Generation":
    from posttrainllm.adapters.generation import Generation

    if not isinstance(pair, Pair):
        raise UsageError(f"pair: got {type(pair).__name__}, expected what load() returns")
    return Generation(pair, prompt, SamplingParams.from_options(options), draft_k=draft_k, plain_width=plain_width)
