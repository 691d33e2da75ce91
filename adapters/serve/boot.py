"""From options to an engine that can answer."""

import hashlib
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from posttrainllm.adapters.adaptive import Curve, choices_up_to
from posttrainllm.adapters.costs import CostShape, curves_for
from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.gate.heed import AGAIN
from posttrainllm.adapters.gate.paths import Shape
from posttrainllm.adapters.gate.standing import GateMode, Standing, boot_standing, full_standing
from posttrainllm.adapters.loading.changes import ModelChanges
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.adapters.match.auto import load_chosen
from posttrainllm.adapters.params import AcceptRule
from posttrainllm.adapters.replay.describe import fingerprints_of
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.runtime import LOGGER
from posttrainllm.adapters.serve.admission import Admission
from posttrainllm.adapters.serve.idle_gate import FullGate
from posttrainllm.adapters.serve.recordings import Recordings
from posttrainllm.adapters.serve.scheduler import Scheduler
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.kernel.config import Mode
from posttrainllm.kernel.errors import GateError, UsageError

__all__ = ["ServeOptions", "Served", "boot"]

_DEFAULT_CONTEXT = 4096
_BODY_BYTES, _BODY_BYTES_A_TOKEN = 2**20, 64  # 1.25 MiB for a context of 4096


@attrs.frozen(kw_only=True)
class ServeOptions:
    """The command line, checked as far as it can be before a model is loaded."""

    model: str | None
    draft_model: str | None
    speculate: bool
    draft_k: DraftLength
    dtype: str
    forward: str
    changes: ModelChanges
    accept_rule: AcceptRule
    slots: int
    max_context: int | None
    max_tokens_limit: int | None
    queue: int
    prefix_cache_mb: int | None
    """In MiB; None is what the engine can spare."""
    gate: GateMode
    api_key: str | None = attrs.field(repr=False)
    served_model_name: str | None
    request_timeout_s: float | None
    body_timeout_s: float
    record_dir: Path | None


@attrs.frozen(kw_only=True)
class Served:
    """What a started engine answers with."""

    scheduler: Scheduler
    settings: ServeSettings


def boot(options: ServeOptions) -> Served:
    """Load the models, ask the gate, compile the first steps. All of MLX's work is done on the thread that calls this.

    Args:
        options: of the command.

    Returns:
        The scheduler, which has nothing to do yet, and what requests are held against.

    Raises:
        GateError: --gate strict, and the verdict is not `identical`.
        PosttrainllmError: the models cannot be served.
    """
    pair, draft_k = load_chosen(
        options.model,
        options.draft_model,
        speculate=options.speculate,
        dtype=options.dtype,
        forward=options.forward,
        changes=options.changes,
        draft_k=options.draft_k,
        rows=options.slots,
        context=options.max_context or _DEFAULT_CONTEXT,
        say=LOGGER.info,
        tell=LOGGER.info,
    )
    if options.gate == "strict" and pair.draft is None:
        raise UsageError("--gate strict: got no draft model, expected one: there is nothing to gate")
    context = _context(pair, options.max_context)
    most = draft_k.on(pair.runtime.device)
    width = most + 1 if pair.draft is not None else 1
    shape = Shape(rows=options.slots, capacity=capacity_for(context, width), draft_k=most)
    if draft_k.auto and pair.draft is not None:
        shape = attrs.evolve(shape, curves=_curves(pair, shape))
    for note in (pair.forwards, *pair.notes):
        LOGGER.info("%s", note)
    if not pair.tokenizer.has_chat_template:
        LOGGER.info("the checkpoint has no chat template; a plain User/Assistant one is used")
    standing, unfinished = boot_standing(pair, shape, options.gate, progress=_Progress())
    if options.gate == "strict" and standing.verdict != "identical":
        raise GateError(f"--gate strict: got {standing.verdict}, expected identical: {standing.reason or 'see `gate`'}")
    full_gate: FullGate | None = None
    if unfinished:
        full_gate = partial(full_standing, pair, shape)
    if pair.draft is not None and not standing.enabled:
        LOGGER.warning("speculation is switched off: %s %s", standing.reason, AGAIN)
    if standing.unkept is not None:
        LOGGER.warning("the verdict is not kept: %s", standing.unkept)

    shared: dict[str, Any] = {
        "rows": options.slots,
        "capacity": shape.capacity,
        "prefix_bytes": None if options.prefix_cache_mb is None else options.prefix_cache_mb * 2**20,
    }

    def engine_for(standing: Standing) -> Engine:
        if pair.draft is None or standing.enabled:
            return Engine(pair, width=width, curves=shape.curves, **shared)
        return Engine(pair.plain(standing.reason or "broken"), width=1, **shared)

    fingerprints = fingerprints_of(pair)
    scheduler = Scheduler(
        engine_for,
        standing,
        Admission(slots=options.slots, queue=options.queue),
        recordings=Recordings(options.record_dir, fingerprints),
        full_gate=full_gate,
    )
    LOGGER.info("%s", scheduler.engine.forecast.description)
    _warm_up(scheduler.engine, coupled=options.accept_rule == "coupled")
    return Served(scheduler=scheduler, settings=_settings(options, pair, context, shape, fingerprints))


