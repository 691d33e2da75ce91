"""A server under mixed traffic for long: every row is freed, memory stays, and every answer is what it is alone.

How growth is measured: traffic stops after every fifth of the requests; once no row is taken and nothing waits,
/metrics is scraped nine times and the median taken, of the resident memory (process_resident_memory_bytes, Linux) and
of MLX's active memory (posttrainllm_memory_active_bytes). Growth is that after the last fifth by the least after any
other. At rest nothing of it is a neighbour's prompt on its way in, so 5 % are far more than the noise of such a
median: active memory at rest is weights, rows and kept prompts. Only a server that measures what its draft costs,
once, in an idle moment, has caches more for a second or two; that is waited for. Resident memory settles only after a
few hundred requests to a new server and stays then (docs/serving.md), so the long form sends 110 good ones before the
first that counts.
"""

import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ServerProcess, wait_for

MODEL = "target-16m"
CODE = "def moon_phase(day_of_cycle):\n    "
PROSE = "The baker on our street closes at noon, "
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OLLAMA_CHAT, GENERATE = "/api/chat", "/api/generate"
RATIO = "\nposttrainllm_speculation_speed_ratio "
WARM = {"temperature": 1, "max_tokens": 24}
COLD = {"temperature": 0, "max_tokens": 24}


def spoken(*contents):
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def own(**options):
    return {"model": MODEL, "options": {"num_predict": 24, **options}}


