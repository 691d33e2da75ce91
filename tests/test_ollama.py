"""Ollama's API, as Ollama's own Python client sees it, and what its client does not send."""

import json
import re
from types import SimpleNamespace

import attrs
import httpx2 as httpx
import ollama
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import ServerProcess, wait_for

from posttrainllm.adapters.loading.memory import Forecast
from posttrainllm.adapters.serve.errors import ApiError
from posttrainllm.adapters.serve.metrics import ENDPOINTS
from posttrainllm.adapters.serve.ollama import parse_chat, parse_generate, served_name
from posttrainllm.adapters.serve.ollama_models import running_model
from posttrainllm.adapters.serve.settings import ServeSettings

MODEL = "target-16m"
CODE = "def moon_phase(day_of_cycle):\n    "
SPOKEN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a loop"}]
GREEDY = {"temperature": 0, "num_predict": 20, "ignore_eos": True}
SETTINGS = ServeSettings(
    name="tiny",
    other_names=("path/to/tiny",),
    context=200,
    longest_text=1000,
    max_body_bytes=10_000,
    max_tokens=50,
    accept_rule="leviathan",
    vocab_size=100,
    prompt_vocab_size=100,
    api_key=None,
    request_timeout_s=None,
    created=1,
    fingerprint="fp",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--gate", "off", "--slots", "2", "--max-context", "251")
    with ServerProcess(tmp_path_factory.mktemp("ollama"), *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with ollama.Client(host=server.url) as client:
        yield client


def test_the_client_finds_the_model(client, server):
    (card,) = client.list().models
    assert card.model == MODEL
    assert card.size > 0
    assert card.details.family == "llama"
    shown = client.show(MODEL)
    assert shown.modelinfo["llama.context_length"] == 251
    assert shown.capabilities == ["completion"]
    assert shown.parameters == "num_ctx 251"
    assert client.show(f"{MODEL}:latest").modelinfo == shown.modelinfo
    assert server.get("/api/version").json().keys() == {"version"}


def test_the_client_finds_the_model_running(client, server):
    (running,) = client.ps().models
    (card,) = client.list().models
    assert running.model == running.name == MODEL
    assert (running.digest, running.details) == (card.digest, card.details)
    (weights, caches) = re.search(r"weights ([\d.]+) GB .* caches ([\d.]+) GB", server.log).groups()
    assert running.size == pytest.approx(1e9 * (float(weights) + float(caches)), abs=1e6)  # the log's, to a MB
    assert running.size > card.size  # which is the target alone, on file
    assert running.size_vram in (0, running.size)
    device = server.get("/v1/models").json()["data"][0]["device"]
    assert (running.size_vram == 0) == (device == "cpu")
    assert running.context_length == 251
    assert running.expires_at.year > 2200  # more than 20 years ahead are "Forever" to `ollama ps`


@pytest.mark.parametrize(("device", "share"), [("cpu", 0), ("gpu", 1)])
def test_what_runs_on_a_gpu_is_in_its_memory_and_on_a_cpu_nothing_is(embedded_pair, device, share):
    forecast = Forecast(weights=(700, 50), kv=(20, 5), rows=3, capacity=64, free=None)
    pair = attrs.evolve(embedded_pair, runtime=attrs.evolve(embedded_pair.runtime, device=device))
    found = running_model(SETTINGS, SimpleNamespace(pair=pair, forecast=forecast))
    assert (found["size"], found["size_vram"]) == (850, 850 * share)  # with the row that a prompt is read into


def test_a_chat_is_that_of_openai_s_api_whole_and_in_lines(client, server):
    body = {"messages": SPOKEN, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    expected = server.post("/v1/chat/completions", body).json()
    whole = client.chat(MODEL, SPOKEN, options=GREEDY)
    assert whole.message.role == "assistant"
    assert whole.message.content == expected["choices"][0]["message"]["content"]
    assert (whole.done, whole.done_reason) == (True, "length")
    assert whole.eval_count == expected["usage"]["completion_tokens"] == 20
    assert whole.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert whole.total_duration >= whole.eval_duration > 0
    *parts, last = client.chat(MODEL, SPOKEN, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert not any(part.done for part in parts)
    assert len(parts) > 1
    assert (last.done, last.done_reason, last.eval_count, last.message.content) == (True, "length", 20, "")


def test_a_raw_prompt_is_a_completion_and_another_one_goes_through_the_template(client, server):
    expected = server.post(
        "/v1/completions", {"prompt": CODE, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    ).json()
    raw = client.generate(MODEL, CODE, raw=True, options=GREEDY)
    assert raw.response == expected["choices"][0]["text"]
    lines = list(client.generate(MODEL, CODE, raw=True, options=GREEDY, stream=True))
    assert "".join(line.response for line in lines) == raw.response
    told = client.generate(MODEL, "Write a loop", system="Be brief.", options=GREEDY)
    assert told.response == client.chat(MODEL, SPOKEN, options=GREEDY).message.content


def test_options_are_the_same_sampling_under_other_names(client, server):
    options = {"temperature": 0.9, "seed": 3, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "num_predict": 30}
    options |= {
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 4096,
        "num_gpu": 1,
    }
    ours = {
        **{name: options[name] for name in ("temperature", "seed", "top_k", "top_p", "min_p")},
        **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.2, "max_tokens": 30},
    }
    expected = server.post("/v1/completions", {"prompt": CODE, **ours}).json()["choices"][0]
    found = client.generate(MODEL, CODE, raw=True, options=options)
    assert (found.response, found.done_reason) == (expected["text"], expected["finish_reason"])
    stopped = client.generate(MODEL, CODE, raw=True, options={**options, "stop": expected["text"][3:6]})
    assert expected["text"].startswith(stopped.response + expected["text"][3:6])
    assert stopped.done_reason == "stop"
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3, "max_tokens": 30}
    expected = server.post("/v1/completions", {"prompt": CODE, **defaults}).json()["choices"][0]["text"]
    assert client.generate(MODEL, CODE, raw=True, options={"seed": 3, "num_predict": 30}).response == expected


def test_speculation_is_counted_and_can_be_left_out(server):
    body = {"model": MODEL, "prompt": CODE, "raw": True, "stream": False, "options": GREEDY}
    drafted = server.post("/api/generate", body).json()
    plain = server.post("/api/generate", {**body, "options": {**GREEDY, "speculative": False}}).json()
    assert drafted["response"] == plain["response"]
    assert drafted["usage"]["draft_proposed"] > plain["usage"]["draft_proposed"] == 0
    assert drafted["speculative"]["enabled"]


def test_a_request_for_nothing_loads_the_model_which_is_loaded(client):
    assert client.generate(MODEL).done_reason == "load"
    found = client.chat(MODEL, [])
    assert (found.done, found.done_reason, found.message.content) == (True, "load", "")


def test_a_stream_is_lines_of_json_and_ends_its_request_when_the_client_leaves(server):
    body = {"model": MODEL, "prompt": CODE, "raw": True, "options": GREEDY}
    response = server.post("/api/generate", body)  # a stream unless told otherwise
    assert response.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]

    def read_a_line(connection):
        heard = b""
        while b'"response"' not in heard:
            heard += connection.recv(4096)

    server.leave("/api/generate", {**body, "options": {**GREEDY, "num_predict": 200}}, read_a_line)
    wait_for(lambda: server.get("/health").json()["slots"]["busy"] == 0)
    found = {
        sample.labels["outcome"]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == "posttrainllm_requests_total" and sample.labels["endpoint"] == "ollama_generate"
    }
    assert found["cancelled"] == 1
    assert found["ok"] >= 1


def test_what_cannot_be_done_is_one_line_under_error(client):
    for status, ask in (
        (404, lambda: client.chat("another", SPOKEN)),
        (404, lambda: client.show("another")),
        (400, lambda: client.chat(MODEL, SPOKEN, format="json")),
        (400, lambda: client.chat(MODEL, SPOKEN, think=True)),
        (400, lambda: client.generate(MODEL, CODE, options={"temperature": -1})),
        (400, lambda: client.generate(MODEL, CODE, options={"mirostat": 2})),
        (400, lambda: client.generate(MODEL, "x" * 2000)),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            ask()
        assert caught.value.status_code == status
        assert "\n" not in caught.value.error
        assert "got" in caught.value.error or "supports" in caught.value.error


@pytest.mark.parametrize(
    ("endpoint", "change", "named"),
    [
        ("chat", {"options": {"repeat_penalty": 100}}, "repeat_penalty: got 100.0"),
        ("chat", {"options": {"repeat_penalty": "x"}}, "repeat_penalty: got 'x'"),
        ("chat", {"messages": [], "options": {"repeat_penalty": 100}}, "repeat_penalty: got 100.0"),
        ("chat", {"messages": [{"role": "user", "content": "a " * 999}]}, "messages: got "),
        ("generate", {"options": {"repeat_penalty": 0}}, "repeat_penalty: got 0.0"),
        ("generate", {"prompt": "a " * 999}, "prompt: got "),
        ("generate", {"prompt": "a " * 9_999}, "prompt: got "),
        ("generate", {"prompt": "a " * 999, "raw": True}, "prompt: got "),
    ],
)
def test_an_error_names_the_field_that_was_sent_not_ours(server, endpoint, change, named):
    body = {"model": MODEL, "messages": SPOKEN} if endpoint == "chat" else {"model": MODEL, "prompt": CODE}
    refused = server.post(f"/api/{endpoint}", {**body, **change})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(named)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/rows", 404),
        ("POST", "/api/pull", 404),
        ("DELETE", "/api/delete", 404),
        ("GET", "/api/chat", 405),
    ],
)
def test_a_path_that_is_not_there_is_refused_as_ollama_does(server, method, path, status):
    refused = httpx.request(method, f"{server.url}{path}")
    assert refused.status_code == status
    assert refused.json() == {"error": f"{method} {path}: {refused.reason_phrase}"}


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/show"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_is_json_whatever_curl_calls_it_but_a_web_page_must_say_so(server, path, kind):
    headers = {} if kind is None else {"content-type": kind}
    content = json.dumps({"model": MODEL, "messages": [], "prompt": ""}).encode()
    assert httpx.post(f"{server.url}{path}", content=content, headers=headers).status_code == 200
    of_a_page = {**headers, "origin": "https://elsewhere.example"}
    refused = httpx.post(f"{server.url}{path}", content=content, headers=of_a_page)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("content-type: got ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model: got nothing"),
        ({"model": 7}, "model: got nothing"),
        ({"messages": "x"}, "messages: got 'x', expected a list of objects"),
        ({"messages": [3]}, r"messages: got \[3\], expected a list of objects"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: got 'robot'"),
        ({"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "supports no images"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "supports no tool_calls"),
        ({"tools": [{}]}, "supports no tools"),
        ({"logprobs": True}, "supports no log probabilities here"),
        ({"stream": "yes"}, "stream: got 'yes', expected true or false"),
        ({"options": []}, None),
        ({"options": [1]}, r"options: got \[1\], expected an object"),
        ({"options": {"num_predict": "x"}}, "num_predict: got 'x', expected a whole number"),
        ({"options": {"num_predict": True}}, "num_predict: got true, expected a whole number"),
        ({"options": {"top_k": "x"}}, "top_k: got 'x'"),
        ({"options": {"typical_p": 0.5}}, "typical_p: this server supports no other value than 1"),
    ],
)
def test_a_bad_chat_names_its_field(change, message):
    body = {"model": "tiny", "messages": SPOKEN, **change}
    if message is None:
        assert parse_chat(body, SETTINGS) is not None
        return
    with pytest.raises(ApiError, match=message):
        parse_chat(body, SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 3}, "prompt: got 3, expected a text"),
        ({"system": ["x"]}, r"system: got \['x'\], expected a text"),
        ({"raw": 1}, "raw: got 1, expected true or false"),
        ({"raw": True, "system": "x"}, "system: got it with raw"),
        ({"suffix": "x"}, "supports no suffix"),
        ({"context": [1, 2]}, "supports no context of ids"),
        ({"template": "{{ .Prompt }}"}, "supports no template of"),
    ],
)
def test_a_bad_prompt_names_its_field(change, message):
    with pytest.raises(ApiError, match=message):
        parse_generate({"model": "tiny", "prompt": "x", **change}, SETTINGS)


def test_counts_below_one_and_negative_seeds_are_no_limit_and_no_seed():
    for options in ({"num_predict": -1, "seed": -1, "top_k": -1}, {"num_predict": 0}, {"seed": -1.0, "top_k": -5.0}):
        body = parse_generate({"model": "tiny", "prompt": "x", "raw": True, "options": options}, SETTINGS)
        assert body.max_tokens == SETTINGS.max_tokens
        assert body.seed is None
        assert body.top_k == (0 if "top_k" in options else 40)
    off = {"repeat_penalty": 1.3, "repeat_last_n": 0}
    assert parse_generate({"model": "tiny", "prompt": "x", "options": off}, SETTINGS).repetition_penalty is None


def test_names_may_have_a_tag_behind_them():
    for name in ("tiny", "tiny:latest", "path/to/tiny"):
        assert served_name({"model": name}, SETTINGS) in ("tiny", "path/to/tiny")
    with pytest.raises(ApiError) as caught:
        served_name({"model": "tiny:7b"}, SETTINGS)
    assert caught.value.status == 404


def test_the_metrics_know_the_endpoints():
    assert {"ollama_chat", "ollama_generate"} <= set(ENDPOINTS)
