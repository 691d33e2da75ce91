"""One gate run: decode every prompt three ways, draw, probe, judge."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import mlx.core as mx

from posttrainllm.adapters.batch import decode
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate import kl
from posttrainllm.adapters.gate.findings import Divergence, Findings, GateResult, PathResult
from posttrainllm.adapters.gate.paths import PATHS, GatedPath
from posttrainllm.adapters.gate.plan import Plan
from posttrainllm.adapters.gate.probes import MOST_CACHES, histories, probe
from posttrainllm.adapters.gate.trace import write_trace
from posttrainllm.adapters.gate.verdict import beyond_limit, first_difference, judge, worst
from posttrainllm.adapters.loading.memory import check_room
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.rows import RowRequest, RowStep

__all__ = ["Progress", "run_gate"]

Runs: TypeAlias = list[list[RowStep]]
Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is decoded, and how many ids of how many."""


def run_gate(
    pair: Pair,
    planned: Plan,
    *,
    paths: Sequence[GatedPath] = PATHS,
    progress: Progress = lambda what, done, total: None,
    trace_file: Path | None = None,
) -> GateResult:
    """Run every path and judge it.

    Args:
        pair: the models that `planned` was made for.
        planned: from `plan`.
        paths: what is gated.
        progress: told after each step, prefill and forward. What it raises ends the run, and nothing is left of it.
        trace_file: where a broken path's first divergence is recorded; None records nothing.

    Returns:
        Verdicts, differences, laws and probes.

    Raises:
        MemoryLimitError: the caches cannot fit; of the probes' it is said before anything is decoded.
        NonFiniteError: the target's logits were not finite.
    """
    assert pair.draft is not None, "plan() refuses a pair without a draft"
    started = time.perf_counter()
    shape = planned.shape
    check_room(
        MOST_CACHES * shape.rows * pair.target.kv_bytes(shape.capacity),
        f"the gate's probes ({MOST_CACHES} caches of the target at B={shape.rows}, C={shape.capacity})",
    )
    results = tuple(_run_path(pair, planned, path, progress, trace_file) for path in paths)
    return GateResult(
        verdict=worst([result.verdict for result in results]),
        model=pair.target.label,
        draft_model=pair.draft.label,
        seconds=time.perf_counter() - started,
        paths=results,
    )


@attrs.frozen(kw_only=True)
class _Runs:
    """The steps of every request, decoded in every way."""

    greedy: Runs
    coupled: Runs
    drawn: Runs
    reference: Runs
    reference_coupled: Runs
    usual: Runs


def _decode_all(pair: Pair, planned: Plan, path: GatedPath, progress: Progress) -> _Runs:
    shape, width = planned.shape, planned.shape.width

    def decoded(engine: Engine, requests: Sequence[RowRequest], what: str, *, gated: bool = False) -> Runs:
        # logits of the path alone that are not finite are its fault, those of plain decoding are the model's
        return decode(engine, requests, advance=_Counter(what, requests, progress), ends_at_non_finite=gated)

    # one engine at a time: each has caches of its own
    engine = path.candidate(pair, shape)
    greedy = decoded(engine, planned.requests, "T=0, with the draft", gated=True)
    coupled = decoded(engine, planned.coupled, "T=1, coupled, with the draft", gated=True)
    drawn = decoded(engine, planned.drawn, "T=1, leviathan, with the draft", gated=True)
    del engine
    mx.clear_cache()  # what MLX keeps for reuse looks taken to the forecast of the next engine
    engine = path.reference(pair, shape)
    reference = decoded(engine, planned.requests, f"T=0, plain at width {width}")
    reference_coupled = decoded(engine, planned.coupled, f"T=1, plain at width {width}")
    del engine
    mx.clear_cache()
    usual = decoded(path.usual(pair, shape), planned.requests, "T=0, plain at width 1")
    return _Runs(
        greedy=greedy,
        coupled=coupled,
        drawn=drawn,
        reference=reference,
        reference_coupled=reference_coupled,
        usual=usual,
    )


