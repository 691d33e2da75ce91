"""What a request asks for, with every value checked."""

import numbers
import secrets
from typing import Any, Literal, TypeAlias

import attrs

from posttrainllm.kernel.errors import UsageError

__all__ = ["MAX_DRAFT_K", "AcceptRule", "SamplingParams", "check_width", "is_int", "is_text"]

AcceptRule: TypeAlias = Literal["leviathan", "coupled"]
MAX_DRAFT_K = 32  # the window is a static shape, and no pair pays beyond a few tokens


def _fresh_seed() -> int:
    return secrets.randbits(53)  # every JSON reader can hold it


def _plain(value: Any) -> Any:
    """A number of numpy's, say, as Python's own: MLX and JSON take no other."""
    if is_int(value):
        return int(value)
    return float(value) if _is_number(value) else value


def is_text(value: object) -> bool:
    """Whether it is text that can be written: not empty, and no half of a surrogate pair."""
    return isinstance(value, str) and value != "" and value.encode("utf-8", "ignore").decode() == value


def _as_tuple(stop: Any) -> Any:
    """A text alone is one stop, not one for each of its characters."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else stop


@attrs.frozen(kw_only=True)
class SamplingParams:
    """One request's options; a bad value raises UsageError with got and expected."""

    max_tokens: int = attrs.field(default=128, converter=_plain)
    """Ids to emit at most; cut to what the context holds."""
    temperature: float = attrs.field(default=0.0, converter=_plain)
    """0 is greedy."""
    top_p: float = attrs.field(default=1.0, converter=_plain)
    top_k: int = attrs.field(default=0, converter=_plain)
    """0 keeps all."""
    min_p: float = attrs.field(default=0.0, converter=_plain)
    seed: int = attrs.field(factory=_fresh_seed, converter=_plain)
    """0 to 2**64 - 1; fresh entropy unless given."""
    accept_rule: AcceptRule = "leviathan"
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    """Texts that end the reply; one text may stand alone."""
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
        _check("max-tokens", self.max_tokens, is_int(self.max_tokens) and self.max_tokens >= 1, "1 or more")
        # below, logits / temperature leaves float32; nobody can tell such a draw from a greedy one
        warm = _is_number(self.temperature) and (self.temperature == 0 or 1e-4 <= self.temperature <= 1e4)
        _check("temperature", self.temperature, warm, "0, or 0.0001 to 10000")
        _check("top-p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "more than 0, at most 1")
        _check("top-k", self.top_k, is_int(self.top_k) and 0 <= self.top_k < 2**31, "0 (off) or more")
        _check("min-p", self.min_p, _is_number(self.min_p) and 0 <= self.min_p <= 1, "0 to 1")
        _check("seed", self.seed, is_int(self.seed) and 0 <= self.seed < 2**64, "0 to 2**64 - 1")
        _check("accept-rule", self.accept_rule, self.accept_rule in ("leviathan", "coupled"), "leviathan or coupled")
        texts = isinstance(self.stop, tuple) and all(map(is_text, self.stop))
        _check("stop", self.stop, texts, "texts that are not empty")
        _check("ignore-eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "true or false")


def is_int(value: object) -> bool:
    """Whether it is a whole number, of Python or numpy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check(name: str, got: object, good: bool, expected: str) -> None:
    if not good:
        raise UsageError(f"--{name}: got {got!r}, expected {expected}")


def check_width(name: str, got: Any, least: int, most: int) -> int:
    """Refuse a draft length or a width out of range.

    Args:
        name: the option's, without dashes.
        got: its value.
        least: smallest that works.
        most: largest that works.

    Returns:
        The value.

    Raises:
        UsageError: with got and expected.
    """
    _check(name, got, is_int(got) and least <= got <= most, f"{least} to {most}")
    return int(got)
