"""A request and a step's result as the engine's rows see them, on the host."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.checks import check_ids
from posttrainllm.adapters.logprobs import read_logprobs
from posttrainllm.adapters.result import TokenLogprobs
from posttrainllm.kernel.config import Mode, Rules, StepConfig
from posttrainllm.kernel.state import Sampling, StepOutput

__all__ = [
    "RowPlace",
    "RowRequest",
    "RowStep",
    "needed_rules",
    "read_rows",
    "sampling_of",
    "smallest_mode",
    "wanted_logprobs",
]


@attrs.frozen(kw_only=True)
class RowRequest:
    """One request as a row of the engine sees it; values are checked by whoever made it."""

    prompt: Sequence[int]
    limit: int
    """Length, prompt included, at which the row stops."""
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_k: int = 0
    coupled: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Ids and what is added to their logits; no id twice."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    """How many alternatives to report beside each emitted id's log probability, 0 to 20; None reports none of it."""

    @property
    def adjusted(self) -> bool:
        """Whether its step needs bias or penalties."""
        penalised = self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1
        return penalised or bool(self.logit_bias)

    @property
    def mode(self) -> Mode:
        """The smallest step that serves it."""
        if self.temperature == 0:
            return "greedy"
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return "filtered" if filtered else "sampled"


@attrs.frozen(kw_only=True)
class RowPlace:
    """Where a row stands before a step."""

    length: int
    """Committed ids, prompt included."""
    last: int
    """The last of them, which has not been fed yet."""

    def after(self, step: "RowStep") -> "RowPlace":
        """Where it stands after the step."""
        if not step.tokens:
            return self
        return RowPlace(length=self.length + len(step.tokens), last=step.tokens[-1])


@attrs.frozen(kw_only=True)
class RowStep:
    """What one step did to one row, on the host."""

    tokens: tuple[int, ...]
    proposed: int
    accepted: int
    finite: bool
    margins: tuple[float, ...]
    """Top-2 logit margins of the emitted ids; empty unless the engine has diagnostics."""
    length: int = 0
    """Committed ids before the step, prompt included."""
    window: tuple[int, ...] = ()
    """The W ids that the target was fed: the last committed one, then the proposals or, without a draft, id 0."""
    key: tuple[int, ...] = ()
    """The row's root key, two 32-bit words, as the step saw it."""
    mode: Mode = "greedy"
    narrow_draft: bool = False
    draft_k: int = 0
    """How many ids the draft might propose to this row."""
    drawn: int = 0
    """How many it drew for every row; behind them the window holds id 0."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the emitted ids; empty unless the request asks for them."""


def smallest_mode(requests: Sequence[RowRequest | None]) -> Mode:
    """The step with the least work that serves all rows; None is an idle row."""
    modes = {request.mode for request in requests if request is not None}
    if "filtered" in modes:
        return "filtered"
    return "sampled" if "sampled" in modes else "greedy"


def needed_rules(requests: Sequence[RowRequest | None]) -> Rules:
    """The accept rules that rows at a temperature have; a greedy row serves under any."""
    coupled = {request.coupled for request in requests if request is not None and request.temperature > 0}
    if len(coupled) != 1:
        return "both"
    return "coupled" if coupled.pop() else "leviathan"


def wanted_logprobs(requests: Sequence[RowRequest | None]) -> dict[int, int]:
    """How many alternatives each row that asks for log probabilities wants, by row."""
    return {
        row: request.logprobs
        for row, request in enumerate(requests)
        if request is not None and request.logprobs is not None
    }


def sampling_of(requests: Sequence[RowRequest | None], vocab_size: int) -> Sampling:
    """The kernel's arrays for B rows; an idle row is greedy.

    Args:
        requests: one a row; None is an idle row.
        vocab_size: ids that may be emitted, the columns of the bias where a row has one.

    Returns:
        B rows.

    Raises:
        CapacityError: a bias is on an id that is never emitted.
    """
    idle = RowRequest(prompt=(), limit=0)
    rows = [request or idle for request in requests]
    return Sampling(
        temperature=mx.array([row.temperature for row in rows], dtype=mx.float32),
        top_k=mx.array([row.top_k for row in rows], dtype=mx.int32),
        top_p=mx.array([row.top_p for row in rows], dtype=mx.float32),
        min_p=mx.array([row.min_p for row in rows], dtype=mx.float32),
        draft_k=mx.array([row.draft_k for row in rows], dtype=mx.int32),
        coupled=mx.array([row.coupled for row in rows], dtype=mx.bool_),
        prompt_length=mx.array([len(row.prompt) for row in rows], dtype=mx.int32),
        presence_penalty=mx.array([row.presence_penalty for row in rows], dtype=mx.float32),
        frequency_penalty=mx.array([row.frequency_penalty for row in rows], dtype=mx.float32),
        repetition_penalty=mx.array([row.repetition_penalty for row in rows], dtype=mx.float32),
        bias=mx.array(_bias_of(rows, vocab_size)),
    )


def _bias_of(rows: Sequence[RowRequest], vocab_size: int) -> npt.NDArray[np.float32]:
    """Dense bias of B rows, no columns where none has one."""
    bias = np.zeros((len(rows), vocab_size if any(row.logit_bias for row in rows) else 0), dtype=np.float32)
    for index, row in enumerate(rows):
        check_ids("logit-bias", [index for index, _ in row.logit_bias], vocab_size)
        for token_id, value in row.logit_bias:
            bias[index, token_id] = value
    return bias


def read_rows(
    output: StepOutput,
    keys: mx.array,
    places: Mapping[int, RowPlace],
    config: StepConfig,
    wanted: Mapping[int, int] = MappingProxyType({}),
    *,
    draft_ks: Sequence[int],
) -> dict[int, RowStep]:
    """Take a step's result over to the host; this waits for it.

    Args:
        output: of B rows.
        keys: uint32 [B, 2], the root keys that the step saw.
        places: where the rows to read stood before it.
        config: the step's.
        wanted: of `wanted_logprobs`.
        draft_ks: how many ids the draft might propose to each of the B rows.

    Returns:
        What the step did to each of those rows.
    """
    tokens, emitted = np.array(output.tokens), np.array(output.emitted)
    proposed, accepted = np.array(output.proposed), np.array(output.accepted)
    finite, margin = np.array(output.finite), np.array(output.margin)
    proposals, roots = np.array(output.proposals), np.array(keys)
    own, tops, top_values = np.array(output.logprob), np.array(output.top_ids), np.array(output.top_logprobs)
    return {
        row: RowStep(
            tokens=tuple(tokens[row, : emitted[row]].tolist()),
            proposed=int(proposed[row]),
            accepted=int(accepted[row]),
            finite=bool(finite[row]),
            margins=tuple(margin[row, : emitted[row]].tolist()),
            length=place.length,
            window=(place.last, *proposals[row].tolist()),
            key=tuple(roots[row].tolist()),
            mode=config.mode,
            narrow_draft=config.narrow_draft,
            draft_k=draft_ks[row],
            drawn=config.proposals,
            logprobs=()
            if row not in wanted
            else read_logprobs(tokens[row, : emitted[row]].tolist(), own[row], tops[row], top_values[row], wanted[row]),
        )
        for row, place in places.items()
    }