def _run_path(pair: Pair, planned: Plan, path: GatedPath, progress: Progress, trace_file: Path | None) -> PathResult:
    shape, runs = planned.shape, _decode_all(pair, planned, path, progress)

    def forwarded(done: int) -> Callable[[], None]:
        return lambda: progress("laws and probes", done, 2)

    forwarded(0)()
    texts = [[*request.prompt, *_ids(steps)] for request, steps in zip(planned.requests, runs.reference, strict=True)]
    places, positions = kl.positions_in_law(pair, shape, planned.drawn, runs.drawn, advance=forwarded(0))
    context = min(pair.target.context, shape.capacity - 1)
    findings = Findings(
        prompts=len(planned.requests),
        reference_differences=_compare(pair, planned, planned.requests, runs.reference, runs.greedy, runs.reference),
        usual_differences=_compare(pair, planned, planned.requests, runs.usual, runs.greedy, runs.reference),
        coupled_prompts=len(planned.coupled),
        coupled_differences=_compare(pair, planned, planned.coupled, runs.reference_coupled, runs.coupled, None),
        laws=kl.compare(places, positions, shape.width),
        drawn=len(planned.drawn),
        drawn_short=sum(map(_is_short, planned.drawn, runs.drawn)),
        probes=probe(pair, histories(texts, shape, context), shape, advance=forwarded(1)),
        accepted=sum(step.accepted for steps in runs.greedy for step in steps),
        proposed=sum(step.proposed for steps in runs.greedy for step in steps),
    )
    forwarded(2)()
    verdict, reason = judge(path.title, findings)
    trace = None
    if verdict == "broken" and trace_file is not None:
        file = trace_file.with_stem(f"{trace_file.stem}-{path.name}")
        request = _culprit(planned, findings, runs.drawn)
        counter = _Counter("a trace of what broke", [request], progress)
        trace = write_trace(path.candidate(pair, shape), request, file, advance=counter)
    return PathResult(path=path.name, title=path.title, verdict=verdict, reason=reason, trace=trace, findings=findings)


def _compare(
    pair: Pair,
    planned: Plan,
    requests: Sequence[RowRequest],
    expected_runs: Runs,
    runs: Runs,
    margin_runs: Runs | None,
) -> tuple[Divergence, ...]:
    """The first difference of every prompt that has one; the margin is the reference's at that place."""
    found = []
    for number, (request, theirs, ours) in enumerate(zip(requests, expected_runs, runs, strict=True)):
        expected, got = _ids(theirs), _ids(ours)
        index = first_difference(expected, got)
        if index is None:
            continue
        margins = [margin for step in margin_runs[number] for margin in step.margins] if margin_runs is not None else []
        pair_of_ids = [ids[index] if index < len(ids) else None for ids in (expected, got)]
        names = ["" if token is None else pair.tokenizer.decode([token]) for token in pair_of_ids]
        found.append(
            Divergence(
                prompt=planned.prompts[number].id,
                position=len(request.prompt) + index,
                index=index,
                expected=pair_of_ids[0],
                got=pair_of_ids[1],
                expected_text=names[0],
                got_text=names[1],
                margin=margins[index] if index < len(margins) else None,
            )
        )
    return tuple(found)


def _culprit(planned: Plan, findings: Findings, drawn: Runs) -> RowRequest:
    """The request whose trace shows what broke: the first that differs, else one that was drawn, a short one first."""
    names = [prompt.id for prompt in planned.prompts]
    for requests, differences in (
        (planned.requests, findings.reference_differences),
        (planned.coupled, findings.coupled_differences),
    ):
        if differences:
            return requests[names.index(differences[0].prompt)]
    if findings.drawn_short or not all(law.holds for law in findings.laws):
        short = [request for request, steps in zip(planned.drawn, drawn, strict=True) if _is_short(request, steps)]
        return (short or list(planned.drawn))[0]
    return planned.requests[names.index(beyond_limit(findings)[0].prompt)]


def _is_short(request: RowRequest, steps: Sequence[RowStep]) -> bool:
    """Whether it ended before its limit."""
    return len(_ids(steps)) < request.limit - len(request.prompt)


def _ids(steps: Sequence[RowStep]) -> list[int]:
    return [index for step in steps for index in step.tokens]


class _Counter:
    """Adds up the ids of one decoding."""

    def __init__(self, what: str, requests: Sequence[RowRequest], progress: Progress) -> None:
        self._what, self._progress, self._done = what, progress, 0
        self._total = sum(request.limit - len(request.prompt) for request in requests)

    def __call__(self, emitted: int) -> None:
        self._done += emitted
        self._progress(self._what, self._done, self._total)
