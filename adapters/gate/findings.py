"""What a gate run found: one record a path, written to the cache and read back."""

from types import NoneType
from typing import Any, Literal, TypeAlias

import attrs

__all__ = [
    "FALSE_ALARM",
    "MARGIN_FACTOR",
    "NO_NUMBER",
    "SEVERITY",
    "Divergence",
    "Findings",
    "ForwardCheck",
    "GateResult",
    "Law",
    "PathResult",
    "Probe",
    "Verdict",
]

Verdict: TypeAlias = Literal["identical", "width-identical", "broken"]
SEVERITY: tuple[Verdict, ...] = ("identical", "width-identical", "broken")
"""From good to bad."""
MARGIN_FACTOR = 4
"""A difference from width 1 is a near-tie when its margin is at most this many times the widths' logit difference. Two
logits that each move by d can swap from a margin of 2 d; the other factor of 2 is for positions that no probe saw."""
NO_NUMBER = 3.4e38
"""Stands for a logit difference that is no number, for which JSON has no word; nothing is a near-tie by it."""
FALSE_ALARM = 1e-6
"""Probability that a right `leviathan` rule is called broken, over the choice of seeds; kl.py derives it."""


@attrs.frozen(kw_only=True)
class Divergence:
    """The first place at which two continuations of a prompt differ."""

    prompt: str
    """Its id."""
    position: int
    """Absolute: 0 is the first id of the prompt."""
    index: int
    """Among the generated ids, from 0."""
    expected: int | None
    """None where the expected text ended before."""
    got: int | None
    expected_text: str
    got_text: str
    margin: float | None
    """Best logit minus second best of the reference there; None where it was not taken."""


@attrs.frozen(kw_only=True)
class Law:
    """One comparison of drawn ids with the target's exact law."""

    order: str
    """What the ids are ordered by: "p / q" or "q", p the target's and q the draft's probability."""
    place: int | None
    """Which id of a step, from 1 to K + 1; None for all together."""
    draws: int
    kl: float
    """Of the cells' frequencies from their probabilities, in nats."""
    epsilon: float
    """What a right path exceeds with the stated false-alarm probability."""

    @property
    def holds(self) -> bool:
        """Whether the law is not refuted."""
        return self.kl <= self.epsilon


@attrs.frozen(kw_only=True)
class Probe:
    """Largest logit difference that one change makes to the same token with the same history."""

    name: str
    change: str
    """What was changed, in words."""
    difference: float
    """In logits; 0 is bit-equal."""
    must_be_zero: bool
    """Whether exactness rests on it: shapes are the same on both sides."""


@attrs.frozen(kw_only=True)
class Findings:
    """Everything that decides one path's verdict."""

    prompts: int
    reference_differences: tuple[Divergence, ...]
    """T=0, against the reference: one a prompt that differs."""
    usual_differences: tuple[Divergence, ...]
    """T=0, the path against plain decoding at width 1: one a prompt that differs."""
    coupled_prompts: int
    coupled_differences: tuple[Divergence, ...]
    """T>0, `coupled`, against the reference with the same seeds."""
    laws: tuple[Law, ...]
    """T>0, `leviathan`."""
    drawn: int
    """Requests for the law."""
    drawn_short: int
    """How many of them ended before their limit."""
    probes: tuple[Probe, ...]
    accepted: int
    """At T=0."""
    proposed: int

    @property
    def margin_limit(self) -> float:
        """Largest margin that still counts as a near-tie between widths; 0 where their difference is no number."""
        difference = next(probe.difference for probe in self.probes if probe.name == "width")
        return MARGIN_FACTOR * difference if difference < NO_NUMBER else 0.0


@attrs.frozen(kw_only=True)
class PathResult:
    """One gated path's verdict, with all that it rests on."""

    path: str
    title: str
    verdict: Verdict
    reason: str
    """One line; where it is broken, it names the place."""
    trace: str | None
    """File that replays the first divergence; None where there is none."""
    findings: Findings

    @property
    def equal_width_1(self) -> int:
        """Prompts whose text equals that of plain decoding at width 1."""
        return self.findings.prompts - len(self.findings.usual_differences)


@attrs.frozen(kw_only=True)
class ForwardCheck:
    """A forward of our own held against mlx-lm's module on the same weights."""

    variant: str
    """Which forward."""
    difference: float
    """Largest difference of a logit, as a part of the largest logit."""
    limit: float
    """Largest one that is rounding."""

    @property
    def holds(self) -> bool:
        """Whether the two agree."""
        return self.difference <= self.limit


@attrs.frozen(kw_only=True)
class GateResult:
    """A whole run."""

    verdict: Verdict
    """The worst of the paths'."""
    model: str
    """Name of the target's directory, for people: the key has its hash."""
    draft_model: str
    seconds: float
    paths: tuple[PathResult, ...]
    forward: ForwardCheck | None = None
    """None where the target was not compared with mlx-lm's module."""

    def to_dict(self) -> dict[str, Any]:
        """As plain dictionaries and lists, for JSON."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "GateResult":
        """Read what `to_dict` wrote.

        Args:
            value: of JSON.

        Returns:
            The result.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """
        result = cls(
            verdict=_known(value["verdict"]),
            model=str(value["model"]),
            draft_model=str(value["draft_model"]),
            seconds=float(value["seconds"]),
            paths=tuple(map(_path, value["paths"])),
            forward=None if value.get("forward") is None else _record(ForwardCheck, value["forward"]),
        )
        verdicts = [path.verdict for path in result.paths]
        if result.verdict not in verdicts or max(map(SEVERITY.index, verdicts)) != SEVERITY.index(result.verdict):
            raise ValueError(f"verdict: got {result.verdict}, expected the worst of {verdicts}")
        if not all(any(probe.name == "width" for probe in path.findings.probes) for path in result.paths):
            raise ValueError("probes: got none of the width, expected one for every path")
        return result


def _path(value: dict[str, Any]) -> PathResult:
    known = {"verdict": _known(value["verdict"]), "findings": _findings(value["findings"])}
    result: PathResult = _record(PathResult, {**value, **known})
    return result


_PLAIN: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    int | None: (int, NoneType),
    float | None: (int, float, NoneType),
    str | None: (str, NoneType),
}


def _known(verdict: Any) -> Verdict:
    return SEVERITY[SEVERITY.index(verdict)]


def _findings(value: dict[str, Any]) -> Findings:
    kinds: dict[str, Any] = {
        **dict.fromkeys(("reference_differences", "usual_differences", "coupled_differences"), Divergence),
        "laws": Law,
        "probes": Probe,
    }
    lists = {name: tuple(_record(kind, entry) for entry in value[name]) for name, kind in kinds.items()}
    findings: Findings = _record(Findings, {**value, **lists})
    return findings


def _record(kind: type[Any], value: dict[str, Any]) -> Any:
    """Build a record whose plain fields have the types they declare: what is on disk may be anything."""
    for field in attrs.fields(kind):
        allowed = _PLAIN.get(field.type)
        if allowed is not None and not isinstance(value[field.name], allowed):
            raise TypeError(f"{field.name}: got {value[field.name]!r}, expected {field.type}")
    return kind(**value)
