"""Log probabilities of a prompt's own tokens: what `echo` shows. A forward of its own, beside the real prefill."""

from collections.abc import Generator, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.checks import check_ids
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.logprobs import read_logprobs
from posttrainllm.adapters.result import TokenLogprobs
from posttrainllm.kernel.compiled import Score, compile_score
from posttrainllm.kernel.errors import CapacityError, NonFiniteError

__all__ = ["prompt_logprobs"]


def prompt_logprobs(
    engine: Engine, prompt: Sequence[int], *, count: int = 0
) -> Generator[None, None, list[TokenLogprobs | None]]:
    """Score a prompt, one chunk a `next()`, on a cache of its own; the engine's rows are neither read nor written.

    Each `next()` computes a chunk of `engine.chunk` tokens and waits for it, so that steps may go between; what comes
    with the end (`StopIteration.value`, or `yield from`) is the list. Close the generator to give it up.

    Args:
        engine: whose target, chunk and capacity are used.
        prompt: token ids.
        count: alternatives a token, 0 to 20.

    Returns:
        One a token; None for the first, which nothing comes before.

    Raises:
        CapacityError: the prompt is empty, too long or has an id that the model lacks; at the first `next()`.
        NonFiniteError: the target's logits were not finite.
    """
    _check(engine, prompt)
    score, model = _score_for(engine), engine.pair.target
    kv = model.make_kv(1, engine.capacity)
    scored: list[TokenLogprobs | None] = [None]
    ids = np.array(prompt, dtype=np.int32)
    for start in range(0, len(ids) - 1, engine.chunk):
        following = ids[start + 1 : start + 1 + engine.chunk]
        fed, asked = _padded(ids[start : start + len(following)], engine.chunk), _padded(following, engine.chunk)
        kv, *arrays = score(fed, kv, mx.array([start], dtype=mx.int32), asked)
        mx.eval(kv, arrays)
        own, top_ids, top_logprobs = (np.array(array)[0] for array in arrays)
        if np.isnan(own[: len(following)]).any():
            raise NonFiniteError(f"prompt, positions {start} to {start + len(following) - 1}: logits are not finite")
        scored.extend(read_logprobs(following.tolist(), own, top_ids, top_logprobs, count))
        yield
    return scored


def _padded(ids: npt.NDArray[np.int32], size: int) -> mx.array:
    """int32 [1, size], zeros behind the ids."""
    return mx.array(np.pad(ids, (0, size - len(ids)))[None])


def _score_for(engine: Engine) -> Score:
    pair = engine.pair
    compiled = pair.runtime.compiled
    return pair.once(
        ("score", compiled), lambda: compile_score(pair.target.forward, pair.vocab_size, compiled=compiled)
    )


def _check(engine: Engine, prompt: Sequence[int]) -> None:
    most = min(engine.capacity - 1, engine.pair.target.context)
    if not 1 <= len(prompt) <= most:
        raise CapacityError(f"prompt: got {len(prompt)} tokens, expected 1 to {most}")
    check_ids("prompt", prompt, engine.pair.target.vocab_size)
