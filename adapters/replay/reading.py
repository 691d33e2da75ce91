"""A file to a trace. Whatever is wrong with it is one line: the number of the line, got and expected.

Only the form is held against expectations here: that the tokens are the run's is what a replay finds out.
"""

import itertools
from pathlib import Path

from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.loading.changes import KV_BITS, KV_GROUP_SIZES
from posttrainllm.adapters.loading.pair import DTYPES
from posttrainllm.adapters.params import MAX_DRAFT_K, SamplingParams, is_int
from posttrainllm.adapters.replay.trace import FORMAT, Header, StepRecord, Trace
from posttrainllm.adapters.replay.trace_line import TraceLine, are_numbers, is_printable, json_object
from posttrainllm.kernel.errors import CapacityError, TraceError, UsageError

__all__ = ["read_trace"]

_WORD = 2**32 - 1
_MOST = 2**31 - 1
_MODES = ("greedy", "sampled", "filtered")
_ADJUSTMENTS = ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty")


def read_trace(path: str | Path) -> Trace:
    """Read a trace; a last line that breaks off, as after a kill, is left out.

    Args:
        path: the file.

    Returns:
        The trace.

    Raises:
        TraceError: the file cannot be read or is no trace; the text names the line.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _parse(str(path), data)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _parse(path: str, data: bytes) -> Trace:
    lines = data.split(b"\n")
    whole = lines[-1] == b""  # a line ends in a newline
    lines = lines[:-1] if whole else lines
    if not lines:
        raise TraceError("got an empty file, expected a trace")
    torn = None
    if not whole and json_object(lines[-1]) is None:
        torn, lines = len(lines), lines[:-1]
    if not lines:
        raise TraceError("line 1: got a header that breaks off, expected a whole one")
    header = _header(TraceLine(1, lines[0]))
    steps: list[StepRecord] = []
    end = None
    for number, text in enumerate(lines[1:], 2):
        line = TraceLine(number, text)
        if end is not None:
            raise TraceError(f"line {number}: got a line behind the end, expected none")
        if "end" in line.value:
            end = line.one_of("end", ("length", "stop", "cancelled"))
            if end != "cancelled":
                line.integer("steps", len(steps), len(steps))
        else:
            steps.append(_step(line, header, len(steps)))
    return Trace(path=path, header=header, steps=tuple(steps), end=end, torn=torn)


def _header(line: TraceLine) -> Header:
    line.one_of("trace", ("posttrainllm",))
    line.integer("format", FORMAT, FORMAT)
    shapes, step, sampling = line.nested("shapes"), line.nested("step"), line.nested("sampling")
    models = line.texts("models", "target", optional=True)
    names = ("target", "draft") if "draft" in models else ("target",)
    width, rows = shapes.integer("W", len(names), MAX_DRAFT_K + 1), shapes.integer("B", 1, _MOST)
    capacity, vocab_size = shapes.integer("C", width + 2, _MOST), line.integer("vocab_size", 1, _MOST)
    drafted = width - 1 if "draft" in models else 0
    line.integer("K", drafted, drafted)
    limit = line.integer("limit", 2, capacity - 1)
    values = {
        name: sampling.take(name, lambda _: True, "a number") for name in ("temperature", "top_p", "top_k", "min_p")
    }
    values |= {name: sampling.value[name] for name in _ADJUSTMENTS if name in sampling.value}
    rule, seed = line.one_of("accept_rule", ("leviathan", "coupled")), line.integer("seed", 0, 2**64 - 1)
    try:
        params = SamplingParams(**values, seed=seed, accept_rule=rule)
        params.check_ids(vocab_size)
    except (CapacityError, UsageError) as error:
        raise TraceError(f"line {line.number}: sampling: {error}") from None
    adapters = line.texts("adapters") if "adapters" in line.value else {}
    strange = [name for name in adapters if name not in names]
    if strange:
        line.refuse("adapters", strange[0], f"those of {' and '.join(names)}")
    return Header(
        versions=line.texts("versions", "posttrainllm", "mlx", "mlx-lm"),
        device=line.text("device"),
        device_name=line.text("device_name"),
        blas=line.take("blas", lambda got: got is None or is_printable(got), "text or null"),
        compiled=line.flag("compiled"),
        dtype={name: line.nested("dtype").one_of(name, DTYPES[1:]) for name in names},
        models=models,
        fingerprints=line.texts("fingerprints", *names, *(f"{name} adapter" for name in adapters), "tokenizer"),
        vocab_size=vocab_size,
        rows=rows,
        row=line.integer("row", 0, rows - 1),
        capacity=capacity,
        width=width,
        chunk=shapes.integer("prefill_chunk", 1, 2**16),
        mode=step.one_of("mode", _MODES),
        narrow_draft=step.flag("narrow_draft"),
        diagnostics=step.flag("diagnostics"),
        accept_rule=rule,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        draft_k=sampling.integer("draft_k", 0, width - 1),
        seed=seed,
        key=line.integers("key", 2, 2, _WORD + 1),
        prompt=line.integers("prompt", 1, limit - 1, _MOST),
        limit=limit,
        variants=line.texts("variants", *names) if "variants" in line.value else {},
        **{name: getattr(params, name) for name in _ADJUSTMENTS},
        request_id=line.text("request_id") if "request_id" in line.value else None,
        adapters=adapters,
        kv_packing=_packing(line.nested("kv")) if "kv" in line.value else None,
        auto=_curve(line.nested("auto"), drafted) if "auto" in line.value and drafted else None,
    )


def _packing(line: TraceLine) -> tuple[int, ...]:
    """Bits and group size of quantised keys and values."""

    def one_of(name: str, known: tuple[int, ...]) -> int:
        return int(line.take(name, lambda got: is_int(got) and got in known, f"one of {', '.join(map(str, known))}"))

    return one_of("bits", KV_BITS), one_of("group_size", KV_GROUP_SIZES)


def _curve(line: TraceLine, most: int) -> Curve:
    """What K was chosen by."""
    draft_ks = line.integers("draft_ks", 1, most + 1, most + 1)
    if draft_ks[0] != 0 or any(low >= high for low, high in itertools.pairwise(draft_ks)):
        line.refuse("draft_ks", list(draft_ks), "rising numbers from 0 on")
    positive = "seconds, more than 0"
    seconds = line.take("seconds", lambda got: are_numbers(got, len(draft_ks)) and min(got) > 0, f"{positive}, one a K")
    plain = line.take("plain_seconds", lambda got: are_numbers([got], 1) and got > 0, positive)
    return Curve(draft_ks=draft_ks, seconds=tuple(map(float, seconds)), plain_seconds=float(plain))


def _step(line: TraceLine, header: Header, index: int) -> StepRecord:
    K, vocab_size = header.proposals, header.vocab_size
    line.integer("step", index, index)
    length = line.integer("length", len(header.prompt), header.limit)
    emitted = line.integers("emitted", 0, min(header.width, header.limit - length), vocab_size)
    margins = None
    if "margins" in line.value:
        margins = line.take("margins", lambda got: are_numbers(got, len(emitted)), f"{len(emitted)} numbers")
    choices = (K,) if header.auto is None else header.auto.draft_ks
    drawn = K
    if header.auto is not None:  # True and 2.0 are equal to choices, and are none
        drawn = int(line.take("drawn", lambda got: is_int(got) and got in choices, f"one of {list(choices)}"))
    return StepRecord(
        step=index,
        length=length,
        # the last token of a prompt may be an id that is never emitted
        window=line.integers("window", header.width, header.width, _MOST),
        proposals=line.integers("proposals", K, K, vocab_size),
        proposed=line.integer("proposed", 0, K),
        accepted=line.integer("accepted", 0, K),
        emitted=emitted,
        key=line.integers("key", 2, 2, _WORD + 1),
        margins=None if margins is None else tuple(map(float, margins)),
        finite=line.flag("finite") if "finite" in line.value else True,
        mode=line.one_of("mode", _MODES) if "mode" in line.value else header.mode,
        narrow_draft=line.flag("narrow_draft") if "narrow_draft" in line.value else header.narrow_draft,
        draft_k=header.draft_k if header.auto is None else line.integer("draft_k", 0, drawn),
        drawn=drawn,
    )
