"""What `sample --record` costs: the same speculative decoding with a trace and without, interleaved.

Both are cut where test_decode.py cuts: the prompt, the header and the first step stay outside the clock. The time spent
in the recorder itself is taken beside it, since the difference of two decodings is mostly noise.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import Pair, load_pair
from posttrainllm.adapters.replay.describe import fingerprints_of
from posttrainllm.adapters.replay.reading import read_trace
from posttrainllm.adapters.replay.writer import TraceWriter
from posttrainllm.adapters.rows import RowRequest
from posttrainllm.adapters.shapes import capacity_for
from posttrainllm.evals.accept_rate import HELD_OUT, read_prompts

_K = 4
_PROMPT_TOKENS = 64
_NEW_TOKENS = 128


def test_recording(pytestconfig: pytest.Config, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """It fails when recording changes an id or leaves a step out, never for being slow."""
    pair, file = load_pair(), tmp_path / "trace.jsonl"
    fingerprints = fingerprints_of(pair)
    texts = [text for text, _ in read_prompts(HELD_OUT)][: pytestconfig.getoption("--repeats")]
    prompts = [pair.tokenizer.encode(text)[:_PROMPT_TOKENS] for text in texts]
    _finish(_begin(pair, prompts[0])[0], None)  # compiles
    shares, ratios = [], []
    for index, prompt in enumerate(prompts):
        for recorded in (False, True) if index % 2 else (True, False):
            if recorded:
                with TraceWriter(file) as writer:
                    engine, request = _begin(pair, prompt)
                    writer.begin(engine, 0, request, fingerprints=fingerprints)
                    with_trace = _finish(engine, writer)
            else:
                without = _finish(_begin(pair, prompt)[0], None)
        assert with_trace[0] == without[0]
        assert [number for step in read_trace(file).steps for number in step.emitted] == with_trace[0]
        shares.append(with_trace[2] / with_trace[1])
        ratios.append(with_trace[1] / without[1])
    record_property(
        "recording",
        {
            "share_of_decode": round(statistics.median(shares), 5),
            "share_range": [round(min(shares), 5), round(max(shares), 5)],
            "decode_time_ratio": round(statistics.median(ratios), 4),
            "decode_time_ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
            "prompts": len(prompts),
        },
    )


def _begin(pair: Pair, prompt: Sequence[int]) -> tuple[Engine, RowRequest]:
    limit = len(prompt) + _NEW_TOKENS
    engine = Engine(pair, capacity=capacity_for(limit, _K + 1), width=_K + 1)
    request = RowRequest(prompt=prompt, limit=limit, draft_k=_K)
    engine.insert(0, request)
    return engine, request


def _finish(engine: Engine, writer: TraceWriter | None) -> tuple[list[int], float, float]:
    """The ids, the seconds behind the first step, and those of them that the recorder took."""
    ids: list[int] = []
    spent = started = 0.0
    while len(ids) < _NEW_TOKENS:
        step = engine.step()[0]
        if writer is not None:
            before = time.perf_counter()
            writer.step(step)
            spent += time.perf_counter() - before
        ids += step.tokens
        if not started:
            started, spent = time.perf_counter(), 0.0
    return ids, time.perf_counter() - started, spent