# every one has one right answer: at temperature 0 or with a seed
GOOD = [
    (COMPLETIONS, {**COLD, "prompt": CODE}),
    (COMPLETIONS, {**COLD, "prompt": PROSE, "stream": True}),
    (COMPLETIONS, {**COLD, "prompt": [CODE, "x", PROSE], "n": 1}),
    (COMPLETIONS, {**COLD, "prompt": CODE * 5, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {**COLD, "prompt": [5, 6, 7, 8] * 30, "logprobs": 3, "stream": True}),
    (COMPLETIONS, {**WARM, "prompt": CODE, "seed": 1, "n": 3}),
    (COMPLETIONS, {**WARM, "prompt": PROSE, "seed": 2, "stop": ["e", "\n"]}),
    (COMPLETIONS, {**WARM, "prompt": PROSE, "seed": 3, "n": 2, "stream": True, "echo": True}),
    (COMPLETIONS, {**WARM, "prompt": CODE, "seed": 4, "accept_rule": "coupled"}),
    (COMPLETIONS, {**WARM, "prompt": "1, 4, 9,", "seed": 5, "top_k": 20, "top_p": 0.9, "ignore_eos": True}),
    (COMPLETIONS, {**WARM, "prompt": CODE, "seed": 6, "logit_bias": {"5": -100, "17": 4}, "logprobs": 1}),
    (COMPLETIONS, {**COLD, "prompt": CODE, "frequency_penalty": 1.5, "repetition_penalty": 1.2}),
    (COMPLETIONS, {**COLD, "prompt": CODE * 3, "speculative": False}),
    (CHAT, {**COLD, **spoken("What is a list?")}),
    (CHAT, {**COLD, **spoken("Say yes.", "Why?"), "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**WARM, **spoken("Count to ten."), "seed": 7, "n": 2}),
    (CHAT, {**WARM, **spoken("Le garçon a mangé une crêpe 🥞"), "seed": 8, "stream": True}),
    (CHAT, {**WARM, **spoken("x"), "seed": 9, "stop": " the", "stream": True, "min_p": 0.05}),
    (OLLAMA_CHAT, {**own(temperature=0), **spoken("Write a loop")}),
    (OLLAMA_CHAT, {**own(seed=10), **spoken("Write a loop"), "stream": False}),
    (GENERATE, {**own(seed=11, stop=["\n"]), "prompt": CODE, "raw": True}),
    (GENERATE, {**own(temperature=0), "prompt": "Be brief.", "system": "You count.", "stream": False}),
]
BAD = [
    (COMPLETIONS, b'{"prompt": "x"'),
    (COMPLETIONS, b'{"prompt": "\xff"}'),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": 0}'),
    (COMPLETIONS, json.dumps({"prompt": "x" * 10**6}).encode()),
    (COMPLETIONS, json.dumps({"prompt": "x", "stop": ["s"] * 10_000}).encode()),
    (CHAT, b'{"messages": []}'),
    (CHAT, b"[" * 10_000),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "no": 1}'),
    (OLLAMA_CHAT, b'{"model": "another"}'),
    (GENERATE, b'{"model": "target-16m", "prompt": 3}'),
]


def told(path, text):
    """What of an answer must not depend on who else asks: texts, reasons, log probabilities and counts of tokens."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith(":")]
    parts = [json.loads(line) for line in lines if line != "[DONE]"]
    assert parts, text
    if path in (OLLAMA_CHAT, GENERATE):
        assert parts[-1]["done"], text
        texts = [part["message"]["content"] if "message" in part else part["response"] for part in parts]
        return "".join(texts), parts[-1]["done_reason"], parts[-1]["eval_count"]
    found = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("message") or choice.get("delta") or choice
        text, reasons, logprobs = found.setdefault(choice["index"], ([], [], []))
        text.append(said.get("content") or said.get("text") or "")
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        logprobs += values_of(choice["logprobs"]) if choice["logprobs"] else []
    assert all(len(reasons) == 1 for _, reasons, _ in found.values()), text
    choices = [("".join(text), *reasons, logprobs) for _, (text, reasons, logprobs) in sorted(found.items())]
    return choices, parts[-1]["usage"]["completion_tokens"]


def values_of(logprobs):
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"], entry["top_logprobs"]) for entry in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))


def at_rest(server):
    """Resident and active bytes once nobody is served: medians of nine."""
    wait_for(lambda: state(server) == (0, 0), seconds=60)
    samples = []
    for _ in range(9):
        families = text_string_to_metric_families(server.get("/metrics").text)
        found = {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}
        samples.append((found.get("process_resident_memory_bytes"), found["posttrainllm_memory_active_bytes"]))
        time.sleep(0.02)
    resident, active = zip(*samples, strict=True)
    return None if None in resident else statistics.median(resident), statistics.median(active)


def state(server):
    health = server.get("/health").json()
    return health["slots"]["busy"], health["queue"]["waiting"]


def one(server, number, good, expected, left, dropped):
    """Send request `number`: good, dropped at some moment, or malformed."""
    draw = random.Random(number)
    fate = draw.random()
    if fate < 0.05:
        path, content = draw.choice(BAD)
        assert server.post_bytes(path, content).status_code in (400, 404, 413), content[:100]
        return
    index = draw.randrange(len(good))
    path, body = good[index]
    if fate < 0.05 + dropped:
        server.leave(path, longer(body), lambda connection: when(connection, draw))
        left.append(number)
        return
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert told(path, response.text) == expected[index], (number, path, body)


def longer(body):
    """What is still under way when its client leaves."""
    if "options" in body:
        return {**body, "options": {**body["options"], "num_predict": 200, "ignore_eos": True}}
    return {**body, "max_tokens": 200, "ignore_eos": True}


def when(connection, draw):
    """At once, in a moment, or with the first bytes of an answer."""
    moment = draw.choice(["at once", "soon", "later", "answered"])
    if moment == "answered":
        connection.settimeout(0.5)
        with suppress(TimeoutError):
            connection.recv(draw.choice([1, 64, 4096]))
    elif moment != "at once":
        time.sleep(draw.random() * (0.02 if moment == "soon" else 0.3))


def soak(server, count, good, *, before=0, dropped=0.1, threads=8):
    """Send so many; resident and active bytes at rest after each fifth."""
    expected = [told(path, server.post(path, body).text) for path, body in good]
    left, rests = [], []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda request: server.post(*request), good * before))
        with suppress(AssertionError):  # it may have no doubt that the draft pays, and measures nothing
            wait_for(lambda: before == 0 or RATIO in server.get("/metrics").text, seconds=20)
        for fifth in range(5):
            numbers = range(fifth * count // 5, (fifth + 1) * count // 5)
            list(pool.map(lambda number: one(server, number, good, expected, left, dropped), numbers))
            rests.append(at_rest(server))
    assert 0.5 * dropped < len(left) / count < 1.5 * dropped  # the numbers are drawn from fixed seeds
    assert [told(path, server.post(path, body).text) for path, body in good] == expected
    assert "Traceback" not in server.log
    assert " ERROR " not in server.log
    return rests


def assert_no_growth(server, rests, name):
    place = ("resident", "active").index(name)
    least = min(rest[place] for rest in rests[:-1])
    wait_for(lambda: at_rest(server)[place] < 1.05 * least)


@pytest.fixture
def server(tmp_path):
    options = ("--gate", "off", "--slots", "4", "--max-context", "251", "--max-tokens-limit", "200")
    with ServerProcess(tmp_path, *options) as server:
        yield server
        assert server.stop() == 0


def test_mixed_traffic_of_which_some_is_dropped_or_bad_frees_every_row_and_changes_no_answer(server):
    rests = soak(server, 30, GOOD[::3], dropped=0.3)
    assert_no_growth(server, rests, "active")


@pytest.mark.slow
def test_500_mixed_requests_take_no_memory_and_no_row_and_change_no_answer(server):
    started = time.perf_counter()
    rests = soak(server, 500, GOOD, before=5)
    print(f"soak of 500 requests: {time.perf_counter() - started:.0f} s")
    for name, values in zip(("resident", "active"), zip(*rests, strict=True), strict=True):
        if None not in values:
            print(f"{name} MB at rest:", *(f"{value / 1e6:.1f}" for value in values))
            assert_no_growth(server, rests, name)
