"""Logit bias and the penalties: what a request does to the logits before temperature and filters.

The order is that of vLLM and mlx-lm: bias, then the repetition penalty (positive logits divided, others multiplied),
then the frequency and the presence penalty. Draft and target are adjusted alike, and the history of a position holds
the tokens of its own window that come before it.

A row that asks for nothing keeps its logits: adding 0, dividing by 1 and subtracting 0 return the same number. No
product meets a sum here, since a compiler may round the two together in one graph and apart in another; speculative and
plain steps would then differ.
"""

import attrs
import mlx.core as mx

from posttrainllm.kernel.config import StepConfig
from posttrainllm.kernel.state import DecodeState, Sampling

__all__ = ["History", "adjust", "history_of"]


@attrs.frozen(eq=False, kw_only=True)
class History:
    """How often each id occurs before each of N positions; N is 1 for a history that all of them share."""

    prompt: mx.array
    """int32 [B, 1, V]: in the prompt."""
    generated: mx.array
    """int32 [B, N, V]: behind it."""
    longest: int
    """No count is larger: C + W."""

    def followed_by(self, token: mx.array) -> "History":
        """The history of the next position.

        Args:
            token: int32 [B, 1], the id at this one.

        Returns:
            The same with one id more.
        """
        return attrs.evolve(self, generated=self.generated + _one_hot(token, self.generated))

    def through(self, proposals: mx.array) -> "History":
        """The histories of all positions of a window.

        Args:
            proposals: int32 [B, K], fed behind the last committed id.

        Returns:
            N = K + 1: nothing of the window before the first position, all proposals before the last.
        """
        before = mx.cumsum(_one_hot(proposals, self.generated), axis=1)  # [B, K, V]
        return attrs.evolve(self, generated=mx.concatenate([self.generated, self.generated + before], axis=1))


def history_of(config: StepConfig, state: DecodeState, sampling: Sampling) -> History | None:
    """Count the committed ids.

    Args:
        config: static shape of the step.
        state: B rows.
        sampling: B rows; `prompt_length` says where the generated ids begin.

    Returns:
        The history of the next position, N = 1; None where the step adjusts nothing. Ids that are never emitted, as a
        prompt may hold, are not counted.
    """
    if not config.adjusted:
        return None
    slot = mx.arange(state.tokens.shape[1])[None]  # [1, C]
    counted = (slot < state.length[:, None]) & (state.tokens >= 0) & (state.tokens < config.vocab_size)  # [B, C]
    in_prompt = slot < sampling.prompt_length[:, None]
    ids = mx.clip(state.tokens, 0, config.vocab_size - 1)  # MLX checks no index of a scatter
    return History(
        prompt=_count(ids, counted & in_prompt, config.vocab_size),
        generated=_count(ids, counted & ~in_prompt, config.vocab_size),
        longest=state.tokens.shape[1] + config.width,
    )


def adjust(logits: mx.array, sampling: Sampling, history: History | None) -> mx.array:
    """Apply bias and penalties.

    Args:
        logits: float32 [B, N, V], of the target or of the draft; -inf stays -inf.
        sampling: one value a row; a bias of no columns is none.
        history: of the same N positions; None returns the logits as they are.

    Returns:
        float32 [B, N, V].
    """
    if history is None:
        return logits
    if sampling.bias.shape[1] > 0:
        logits = logits + sampling.bias[:, None]
    penalty = sampling.repetition_penalty[:, None, None]  # [B, 1, 1]
    seen = (history.prompt + history.generated) > 0
    divisor = mx.where(logits > 0, penalty, 1 / penalty)
    logits = logits / mx.where(seen, divisor, 1.0)
    logits = logits - _frequency(sampling, history)
    return logits - mx.where(history.generated > 0, sampling.presence_penalty[:, None, None], 0.0)


def _frequency(sampling: Sampling, history: History) -> mx.array:
    """Penalty times count, float32 [B, N, V], looked up in a table: the product is rounded before it is subtracted."""
    table = sampling.frequency_penalty[:, None] * mx.arange(history.longest)  # [B, C + W]
    batch, count, _ = history.generated.shape
    table = mx.broadcast_to(table[:, None], (batch, count, history.longest))  # [B, C + W] -> [B, N, C + W]
    return mx.take_along_axis(table, history.generated, axis=-1)


def _count(ids: mx.array, counted: mx.array, vocab_size: int) -> mx.array:
    """Occurrences of each id: int32 [B, C] and bool [B, C] to int32 [B, 1, V]."""
    batch = ids.shape[0]
    row = mx.arange(batch)[:, None]  # [B, 1]
    counts = mx.zeros((batch, vocab_size), dtype=mx.int32).at[row, ids].add(counted.astype(mx.int32))
    return counts[:, None]  # [B, V] -> [B, 1, V]


def _one_hot(tokens: mx.array, like: mx.array) -> mx.array:
    """int32 [B, N] to int32 [B, N, V]."""
    return (tokens[..., None] == mx.arange(like.shape[-1])).astype(mx.int32)