def _curves(pair: Pair, shape: Shape) -> dict[Mode, Curve]:
    """What steps cost in the server's shapes."""
    costs = CostShape(
        rows=shape.rows, capacity=shape.capacity, width=shape.width, draft_ks=choices_up_to(shape.draft_k)
    )
    LOGGER.info("--draft-k auto: what steps cost is read from the user's cache, or measured now")
    return curves_for(pair, costs, ("greedy", "sampled"))


def _context(pair: Pair, asked: int | None) -> int:
    most = pair.target.context
    if asked is None:
        return min(most, _DEFAULT_CONTEXT)
    if asked > most:
        raise UsageError(f"--max-context: got {asked}, expected at most the model's {most}")
    return asked


def _settings(
    options: ServeOptions, pair: Pair, context: int, shape: Shape, fingerprints: dict[str, str]
) -> ServeSettings:
    depends_on: dict[str, Any] = {
        **fingerprints,
        **pair.runtime.versions,
        "device": [pair.runtime.device, pair.runtime.device_name, pair.runtime.blas, pair.runtime.compiled],
        "dtype": pair.target.dtype,
        "forwards": pair.forwards,
        # with the costs that `auto` chooses K by: under `leviathan` K decides which ids are drawn
        "shape": attrs.asdict(shape),
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    name = options.served_model_name or pair.target.label
    return ServeSettings(
        name=name,
        other_names=(pair.target.name,) if options.served_model_name is None else (),
        context=context,
        longest_text=context * max(map(len, pair.tokenizer.vocabulary.values())),
        max_body_bytes=_BODY_BYTES + _BODY_BYTES_A_TOKEN * context,
        max_tokens=min(options.max_tokens_limit or context, context),
        accept_rule=options.accept_rule,
        vocab_size=pair.vocab_size,
        prompt_vocab_size=pair.target.vocab_size,
        api_key=options.api_key,
        request_timeout_s=options.request_timeout_s,
        body_timeout_s=options.body_timeout_s,
        created=int(time.time()),
        fingerprint=f"fp_{digest[:12]}",
    )


def _warm_up(engine: Engine, *, coupled: bool) -> None:
    """Trace and compile the steps that most requests take, before the first one waits for them."""
    engine.warm_up(coupled=coupled)
    for temperature in (0.0, 1.0):
        request = RowRequest(prompt=(0, 0), limit=4, temperature=temperature, coupled=coupled, draft_k=engine.width - 1)
        engine.insert(0, request)
        engine.step()
        engine.release(0)


class _Progress:
    """Says once what the gate does before the server answers, since that can take minutes."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._said:
            self._said = True
            LOGGER.info("gate: decoding prompts with the draft and without, before the server answers")
