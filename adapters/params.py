"""What a request asks for, with every value checked."""

import math
import secrets
from typing import Any, Literal, TypeAlias

import attrs

from posttrainllm.kernel.errors import UsageError

__all__ = ["MAX_DRAFT_K", "AcceptRule", "SamplingParams"]

AcceptRule: TypeAlias = Literal["leviathan", "coupled"]
MAX_DRAFT_K = 32  # the window is a static shape, and no pair pays beyond a few tokens


def _fresh_seed() -> int:
    return secrets.randbits(53)  # every JSON reader can hold it


@attrs.frozen(kw_only=True)
class SamplingParams:
    """One request's options; a bad value raises UsageError with got and expected."""

    max_tokens: int = 128
    """Ids to emit at most; cut to what the context holds."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    seed: int = attrs.field(factory=_fresh_seed)
    """0 to 2**64 - 1; fresh entropy unless given."""
    accept_rule: AcceptRule = "leviathan"
    stop: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    ignore_eos: bool = False

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "SamplingParams":
        """Build from keyword options.

        Args:
            options: field names to values; a seed of None takes fresh entropy.

        Returns:
            The checked parameters.

        Raises:
            UsageError: an option is unknown or out of range.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"option: got {name!r}, expected one of {', '.join(known)}")
        return cls(**{name: value for name, value in options.items() if not (name == "seed" and value is None)})

    def __attrs_post_init__(self) -> None:
        """Check every value."""
        _check("max-tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more")
        _check("top-p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1")
        _check("top-k", self.top_k, 0 <= self.top_k < 2**31, "0 (off) or more")
        _check("min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("seed", self.seed, 0 <= self.seed < 2**64, "0 to 2**64 - 1")
        _check("accept-rule", self.accept_rule, self.accept_rule in ("leviathan", "coupled"), "leviathan or coupled")
        _check("stop", self.stop, all(self.stop), "non-empty strings")


def _check(name: str, got: object, good: bool, expected: str) -> None:
    if not good:
        raise UsageError(f"{name}: got {got!r}, expected {expected}")
