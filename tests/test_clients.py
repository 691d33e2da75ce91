"""What clients of other people really send, replayed: client_requests.jsonl has their requests as they went out.

Open WebUI's were written by its own code (the wheel of 0.12.4, everything around its request stubbed), Continue's by
its own providers (its source of 2026-06-18, bundled), both against a server of ours. OpenAI's client runs itself.
"""

import json
import re
from pathlib import Path

import pytest
from serving import ServerProcess

from posttrainllm.adapters.serve.errors import ApiError
from posttrainllm.adapters.serve.ollama import parse_chat
from posttrainllm.adapters.serve.prepare import prepare_chat
from posttrainllm.adapters.serve.schema import ChatRequest, parse

KEY = "secret"
FILE = Path(__file__).parent / "client_requests.jsonl"
REQUESTS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
OPERATORS = Path(__file__).parent.parent / "docs" / "operators.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    key = folder / "key"
    key.write_text(f"{KEY}\n")
    options = ("--gate", "off", "--slots", "2", "--max-context", "512", "--api-key-file", str(key))
    with ServerProcess(folder, *options) as server:
        yield server


def send(server, request):
    if request["method"] == "GET":
        return server.get(request["path"], headers=request["headers"])
    return server.post(request["path"], request["body"], headers=request["headers"])


def text_of(response):
    """What each client puts together: from events, lines or one object."""
    kind = response.headers["content-type"]
    if kind.startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    if kind.startswith("application/x-ndjson"):
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert lines[-1]["done"] is True
        return "".join(line["response"] if "response" in line else line["message"]["content"] for line in lines)
    return response.json()["choices"][0]["message"]["content"]


def named(client, purpose):
    (found,) = [entry for entry in REQUESTS if (client, purpose) == (entry["client"], entry["purpose"])]
    return found


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda entry: f"{entry['client']}: {entry['purpose']}")
def test_a_recorded_request_is_answered_and_wants_the_key(server, request_):
    answer = send(server, request_)
    assert answer.status_code == 200, answer.text
    if request_["purpose"] == "list models":
        value = answer.json()
        names = (
            [card["id"] for card in value["data"]] if "data" in value else [card["name"] for card in value["models"]]
        )
        assert names == ["target-16m"]
    elif request_["purpose"] == "describe the model":
        # Continue reads these lines for the context, and a template with .Suffix as infill, which this server has not
        parameters = dict(re.fullmatch(r'(\S+)\s+((?:".*")|\S+)', line).groups() for line in lines_of(answer))
        assert parameters == {"num_ctx": "512"}
        assert ".Suffix" not in answer.json()["template"]
    else:
        assert text_of(answer)
    without = {**request_, "headers": {**request_["headers"], "authorization": "Bearer another"}}
    assert send(server, without).status_code == 401


def lines_of(answer):
    return answer.json()["parameters"].splitlines()


def test_a_stream_says_its_usage_where_the_client_asks_for_it(server):
    for request in REQUESTS:
        if not (request["body"] or {}).get("stream_options"):
            continue
        *_, last, done = [line for line in send(server, request).text.splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        value = json.loads(last.removeprefix("data: "))
        assert value["choices"] == []
        assert value["usage"]["completion_tokens"] > 0


def test_both_providers_of_continue_complete_the_same_code(server):
    """At temperature 0: one is asked as OpenAI's API, the other as Ollama's, with the same stop strings."""
    ours, theirs = (
        named(f"Continue 2026-06-18, provider {name}", "complete code")["body"] for name in ("openai", "ollama")
    )
    assert ours["temperature"] == theirs["options"]["temperature"] == 0
    assert ours["stop"] == theirs["options"]["stop"]
    texts = [
        text_of(send(server, named(f"Continue 2026-06-18, provider {name}", "complete code")))
        for name in ("openai", "ollama")
    ]
    assert texts[0] == texts[1]
    for stop in ours["stop"]:
        assert stop not in texts[0]


def test_an_autocompletion_ends_at_its_stop_strings(server):
    """The same request with the beginning of plain code, and with one more stop string that is sure to come."""
    request = named("Continue 2026-06-18, provider openai", "complete code")
    free = {**request["body"], "prompt": "def add(a, b):\n    ", "stop": None}
    whole = text_of(send(server, {**request, "body": free}))
    stop = whole[5:9]
    cut = text_of(send(server, {**request, "body": {**free, "stop": [*request["body"]["stop"], stop]}}))
    assert cut == whole[: whole.index(stop)]


TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


def test_tools_of_an_agent_are_refused_in_words_that_its_user_can_act_on():
    """Open WebUI's native function calling and Continue's agent mode: docs/operators.md says how to turn them off."""
    body = named("Open WebUI 0.12.4", "chat")["body"]
    with pytest.raises(ApiError, match="tools: this server supports no tools") as refused:
        prepare_chat(parse(ChatRequest, {**body, "tools": TOOLS}), None, None)
    assert refused.value.status == 400
    body = named("Continue 2026-06-18, provider ollama", "chat")["body"]
    with pytest.raises(ApiError, match="tools: this server supports no tools"):
        parse_chat({**body, "tools": TOOLS}, None)


def test_the_snippet_for_openai_s_client_runs(server, capsys):
    code = OPERATORS.read_text(encoding="utf-8").split("```python\n", 1)[1].split("```", 1)[0]
    assert "http://127.0.0.1:8090/v1" in code
    code = code.replace("http://127.0.0.1:8090", server.url).replace('"KEY"', f'"{KEY}"')
    exec(compile(code, "operators.md", "exec"), {})  # the example is ours
    streamed, whole = capsys.readouterr().out.splitlines()[-2:]
    assert streamed
    assert re.fullmatch(r"\d+ tokens, [01]\.\d{3} of the drafted accepted", whole)
