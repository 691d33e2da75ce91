"""What a generation yields and returns: the contract of `--json` and of the Python API."""

from typing import Any, Literal, TypeAlias

import attrs

__all__ = ["Chunk", "FinishReason", "Result", "Timings", "TokenLogprobs", "Usage"]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@attrs.frozen(kw_only=True)
class TokenLogprobs:
    """How likely an id was by the target's raw logits, before bias, penalties and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest ids at its position and their log probabilities, best first; as many as were asked for."""


@attrs.frozen(kw_only=True)
class Chunk:
    """What one step added."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last chunk."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of `token_ids`; None unless the request asks for them."""


@attrs.frozen(kw_only=True)
class Usage:
    """Token counts; proposals past the end and accepted ids that were cut are not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    draft_proposed: int
    draft_accepted: int
    accept_rate: float | None
    """draft_accepted / draft_proposed; None when nothing was proposed."""


@attrs.frozen(kw_only=True)
class Timings:
    """Seconds and rates. Decoding is clocked from the end of the first step, which also traces and compiles."""

    prefill_s: float
    ttft_s: float
    decode_s: float
    decode_tokens_per_s: float | None
    """Ids after the first step by `decode_s`; None when there was no second step."""
    steps: int
    tokens_per_step: float | None


@attrs.frozen(kw_only=True)
class Result:
    """A finished or cancelled generation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    peak_memory_bytes: int
    """MLX's own peak since the process started."""
    seed: int
    model: str
    draft_model: str | None
    draft_k: int | None
    """K; where it was chosen from step to step, the most that could be."""
    plain_width: int | None
    """Width of the plain forward; None with a draft, where it is draft_k + 1."""
    accept_rule: str | None
    """None where it decides nothing: without a draft, and at temperature 0."""
    sampling: dict[str, Any]
    """Every other option of the request, by name."""
    device: str
    dtype: str
    blas: str | None
    versions: dict[str, str]
    """Of posttrainllm, mlx and mlx-lm: bits may differ between them."""
    speculative: dict[str, Any]
    """`enabled`, and the `reason` when it is not. Where K was chosen from step to step: `draft_k` "auto", and `steps`,
    how many there were of each K. Where the costs of steps are known: whether the draft `pays`, and `speed_ratio`, the
    rate by these costs against that of plain decoding at width 1."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of `token_ids`; None unless the request asks for them."""
    adapters: dict[str, str] | None = None
    """By "target" and "draft", as they were given; None where there is none."""
    kv_bits: int | None = None
    """Of quantised keys and values; None where they are not."""

    def to_dict(self) -> dict[str, Any]:
        """As plain dictionaries and lists, for JSON; `logprobs`, `adapters` and `kv_bits` only where there are any."""
        sometimes = {"logprobs", "adapters", "kv_bits"}
        return attrs.asdict(self, filter=lambda field, value: field.name not in sometimes or value is not None)
