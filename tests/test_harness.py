"""lm-eval's `local-completions` against a server of ours: the tasks of evals/harness, to the end.

What it is told is held against mlx-lm's own module, which shares neither the forward nor the HTTP side, and against our
Python API, which shares the forward.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from serving import ServerProcess

from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.facade import generate
from posttrainllm.adapters.loading.pair import embedded_path
from posttrainllm.adapters.prompt_logprobs import prompt_logprobs

ROOT = Path(__file__).parent.parent
HARNESS = ROOT / "evals" / "harness"
TASKS = ("posttrainllm_choice", "posttrainllm_line", "posttrainllm_text")
CONTEXT = 251
TOLERANCE = 1e-4  # of a log likelihood, of 600 at most: float32 sums in two orders, measured at 1.3e-5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: extra `eval`"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Samples by task, once with the draft and once with nothing proposed, of one server."""
    folder = tmp_path_factory.mktemp("harness")
    options = ("--gate", "off", "--slots", "2", "--max-context", str(CONTEXT))
    with ServerProcess(folder, *options) as server:
        found = {
            drafted: run_harness(server.url, folder / f"drafted-{drafted}", f"speculative={str(drafted).lower()}")
            for drafted in (True, False)
        }
        scraped = server.get("/metrics").text
    proposed = re.search(r"^posttrainllm_draft_proposed_tokens_total ([0-9.]+)", scraped, re.MULTILINE)
    assert float(proposed[1]) > 0
    return found


def run_harness(url: str, folder: Path, *gen_kwargs: str) -> dict[str, list[dict]]:
    """The command of evals/harness/README.md."""
    model = {
        "model": "target-16m",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(embedded_path("target-16m")),
        "max_length": CONTEXT,
        "num_concurrent": 2,
    }
    arguments = ["--model", "local-completions", "--include_path", str(HARNESS), "--tasks", ",".join(TASKS)]
    arguments += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    arguments += ["--gen_kwargs", *gen_kwargs, "--log_samples", "--output_path", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", *arguments],
        cwd=ROOT,  # the tasks name their data from here
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for task in TASKS:
        assert f"|{task}|" in done.stdout.replace(" ", "")
    return {task: samples_of(folder, task) for task in TASKS}


def samples_of(folder: Path, task: str) -> list[dict]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    data = (HARNESS / f"{task.removeprefix('posttrainllm_')}.jsonl").read_text(encoding="utf-8").splitlines()
    assert [row["doc"] for row in sorted(rows, key=lambda row: row["doc_id"])] == [json.loads(line) for line in data]
    return rows


def encoded(pair, prompt: str, choice: str) -> tuple[list[int], int]:
    """What lm-eval sends, and how much is not scored: spaces at the end of a prompt are scored with the choice."""
    context = pair.tokenizer.encode(prompt.rstrip())
    return context + pair.tokenizer.encode(prompt + choice)[len(context) :], len(context)


def logprobs_of(pair, ids):
    """Of every id but the first, in float32, by mlx-lm's module in one forward; and whether each is the likeliest."""
    logits = pair.target.module(mx.array([ids[:-1]]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    return own.tolist(), (own == logprobs.max(axis=-1)).tolist()


def test_the_likelihood_of_every_choice_is_that_of_mlx_lms_module(runs, embedded_pair):
    compared = 0
    for row in runs[True]["posttrainllm_choice"]:
        for (found, greedy), choice in zip(row["filtered_resps"], row["doc"]["choices"], strict=True):
            ids, context = encoded(embedded_pair, row["doc"]["prompt"], choice)
            own, likeliest = logprobs_of(embedded_pair, ids)
            assert float(found) == pytest.approx(sum(own[context - 1 :]), abs=TOLERANCE)
            assert (greedy in (True, "True")) == all(likeliest[context - 1 :])
            compared += 1
    assert compared == 64


def windows(ids, length):
    """As lm-eval cuts a text that is longer than the context: each id once, the last window with more in front."""
    edges = [*range(0, len(ids), length), len(ids)]
    for start, end in pairwise(edges):
        yield ids[max(end - length - 1, 0) : start], ids[start:end]


def test_the_likelihood_of_a_text_longer_than_the_context_is_that_of_its_windows(runs, embedded_pair):
    tokenizer = embedded_pair.tokenizer
    (beginning,) = tokenizer.eos_ids  # it has no token for the beginning of a text
    lengths = []
    for row in runs[True]["posttrainllm_text"]:
        ids = tokenizer.encode(row["doc"]["text"])
        lengths.append(len(ids))
        total = 0.0
        for context, scored in windows(ids, CONTEXT - 2):
            own, _ = logprobs_of(embedded_pair, [*(context or [beginning]), *scored])
            total += sum(own[-len(scored) :])
        assert float(row["filtered_resps"][0]) == pytest.approx(total, abs=TOLERANCE)
    assert max(lengths) > CONTEXT
    assert min(lengths) == 1


def test_the_python_api_scores_the_same(runs, embedded_pair):
    """By the same forward in the same chunks, so nearer: only the capacity differs."""
    engine = Engine(embedded_pair, rows=1, capacity=256, width=5)
    for row in runs[True]["posttrainllm_choice"][:4]:
        for (found, _), choice in zip(row["filtered_resps"], row["doc"]["choices"], strict=True):
            ids, context = encoded(embedded_pair, row["doc"]["prompt"], choice)
            scoring = prompt_logprobs(engine, ids)
            try:
                while True:
                    next(scoring)
            except StopIteration as end:
                scored = end.value
            assert float(found) == pytest.approx(sum(one.logprob for one in scored[context:]), abs=1e-5)


def test_every_line_and_every_score_is_the_same_with_the_draft_and_without(runs):
    for task in TASKS:
        drafted, plain = ([row["filtered_resps"] for row in runs[which][task]] for which in (True, False))
        assert drafted == plain
    assert len({row["filtered_resps"][0] for row in runs[True]["posttrainllm_line"]}) > 8


def test_the_lines_are_those_of_the_reference_of_the_python_api(runs, embedded_pair):
    """Plain decoding at the width of the verification, stopped where lm-eval stops."""
    for row in runs[True]["posttrainllm_line"]:
        plain = embedded_pair.plain("test")
        text = generate(pair=plain, prompt=row["doc"]["prompt"], plain_width=5, max_tokens=32, stop="\n").text
        assert row["filtered_resps"][0] == text
