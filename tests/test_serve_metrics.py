"""What `/metrics` says, held against what answers say; and a prompt's second turn, through a real server."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ServerProcess, wait_for
from support import tiny_pair
from test_cli import invoke
from test_scheduler import PROMPTS, Client, run, scheduler_of

from posttrainllm.adapters import costs
from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.gate.standing import Standing
from posttrainllm.adapters.serve import watch as watch_module
from posttrainllm.adapters.serve.app import make_app
from posttrainllm.adapters.serve.errors import ApiError
from posttrainllm.adapters.serve.metrics import OUTCOMES, Metrics, ending_of
from posttrainllm.adapters.serve.settings import ServeSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = "a secret key"
LONG = {"prompt": "def moon_phase(day_of_cycle):\n    " * 20, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
DASHBOARD = Path(__file__).parent.parent / "docs" / "grafana.json"
K = 3  # WIDTH of test_scheduler less one


def samples_of(text):
    """Every sample by its name and labels."""
    return {
        (sample.name.removeprefix("posttrainllm_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(scheduler):
    return samples_of(scheduler.metrics.exposition("")[0].decode())


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(draft="noisy")


# of an engine


def test_counts_are_the_sums_of_what_the_choices_were_told(pair):
    scheduler = scheduler_of(pair, prefix_bytes=2**24, chunk=16)
    clients = [
        Client(prompt, tokens=9 + index, temperature=0.8, seed=index) for index, prompt in enumerate(PROMPTS * 2)
    ]
    run(scheduler, *clients)
    found, usages = scraped(scheduler), [client.outcome.usage for client in clients]
    assert found["prompt_tokens_total",] == sum(usage.prompt_tokens for usage in usages)
    assert found["cached_prompt_tokens_total",] == sum(client.outcome.cached_tokens for client in clients) > 0
    assert found["generated_tokens_total",] == sum(usage.completion_tokens for usage in usages)
    assert found["draft_proposed_tokens_total",] == sum(usage.draft_proposed for usage in usages) > 0
    assert found["draft_accepted_tokens_total",] == sum(usage.draft_accepted for usage in usages) > 0
    for name in ("proposed", "accepted"):
        places = [found[f"draft_{name}_by_position_total", ("position", str(place))] for place in range(1, K + 1)]
        assert sum(places) == found[f"draft_{name}_tokens_total",]
        assert places == sorted(places, reverse=True)
    assert found["time_to_first_token_seconds_count",] == found["queue_seconds_count",] == len(clients)
    steps = sum(client.outcome.timings.steps for client in clients)
    assert found["inter_token_latency_seconds_count",] == steps - len(clients)  # the first of each is another matter
    assert found["step_seconds_count", ("drafted", "true")] <= steps
    assert found["step_seconds_count", ("drafted", "false")] == 0


def test_ids_and_proposals_behind_the_end_of_a_reply_are_not_counted():
    """The draft is the target, so every window is accepted whole, and the reply ends within one."""
    same = tiny_pair(draft="same")
    (whole,) = run(scheduler_of(same), Client(tokens=40))
    for stop in (5, 6, 7, 8):
        scheduler = scheduler_of(same)
        (client,) = run(scheduler, Client(tokens=40, stop_token_ids=(whole.ids[stop],)))
        usage, found = client.outcome.usage, scraped(scheduler)
        assert client.ids == whole.ids[: whole.ids.index(whole.ids[stop]) + 1]
        assert found["generated_tokens_total",] == usage.completion_tokens == len(client.ids)
        assert found["draft_proposed_tokens_total",] == usage.draft_proposed
        assert found["draft_accepted_tokens_total",] == usage.draft_accepted


def settings_of(pair, **changes):
    return ServeSettings(
        **{
            "name": "tiny",
            "other_names": (),
            "context": 200,
            "longest_text": 1000,
            "max_body_bytes": 10_000,
            "max_tokens": 50,
            "accept_rule": "leviathan",
            "vocab_size": pair.vocab_size,
            "prompt_vocab_size": pair.vocab_size,
            "api_key": None,
            "request_timeout_s": None,
            "created": 1,
            "fingerprint": "fp",
            **changes,
        }
    )


async def posted(app, body):
    """The status of an answer, with no server between."""
    left, sent = [{"type": "http.request", "body": json.dumps(body).encode()}], []
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": headers}

    async def receive():
        if left:
            return left.pop()
        return await asyncio.get_running_loop().create_future()  # the client stays

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


def test_a_request_that_fails_once_it_waits_is_counted_once(pair):
    """Nobody steps the engine: time is up, with the request in the line."""
    scheduler = scheduler_of(pair, slots=1, queue=0)
    app = make_app(scheduler, settings_of(pair, request_timeout_s=0.1))

    async def both():
        first = asyncio.ensure_future(posted(app, {"prompt": [1, 2], "max_tokens": 5}))
        while scheduler.admission.counts[1] == 0:
            await asyncio.sleep(0.001)
        return [await posted(app, {"prompt": [1, 2], "max_tokens": 5}), await first]

    assert asyncio.run(both()) == [429, 504]
    found = scraped(scheduler)
    requests = {key: value for key, value in found.items() if key[0] == "requests_total" and value}
    counted = {dict(labels)["outcome"]: value for (_, *labels), value in requests.items()}
    assert counted == {"busy": 1, "timed_out": 1}


def test_what_a_client_gave_up_is_counted_as_far_as_it_went(pair):
    def leave(client):
        client.job.cancelled = True

    gone, other = Client(tokens=200, then=leave), Client(tokens=5)
    scheduler = scheduler_of(pair, slots=1)
    with scheduler.admission.room(1) as put:
        put([gone.job])
    run(scheduler, other)
    assert scraped(scheduler)["generated_tokens_total",] == len(gone.ids) + len(other.ids)


def test_gauges_are_the_state_at_the_scrape(pair):
    scheduler, seen = scheduler_of(pair, slots=1), []
    clients = [Client(tokens=5, then=lambda client: client.ended or seen.append(scraped(scheduler))) for _ in range(3)]
    run(scheduler, *clients)
    assert [(found["active_rows",], found["queue_depth",]) for found in (seen[0], seen[-1])] == [(1, 2), (1, 0)]
    after = scraped(scheduler)
    assert (after["active_rows",], after["rows",], after["up",]) == (0, 1, 0)  # the admission is closed
    assert (after["speculation_enabled",], after["speculation_draft_k",]) == (1, K)
    assert after["gate_verdict", ("verdict", "not gated")] == 1
    assert sum(value for (name, *_), value in after.items() if name == "gate_verdict") == 1
    assert after["prefix_cache_most_bytes",] == 0


def test_a_broken_verdict_and_plain_steps_show(pair):
    client = Client(tokens=12)

    def gate(*, progress):
        with scheduler.admission.room(1) as put:
            put([client.job])
        client.then = lambda it: it.ended and scheduler.admission.close()
        return Standing(enabled=False, verdict="broken", reason="position 7 differs")

    scheduler = scheduler_of(pair, full_gate=gate)
    scheduler.run()
    found = scraped(scheduler)
    assert found["gate_verdict", ("verdict", "broken")] == 1
    assert (found["speculation_enabled",], found["speculation_draft_k",], found["speculation_slower",]) == (0, 0, 0)
    assert (found["step_seconds_count", ("drafted", "true")], found["draft_proposed_tokens_total",]) == (0, 0)
    assert found["step_seconds_count", ("drafted", "false")] == 12


def test_two_servers_in_one_process_share_no_count(pair):
    schedulers = [scheduler_of(pair) for _ in range(2)]
    run(schedulers[0], Client(tokens=7))
    assert [scraped(scheduler)["generated_tokens_total",] for scheduler in schedulers] == [7, 0]


def test_a_server_that_is_never_idle_measures_between_two_steps_and_says_that_the_draft_is_slow(monkeypatch, caplog):
    """Steps that cost 1.6 of a plain one and emit about one id each."""
    monkeypatch.setattr(watch_module, "_LATELY", 16)
    monkeypatch.setattr(watch_module, "_LONG", 48)
    monkeypatch.setattr(watch_module, "curve_on_file", lambda *a: None)
    told, random = [], tiny_pair(draft="random")

    def measured(pair, shape, mode, progress):
        told.append(len(client.ids))
        for _ in range(4):
            progress()
        told.append(len(client.ids))
        return Curve(draft_ks=(K,), seconds=(0.016,), plain_seconds=0.010)

    monkeypatch.setattr(costs, "_measure", measured)
    client = Client(tokens=200)
    scheduler = scheduler_of(random, slots=1)
    client.then = lambda it: seen.append(scraped(scheduler)) if 120 <= len(it.ids) <= 130 else None
    seen = []
    run(scheduler, client)
    (plain,) = run(scheduler_of(random, slots=1), Client(tokens=200, speculate=False))
    assert client.ids == plain.ids
    assert 48 <= told[0] < told[1] <= told[0] + 4 * 4  # it went on decoding meanwhile, a step at a time
    assert seen[0]["speculation_slower",] == 1
    assert 0 < seen[0]["speculation_speed_ratio",] < 0.95
    assert caplog.text.count("the draft does not pay here") == 1


def test_while_nothing_speaks_against_the_draft_no_ratio_is_shown(pair):
    scheduler = scheduler_of(pair)
    run(scheduler, Client(tokens=5))
    found = scraped(scheduler)
    assert found["speculation_slower",] == 0
    assert ("speculation_speed_ratio",) not in found


@pytest.mark.parametrize(
    ("status", "ending"),
    [(400, "refused"), (401, "refused"), (429, "busy"), (500, "failed"), (503, "failed"), (504, "timed_out")],
)
def test_how_an_error_counts(status, ending):
    assert ending_of(ApiError(status, "x")) == ending


def test_a_scraper_that_asks_for_openmetrics_gets_it():
    metrics = Metrics(draft_k=2)
    body, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


# the dashboard


def test_the_dashboard_asks_for_metrics_that_there_are(pair):
    scheduler = scheduler_of(pair, prefix_bytes=2**24)
    run(scheduler, Client(tokens=5))
    text = scheduler.metrics.exposition("")[0].decode()
    present = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    present |= {"posttrainllm_speculation_speed_ratio"}  # once it is known
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in asked for name in re.findall(r"\b(?:posttrainllm|process)_\w+", query)}
    assert len(asked) >= 15
    assert named <= present
    of_ours = {name for name in present if name.startswith("posttrainllm_") and not name.endswith("_created")}
    unshown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in of_ours} - {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in named
    }
    assert unshown == set()


# of a process


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--gate", "off", "--slots", "2", "--queue", "1", "--max-context", "507", "--prefix-cache-mb", "64")
    folder = tmp_path_factory.mktemp("metrics")
    with ServerProcess(folder, *options, "--record-dir", str(folder), POSTTRAINLLM_API_KEY=KEY) as server:
        server.folder = folder
        server.headers = {"authorization": f"Bearer {KEY}"}
        yield server


def answer(server, path=COMPLETIONS, **changes):
    response = server.post(path, {**LONG, **changes})
    assert response.status_code == 200, response.text
    return response.json()


def cached(value):
    return value["usage"]["prompt_tokens_details"]["cached_tokens"]


def gained(before, after):
    return {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}


def test_a_scrape_holds_the_usage_of_every_request_and_how_each_ended(server):
    def scrape():
        response = server.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        return samples_of(response.text)

    before = scrape()
    told = [answer(server), answer(server, temperature=0.9, seed=2), answer(server, prompt="x = 1\n", max_tokens=30)]
    with server.events(COMPLETIONS, {**LONG, "stream": True}) as events:
        told += [event for event in events if event != "[DONE]" and "usage" in event]
    chat = {"messages": [{"role": "user", "content": "a b c " * 60}], "max_tokens": 4}
    told.append(server.post(CHAT, chat).json())
    assert server.post(COMPLETIONS, {**LONG, "temperature": -1}).status_code == 400
    assert server.post(COMPLETIONS, LONG, headers={"authorization": "Bearer x"}).status_code == 401
    assert server.post(CHAT, {**chat, "n": 9}).status_code == 400  # more than the server ever holds

    def leave(connection):
        heard = b""
        while b'"text"' not in heard:
            heard += connection.recv(4096)

    server.leave(COMPLETIONS, {**LONG, "max_tokens": 60, "stream": True, "prompt": "y"}, leave)
    wait_for(lambda: gained(before, scrape()).get(("requests_total", *ended("completions", "cancelled"))) == 1)
    found = gained(before, scrape())
    usages = [value["usage"] for value in told]
    assert len(usages) == 5
    assert found["requests_total", *ended("completions", "ok")] == 4
    assert found["requests_total", *ended("chat", "ok")] == 1
    assert found["requests_total", *ended("completions", "refused")] == 2
    assert found["requests_total", *ended("chat", "refused")] == 1
    assert sum(value for (name, *_), value in found.items() if name == "requests_total") == 9
    prompt = sum(usage["prompt_tokens"] for usage in usages) + 1  # "y" of the client that left
    assert found["prompt_tokens_total",] == prompt
    assert found["cached_prompt_tokens_total",] == sum(map(cached, told)) > 0
    generated = found["generated_tokens_total",] - sum(usage["completion_tokens"] for usage in usages)
    assert 0 < generated <= 60  # of the client that left
    assert found["draft_proposed_tokens_total",] >= sum(usage["draft_proposed"] for usage in usages)
    assert found["time_to_first_token_seconds_count",] == 6


def ended(endpoint, outcome):
    assert outcome in OUTCOMES
    return ("endpoint", endpoint), ("outcome", outcome)


def test_the_second_turn_of_a_chat_says_what_was_not_read_again_and_health_how_much_is_kept(server):
    first = answer(server, prompt="import os\n" * 40)
    reply = first["choices"][0]["text"]
    second = answer(server, prompt="import os\n" * 40 + reply + "\n# more\n")
    length = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert cached(second) == (length - 1) // 64 * 64 > 0
    health = server.get("/health").json()["prefix_cache"]
    assert 0 < health["bytes"] <= health["most_bytes"] == 64 * 2**20
    assert health["chunks"] >= cached(second) // 64


@pytest.mark.slow
def test_the_same_prompt_gives_the_same_answer_from_a_server_that_keeps_nothing(server, tmp_path):
    bodies = [{}, {"temperature": 0.9, "seed": 4}, {"temperature": 0.9, "seed": 4, "accept_rule": "coupled"}]
    answer(server)
    kept = [answer(server, **body) for body in bodies]
    assert all(cached(value) > 0 for value in kept)
    options = ("--gate", "off", "--slots", "2", "--max-context", "507", "--prefix-cache-mb", "0")
    with ServerProcess(tmp_path, *options) as plain:
        expected = [answer(plain, **body) for body in bodies]
        assert plain.get("/health").json()["prefix_cache"] is None
    assert [cached(value) for value in expected] == [0] * 3
    assert [value["choices"] for value in kept] == [value["choices"] for value in expected]


def test_a_trace_of_a_prompt_that_was_kept_replays(server):
    answer(server)
    value = answer(server, temperature=0.8, seed=6)
    assert cached(value) > 0
    trace = server.folder / f"{value['id']}-0.jsonl"
    wait_for(lambda: '{"end"' in trace.read_text(encoding="utf-8"))
    done = invoke("replay", str(trace))
    assert done.exit_code == 0, done.output


def test_metrics_want_the_key(server):
    assert server.get("/metrics", headers={"authorization": ""}).status_code == 401
