"""A server's own description of its API: it is valid, and what it says is what is done (by schemathesis)."""

import attrs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from serving import ServerProcess, wait_for
from test_ollama import SETTINGS

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
