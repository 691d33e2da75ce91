"""A server's own description of its API: it is valid, and what it says is what is done (by schemathesis)."""

import json

import attrs
import jsonschema
import openapi_spec_validator
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from serving import ServerProcess, wait_for
from test_ollama import SETTINGS

from posttrainllm.adapters.serve.app import make_app
from posttrainllm.adapters.serve.openapi import openapi

KEY = "a key"
OPTIONS = ("--gate", "off", "--slots", "2", "--queue", "2", "--max-context", "251", "--max-tokens-limit", "6")
GENERATING = ("/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate")
# what no schema of one field says: how fields go together, the vocabulary in a bias, and how much fits
TOGETHER = {
    "best_of",
    "logit_bias",
    "max_tokens",
    "messages",
    "model",
    "n",
    "prompt",
    "system",
    "tools",
    "top_logprobs",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ServerProcess(tmp_path_factory.mktemp("openapi"), *OPTIONS, POSTTRAINLLM_API_KEY=KEY) as server:
        server.headers = {"authorization": f"Bearer {KEY}"}
        yield server
        wait_for(lambda: server.get("/health").json()["slots"]["busy"] == 0)
        assert server.get("/health").json()["queue"]["waiting"] == 0
        assert "Traceback" not in server.log
        assert " ERROR " not in server.log


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json").json()


@pytest.fixture(scope="module")
def session(server):
    with requests.Session() as session:
        yield session


SETTINGS = attrs.evolve(SETTINGS, name="target-16m", vocab_size=4096, prompt_vocab_size=4096, api_key=KEY)
DOCUMENT = openapi(SETTINGS, "0.1.0")
short, whole = (schemathesis.openapi.from_dict(DOCUMENT) for _ in range(2))
short.config.phases.coverage.enabled = False
CALMLY = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
CHECKS = schemathesis.checks.CHECKS
# what is refused for how its fields go together is no fault, and keys are tested on their own
UNCHECKED = [CHECKS.get_one(name) for name in ("positive_data_acceptance", "ignored_auth")]


def check(case, server, session):
    """Send a request made from the document, and hold the answer against it."""
    response = case.call_and_validate(
        base_url=server.url, session=session, headers=server.headers, excluded_checks=UNCHECKED
    )
    if case.meta.generation.mode.is_positive and response.status_code == 400:
        error = response.json()["error"]
        param = error["param"] if isinstance(error, dict) else error.partition(":")[0]
        assert param in TOGETHER, (case.body, response.text)


def test_a_server_gives_the_document_which_is_valid_and_names_every_route(server):
    found = server.get("/openapi.json").json()
    assert found == {**DOCUMENT, "info": {**DOCUMENT["info"], "version": server.get("/api/version").json()["version"]}}
    openapi_spec_validator.validate(found)
    routes = make_app(None, SETTINGS).routes
    assert {route.path.replace(":path", "") for route in routes} == found["paths"].keys()
    assert {method.lower() for route in routes for method in route.methods} == {"get", "post", "head"}
    for route in routes:
        operations = {method.lower() for method in route.methods - {"HEAD"}}
        assert found["paths"][route.path.replace(":path", "")].keys() == operations


def test_what_is_said_to_want_the_key_wants_it(server):
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            status = requests.request(method, f"{server.url}{path}", json={}).status_code
            assert (status == 401) == ("security" in operation), path


@pytest.mark.parametrize("keyed", [True, False], ids=["with the key", "without"])
@pytest.mark.parametrize("path", [path for path in DOCUMENT["paths"] if "get" in DOCUMENT["paths"][path]])
def test_head_is_answered_with_the_status_and_the_headers_of_get_and_no_body(server, session, path, keyed):
    path = path.replace("{name}", "target-16m")
    key = server.headers if keyed else {}
    expected = session.get(f"{server.url}{path}", headers=key)
    varies = {"date"}
    if not keyed and expected.status_code == 401:
        varies.add("x-request-id")
    if keyed and path == "/metrics":  # which has other numbers every time
        varies.add("content-length")
    status, headers, body = head(server, path, key)
    assert status == expected.status_code
    assert headers.keys() == {name.lower() for name in expected.headers} | {"connection"}  # "close", as was asked
    for name in headers.keys() - varies - {"connection"}:
        assert headers[name] == expected.headers[name], name
    assert int(headers["content-length"]) > 0
    assert body == b""


def head(server, path, headers):
    """Status, headers, and every byte behind them: a client of HTTP would not look at those."""
    lines = {"host": "x", "connection": "close", **headers}
    asked = f"HEAD {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    start, _, body = server.raw(f"{asked}\r\n".encode()).partition(b"\r\n\r\n")
    first, *rest = start.decode().split("\r\n")
    found = (line.split(": ", 1) for line in rest)
    return int(first.split()[1]), {name.lower(): value for name, value in found}, body


def within(schema):
    """A schema that may name the document's others."""
    return {**schema, "components": DOCUMENT["components"]}


def candidates(schema):
    """Values that a schema names or ends at, and some of each of its types."""
    found = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    found += [value for part in schema.get("anyOf", []) for value in candidates(part)]
    found += [schema[name] for name in ("minimum", "maximum", "default") if name in schema]
    found += [[value] for value in (candidates(schema["items"]) if "items" in schema else [])]
    found += ["x" * schema.get("minLength", 1), "x" * schema.get("maxLength", 1)]
    return [*found, None, True, False, 0.5, 1, [], {}]


def bounds(schema):
    """Those of them that it allows, once each."""
    validator = jsonschema.Draft202012Validator(within(schema))
    return {json.dumps(value): value for value in candidates(schema) if validator.is_valid(value)}.values()


FEW = {"options": {"num_predict": 1}}
LEAST = {
    "ChatRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "CompletionRequest": ("/v1/completions", {"prompt": "x", "max_tokens": 1}),
    "OllamaChatRequest": ("/api/chat", {"model": "target-16m", "messages": [{"role": "user", "content": "x"}], **FEW}),
    "OllamaGenerateRequest": ("/api/generate", {"model": "target-16m", "prompt": "x", **FEW}),
}
# what others have, and this server has not, or has elsewhere
UNDOCUMENTED = ("reasoning_effort", "prediction", "audio", "best_off", "min_tokens", "guided_json", "keep_alive", "raw")


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("ChatRequest", None),
        ("CompletionRequest", "ChatRequest"),
        ("OllamaChatRequest", None),
        pytest.param("CompletionRequest", None, marks=pytest.mark.slow),
        pytest.param("OllamaGenerateRequest", None, marks=pytest.mark.slow),  # nearly the one before
    ],
)
def test_every_documented_field_is_taken_at_its_bounds_and_no_other_is(server, name, beside):
    """Fields that another request documents in the same words are left to it, where one stands beside."""
    path, least = LEAST[name]
    schemas = DOCUMENT["components"]["schemas"]
    properties = schemas[name]["properties"]
    known = {} if beside is None else schemas[beside]["properties"]
    own = {field: schema for field, schema in properties.items() if known.get(field) != schema}
    assert len(own) >= 3
    tried = 0
    for field, schema in own.items():
        for value in bounds(schema):
            response = server.post(path, {**least, field: value})
            tried += 1
            if response.status_code != 200:
                error = response.json()["error"]
                param = error["param"] if isinstance(error, dict) else error.partition(":")[0]
                assert (response.status_code, param) == (400, field), response.text
                assert field in TOGETHER, (field, value, response.text)
    assert tried > 2 * len(own)
    if not name.startswith("Ollama"):  # which ignores what it does not know
        others = {field for kind in LEAST for field in DOCUMENT["components"]["schemas"][kind]["properties"]}
        for field in {*others, *UNDOCUMENTED} - properties.keys():
            response = server.post(path, {**least, field: "x"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


@pytest.mark.parametrize("name", LEAST)
def test_every_part_of_a_stream_is_as_the_document_says(server, name):
    path, least = LEAST[name]
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    (schema,) = (entry["x-item-schema"] for entry in content.values() if "x-item-schema" in entry)
    many = {"ChatRequest": {"logprobs": True, "top_logprobs": 1}, "CompletionRequest": {"logprobs": 1, "echo": True}}
    text = server.post(path, {**least, "stream": True, "temperature": 1, **many.get(name, {})}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and line != "data: [DONE]"]
    assert len(lines) > 1
    for line in lines:
        jsonschema.validate(json.loads(line), within(schema))


@short.parametrize()
@settings(max_examples=6, **CALMLY)
def test_requests_made_from_the_document_get_the_answers_that_it_promises(case, server, session):
    """Good and bad ones in turns, the same in every run; no answer is a fault of ours."""
    check(case, server, session)


@pytest.mark.slow
@whole.parametrize()
@settings(max_examples=150, **CALMLY)
def test_many_requests_made_from_the_document_do(case, server, session):
    """The same with every field at, and beside, each of its bounds."""
    check(case, server, session)
