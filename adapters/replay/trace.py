"""The records of a trace and the JSON they stand for; reading.py turns a file into them.

A trace is JSON lines: a header, one line a step, and an end when the run came to one. Each line is written whole before
the next step is read, so a killed run leaves all its steps but possibly the last. Steps count from 0.

    {"trace": "posttrainllm", "format": 1, "versions": {...}, "device": "cpu", ..., "prompt": [...], "limit": 47}
    {"step": 0, "length": 7, "window": [...], "proposals": [...], "proposed": 4, "accepted": 2, "emitted": [...], ...}
    {"end": "length", "steps": 16}

Under `--draft-k auto` the header has `auto`, the costs that K was chosen by, and each step its `draft_k`, what the
draft might propose to the row, and `drawn`, what it drew for all rows together. A step's line has `margins` where the
engine computed them, `finite` when it is false, and `mode` and `narrow_draft` when they are not the header's, as in a
row among others. A cancelled run's end has no count. `variants` names the forwards; a trace without them is an older
one, and takes those of here. The header's `sampling` has `logit_bias`, as pairs, and each penalty where the request
uses it, and the header a `request_id` where a server gave one; a trace without them reads as one of a request that
uses none. `adapters` and `kv` (bits and group size) are there where the models had any, and then `fingerprints` has the
adapters', too.
"""

from typing import Any

import attrs

from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.params import AcceptRule
from posttrainllm.kernel.config import Mode

__all__ = ["FORMAT", "Header", "StepRecord", "Trace"]

FORMAT = 1


@attrs.frozen(kw_only=True)
class Header:
    """What a run depends on. Mappings over the models have the names "target" and, where there is one, "draft"."""

    versions: dict[str, str]
    """Of posttrainllm, mlx and mlx-lm."""
    device: str
    device_name: str
    blas: str | None
    """With its threads; None on a GPU."""
    compiled: bool
    dtype: dict[str, str]
    models: dict[str, str | None]
    """Directories or ids of the hub, as they were given; None is the embedded one."""
    fingerprints: dict[str, str]
    """Of the models and the "tokenizer"."""
    vocab_size: int
    """Ids that may be emitted."""
    rows: int
    """B."""
    row: int
    """Which of the rows this is."""
    capacity: int
    """C."""
    width: int
    """W."""
    chunk: int
    """Tokens a prompt chunk."""
    mode: Mode
    narrow_draft: bool
    diagnostics: bool
    accept_rule: AcceptRule
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    draft_k: int
    """How many proposals the request asks for, K at most."""
    seed: int
    key: tuple[int, ...]
    """The root key of that seed, two 32-bit words."""
    prompt: tuple[int, ...]
    limit: int
    """Length, prompt included, at which the row stops."""
    variants: dict[str, str] = attrs.field(factory=dict)
    """Which forward computed each model; empty in an older trace."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    request_id: str | None = None
    """Of the server that decoded it."""
    adapters: dict[str, str] = attrs.field(factory=dict)
    """Directories or ids of the hub of the models' adapters, as they were given."""
    kv_packing: tuple[int, ...] | None = None
    """Bits and group size of quantised keys and values; None where they are not."""
    auto: Curve | None = None
    """What K was chosen by from step to step; None where it was the same in all."""

    @property
    def _adjustments(self) -> dict[str, Any]:
        """Bias and penalties where they are used."""
        penalties = {name: getattr(self, name) for name in _PENALTIES}
        bias = {"logit_bias": [list(pair) for pair in self.logit_bias]} if self.logit_bias else {}
        return bias | {name: value for name, value in penalties.items() if value != _PENALTIES[name]}

    @property
    def drafted(self) -> bool:
        """Whether a draft proposed."""
        return "draft" in self.models

    @property
    def proposals(self) -> int:
        """K: proposals of a step, 0 without a draft."""
        return self.width - 1 if self.drafted else 0

    def to_json(self) -> dict[str, Any]:
        """The header's line."""
        return {
            "trace": "posttrainllm",
            "format": FORMAT,
            **{name: getattr(self, name) for name in ("versions", "device", "device_name", "blas", "compiled")},
            **{name: getattr(self, name) for name in ("dtype", "models", "fingerprints", "vocab_size")},
            **({"variants": self.variants} if self.variants else {}),
            **({"adapters": self.adapters} if self.adapters else {}),
            **({} if self.kv_packing is None else {"kv": dict(zip(_PACKING, self.kv_packing, strict=True))}),
            "shapes": {"B": self.rows, "C": self.capacity, "W": self.width, "prefill_chunk": self.chunk},
            "row": self.row,
            "K": self.proposals,
            **({} if self.auto is None else {"auto": attrs.asdict(self.auto)}),
            "accept_rule": self.accept_rule,
            "step": {name: getattr(self, name) for name in ("mode", "narrow_draft", "diagnostics")},
            "sampling": {name: getattr(self, name) for name in _SAMPLING} | self._adjustments,
            **({} if self.request_id is None else {"request_id": self.request_id}),
            "seed": self.seed,
            "key": list(self.key),
            "limit": self.limit,
            "prompt": list(self.prompt),
        }


@attrs.frozen(kw_only=True)
class StepRecord:
    """One step of the row, as it was recorded."""

    step: int
    length: int
    window: tuple[int, ...]
    """The W ids that the target was fed."""
    proposals: tuple[int, ...]
    proposed: int
    accepted: int
    emitted: tuple[int, ...]
    key: tuple[int, ...]
    margins: tuple[float, ...] | None
    """Of the emitted ids; None where the engine computed none."""
    finite: bool
    mode: Mode
    narrow_draft: bool
    draft_k: int
    """How many ids the draft might propose to the row."""
    drawn: int
    """How many it drew; behind them the window holds id 0."""

    def to_json(self, header: Header) -> dict[str, Any]:
        """The step's line."""
        line: dict[str, Any] = attrs.asdict(self, filter=lambda field, value: field.name not in _SOMETIMES)
        if self.margins is not None:
            line["margins"] = self.margins
        if header.auto is not None:
            line |= {"draft_k": self.draft_k, "drawn": self.drawn}
        if not self.finite:
            line["finite"] = False
        line.update({name: getattr(self, name) for name in _CONFIG if getattr(self, name) != getattr(header, name)})
        return line


@attrs.frozen(kw_only=True)
class Trace:
    """What a file holds."""

    path: str
    header: Header
    steps: tuple[StepRecord, ...]
    end: str | None
    """Why the run ended; None when nothing says so: it was killed, or is still under way."""
    torn: int | None
    """Number of a last line that breaks off and was left out."""

    def line_of(self, step: int) -> int:
        """Number of a step's line in the file."""
        return step + 2


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "draft_k")
_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_PACKING = ("bits", "group_size")
_CONFIG = ("mode", "narrow_draft")
_SOMETIMES = ("margins", "finite", "draft_k", "drawn", *_CONFIG)
