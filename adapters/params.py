"""What a request asks for, with every value checked."""

import numbers
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from posttrainllm.adapters.checks import check_ids
from posttrainllm.kernel.errors import UsageError

__all__ = ["MAX_DRAFT_K", "MAX_LOGPROBS", "AcceptRule", "SamplingParams", "check_width", "is_int", "is_text"]

AcceptRule: TypeAlias = Literal["leviathan", "coupled"]
MAX_LOGPROBS = 20
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


def _as_pairs(bias: Any) -> Any:
    """A mapping, or pairs, as a tuple of pairs with numbers of Python's own."""
    pairs = () if bias is None else bias.items() if isinstance(bias, Mapping) else bias
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        return bias
    pairs = tuple(tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in pairs)
    return tuple(
        (_plain(pair[0]), _plain(pair[1])) if isinstance(pair, tuple) and len(pair) == 2 else pair for pair in pairs
    )


def _as_ids(ids: Any) -> Any:
    if ids is None:
        return ()
    return tuple(map(_plain, ids)) if isinstance(ids, (list, tuple, set, frozenset)) else ids


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
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_as_pairs)
    """Ids and what is added to their logits, -100 to 100; given as a mapping or as pairs."""
    presence_penalty: float = attrs.field(default=0.0, converter=_plain)
    """-2 to 2: subtracted from the logits of ids that were generated."""
    frequency_penalty: float = attrs.field(default=0.0, converter=_plain)
    """-2 to 2: subtracted once for each time that an id was generated."""
    repetition_penalty: float = attrs.field(default=1.0, converter=_plain)
    """0.01 to 10: positive logits of ids in prompt or output are divided by it, the others by its inverse; 1 is off."""
    logprobs: int | None = attrs.field(default=None, converter=_plain)
    """How many alternatives to report beside each id's log probability, 0 to 20; None reports none of it."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_ids)
    """Ids that end the reply as the end of text does, also with ignore_eos."""

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
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        pairs = isinstance(self.logit_bias, tuple) and all(map(_is_bias, self.logit_bias))
        _check("logit-bias", self.logit_bias, pairs, "token ids, each with a number from -100 to 100")
        once = len({index for index, _ in self.logit_bias}) == len(self.logit_bias)
        _check("logit-bias", self.logit_bias, once, "no token id twice")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _check(f"{name}-penalty", value, _is_number(value) and -2 <= value <= 2, "-2 to 2")
        penalty = self.repetition_penalty
        # further out a logit leaves float32, or every other id is out of reach
        _check("repetition-penalty", penalty, _is_number(penalty) and 0.01 <= penalty <= 10, "0.01 to 10; 1 is off")
        asked = self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        _check("logprobs", self.logprobs, asked, f"0 to {MAX_LOGPROBS}")
        ids = isinstance(self.stop_token_ids, tuple) and all(is_int(i) and i >= 0 for i in self.stop_token_ids)
        _check("stop-token-ids", self.stop_token_ids, ids, "token ids, 0 or more")

    def check_ids(self, vocab_size: int) -> None:
        """Refuse token ids that the model never emits.

        Args:
            vocab_size: ids that may be emitted.

        Raises:
            CapacityError: naming the id and the size.
        """
        check_ids("--logit-bias", [index for index, _ in self.logit_bias], vocab_size)
        check_ids("--stop-token-ids", self.stop_token_ids, vocab_size)

    @property
    def described(self) -> dict[str, Any]:
        """Every option but the seed and the accept rule, by name; what few requests use only where it is used."""
        rare = {field.name: field.default for field in attrs.fields(type(self)) if field.name in _RARE}
        options = attrs.asdict(self, filter=attrs.filters.exclude("seed", "accept_rule"))
        return {name: value for name, value in options.items() if name not in rare or value != rare[name]}


_RARE = {
    *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "stop_token_ids"),
}


def is_int(value: object) -> bool:
    """Whether it is a whole number, of Python or numpy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_bias(pair: object) -> bool:
    """Whether it is a token id with a bias."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return is_int(pair[0]) and pair[0] >= 0 and _is_number(pair[1]) and -100 <= pair[1] <= 100


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
