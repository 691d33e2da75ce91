"""The life of a server process: how it starts or does not, what stops it, and what the gate makes of it."""

import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from serving import ServerProcess, wait_for
from test_cli import invoke
from test_gate import result_of

from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.facade import generate
from posttrainllm.adapters.gate import cache
from posttrainllm.adapters.gate.key import gate_key
from posttrainllm.adapters.gate.plan import plan
from posttrainllm.adapters.gate.prompts import read_prompts
from posttrainllm.adapters.serve import lifecycle
from posttrainllm.adapters.serve.command import serve
from posttrainllm.kernel.errors import BackendError

COMPLETIONS = "/v1/completions"
CODE = "def moon_phase(day_of_cycle):\n    "
PLAIN = {"prompt": CODE, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CONTEXT = ("--max-context", "251")
NO_GATE = ("--gate", "off", *CONTEXT)
START = """
from posttrainllm.adapters.runtime import start
start()  # the BLAS comes before MLX
"""
MAIN = """
from posttrainllm.adapters.cli import main
main()
"""


def warnings_of(server):
    return [line for line in server.log.splitlines() if " WARNING " in line or " ERROR " in line]


# the engine fails

FAULT = f"""
import time
{START}
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.serve import answers, lifecycle
answers._BEAT_S = 0.01
lifecycle._LINGER_S = 1.5
whole, steps = Engine.step, []
def step(self):
    steps.append(1)
    time.sleep(0.05)
    if len(steps) > 30:
        raise RuntimeError("the device is gone")
    return whole(self)
Engine.step = step
{MAIN}
"""


def test_an_engine_that_fails_fails_everybody_turns_health_and_ends_the_process(tmp_path):
    """The worker dies: in flight, streamed or not, and waiting."""
    with ServerProcess(tmp_path, *NO_GATE, "--slots", "3", program=FAULT) as server:
        body = {**PLAIN, "max_tokens": 220}

        def read_with_a_client():
            chunks = server.client().completions.create(model="target-16m", **sdk(body), stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

        with server.events(COMPLETIONS, {**body, "stream": True}) as events, ThreadPoolExecutor(3) as threads:
            first = next(event for event in events if not isinstance(event, str))
            assert first["choices"][0]["text"]
            client = threads.submit(read_with_a_client)
            in_flight, waiting = (threads.submit(server.post, COMPLETIONS, body) for _ in range(2))
            rest = list(events)
            assert rest[-1] == "[DONE]"
            assert rest[-2]["error"]["code"] == "internal_error"
            assert any(isinstance(event, str) and event.startswith(":") for event in rest)  # steps are slow here
            for answer in (in_flight.result(), waiting.result()):
                assert answer.status_code == 500
                assert answer.json()["error"]["type"] == "server_error"
            with pytest.raises(openai.APIError, match="the engine failed"):
                client.result()
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "error"
        root = server.get("/")
        assert (root.status_code, root.text) == (503, "the engine failed; the server is going down\n")
        assert server.post(COMPLETIONS, body).status_code == 500
        assert server.process.wait(60) == 1
        assert "the device is gone" in server.log


def sdk(body):
    """Our own field goes beside what the client knows."""
    return {**{name: value for name, value in body.items() if name != "ignore_eos"}, "extra_body": {"ignore_eos": True}}


# the gate


def test_a_broken_verdict_is_said_once_and_in_every_answer_and_decodes_plainly_at_width_1(
    tmp_path, monkeypatch, embedded_pair
):
    """Speculation is off and nobody can tell."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    planned = plan(embedded_pair, read_prompts(None, 2), draft_k=4, max_tokens=32, cut=True)
    assert cache.write_result(gate_key(embedded_pair, planned), result_of("broken")) is None
    with ServerProcess(tmp_path, *CONTEXT) as server:
        answer = server.post(COMPLETIONS, PLAIN).json()
        (card,) = server.get("/v1/models").json()["data"]
        for speculative in (answer["speculative"], server.get("/health").json()["speculative"], card["speculative"]):
            assert (speculative["enabled"], speculative["verdict"]) == (False, "broken")
            assert "why" in speculative["reason"]
            assert speculative["draft_k"] is None
        assert answer["usage"]["draft_proposed"] == 0
        assert answer["usage"]["accept_rate"] is None
        assert answer["timings"]["steps"] == answer["usage"]["completion_tokens"] == 24
        reference = generate(pair=embedded_pair.plain("x"), prompt=CODE, plain_width=1, max_tokens=24, ignore_eos=True)
        assert answer["choices"][0]["text"] == reference.text
        with server.events(COMPLETIONS, {**PLAIN, "stream": True}) as events:
            *_, last, _ = events
        assert last["speculative"] == answer["speculative"]
        (warning,) = warnings_of(server)
        assert "speculation is switched off" in warning
        assert "why" in warning
        assert server.stop() == 0


SMALL_GATE = f"""
{START}
from functools import partial
from posttrainllm.adapters.gate.standing import Extent
from posttrainllm.adapters.serve import boot
first, full = (Extent(prompts=count, max_tokens=8, drawn=1) for count in (2, 3))
boot.boot_standing = partial(boot.boot_standing, first=first, full=full)
boot.full_standing = partial(boot.full_standing, full=full)
"""
ACCEPTS_EVERYTHING = """
from posttrainllm.kernel import accept
accept.coupled_accepts = lambda proposals, choice: proposals >= 0
"""


@pytest.mark.slow
def test_the_gate_is_provisional_at_first_and_whole_once_there_was_time(tmp_path):
    with ServerProcess(tmp_path, *CONTEXT, program=SMALL_GATE + MAIN) as server:
        assert "gate: provisional" in server.log
        before = server.post(COMPLETIONS, PLAIN).json()
        assert before["speculative"]["enabled"] is True
        wait_for(lambda: server.get("/health").json()["speculative"]["verdict"] in ("identical", "width-identical"))
        after = server.post(COMPLETIONS, PLAIN).json()
        assert after["speculative"]["reason"] is None
        assert after["choices"] == before["choices"]
        assert warnings_of(server) == []
        assert server.stop() == 0


@pytest.mark.slow
def test_strict_starts_no_server_unless_the_verdict_is_identical(tmp_path):
    with pytest.raises(AssertionError, match="status 3"):
        ServerProcess(
            tmp_path, *CONTEXT, "--gate", "strict", program=SMALL_GATE + ACCEPTS_EVERYTHING + MAIN
        ).wait_until_ready()
    last = (tmp_path / "serve.log").read_text().splitlines()[-1]
    assert last.startswith("error: --gate strict: got broken, expected identical: ")


# signals


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_what_is_under_way_and_waiting_end_whole_and_takes_nothing_new(tmp_path, number):
    options = (*NO_GATE, "--served-model-name", "small", "--max-tokens-limit", "100", "--log-level", "debug")
    with ServerProcess(tmp_path, *options) as server:
        body = {**PLAIN, "model": "small", "max_tokens": 10**6}
        alone = server.post(COMPLETIONS, body).json()
        assert alone["usage"]["completion_tokens"] == 100
        assert server.post(COMPLETIONS, {**body, "model": "target-16m"}).status_code == 404
        assert "moon_phase" in server.log  # as is said of this level
        with server.events(COMPLETIONS, {**body, "stream": True}) as events, ThreadPoolExecutor(1) as threads:
            text = next(events)["choices"][0]["text"]
            waiting = threads.submit(server.post, COMPLETIONS, body)
            wait_for(lambda: server.get("/health").json()["queue"]["waiting"] == 1)
            server.process.send_signal(number)
            *chunks, done = events
            text += "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert (text, done) == (alone["choices"][0]["text"], "[DONE]")
            assert waiting.result().json()["choices"] == alone["choices"]
        with pytest.raises(httpx.TransportError):
            server.post(COMPLETIONS, body)
        assert server.process.wait(60) == 0
        assert warnings_of(server) == []
        assert "Traceback" not in server.log


SHORT_DRAIN = f"""
{START}
import time
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.serve import lifecycle
lifecycle._DRAIN_S = 1
whole = Engine.step
def step(self):
    time.sleep(0.05)
    return whole(self)
Engine.step = step
{MAIN}
"""


@pytest.mark.parametrize("signals", [1, 2], ids=["the drain is over", "a second signal"])
def test_whoever_is_not_answered_when_the_server_stops_is_told_so(tmp_path, signals):
    with ServerProcess(tmp_path, "--gate", "off", "--max-context", "1000", program=SHORT_DRAIN) as server:
        body = {**PLAIN, "max_tokens": 10**6}
        with server.events(COMPLETIONS, {**body, "stream": True}) as events, ThreadPoolExecutor(1) as threads:
            next(events)
            waiting = threads.submit(server.post, COMPLETIONS, body)
            wait_for(lambda: server.get("/health").json()["queue"]["waiting"] == 1)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                wait_for(lambda: refuses(server))
            *_, error, done = events
            assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
            assert waiting.result().status_code == 503
            assert waiting.result().json()["error"]["code"] == "shutting_down"
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log


ELSEWHERE = f"""
{START}
import signal
from posttrainllm.adapters.serve import lifecycle
whole = lifecycle._announce
def announce(*values):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    whole(*values)
lifecycle._announce = announce
{MAIN}
"""


def test_a_signal_that_does_not_wake_the_engines_thread_stops_an_idle_server_too(tmp_path):
    """Another thread gets it here; one that comes an instruction before that thread sleeps does not wake it either."""
    with ServerProcess(tmp_path, *NO_GATE, program=ELSEWHERE) as server:
        assert server.stop() == 0
        assert "Traceback" not in server.log


LONG_CUT = SHORT_DRAIN.replace("lifecycle._DRAIN_S = 1", "lifecycle._DRAIN_S, lifecycle._CUT_S = 1, 15")


def test_who_stops_in_a_body_or_does_not_read_does_not_keep_a_server_that_stops(tmp_path):
    with ServerProcess(tmp_path, *NO_GATE, "--body-timeout", "100", program=LONG_CUT) as server:
        host, port = server.url.removeprefix("http://").split(":")
        half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        unread = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400
        with socket.create_connection((host, port)) as stopped, socket.create_connection((host, port)) as deaf:
            stopped.settimeout(60)
            stopped.sendall(half)
            deaf.sendall(unread)
            wait_for(lambda: server.get("/health").status_code == 200)
            server.process.send_signal(signal.SIGTERM)
            told = b"".join(iter(lambda: stopped.recv(4096), b""))
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b"shutting_down" in told
            assert server.process.wait(60) == 0
        assert "Cancel" not in server.log  # nobody had to be given up by uvicorn's own limit
        assert "Traceback" not in server.log


def refuses(server):
    try:
        server.get("/health")
    except httpx.TransportError:
        return True
    return False


# options

VARIABLES = {
    "adapter_path": ("lora", "lora"),
    "draft_adapter_path": ("draft-lora", "draft-lora"),
    "kv_bits": ("8", "8"),
    "kv_group_size": ("32", "32"),
    "model": ("a/folder", "a/folder"),
    "draft_model": ("another", "another"),
    "dtype": ("bfloat16", "bfloat16"),
    "no_draft": ("1", True),
    "draft_k": ("auto:7", DraftLength(most=7, auto=True)),
    "forward": ("module", "module"),
    "accept_rule": ("coupled", "coupled"),
    "host": ("::1", "::1"),
    "port": ("81", 81),
    "slots": ("3", 3),
    "max_context": ("99", 99),
    "max_tokens_limit": ("98", 98),
    "prefix_cache_mb": ("7", 7),
    "queue": ("5", 5),
    "gate": ("strict", "strict"),
    "api_key": ("k", "k"),
    "api_key_file": ("key.txt", "key.txt"),
    "cors_origin": ("https://a.example https://b.example", ("https://a.example", "https://b.example")),
    "served_model_name": ("n", "n"),
    "request_timeout": ("2.5", 2.5),
    "header_timeout": ("3.5", 3.5),
    "body_timeout": ("4.5", 4.5),
    "max_connections": ("77", 77),
    "record_dir": ("traces", "traces"),
    "log_level": ("debug", "debug"),
}


def test_every_option_can_be_a_variable(monkeypatch):
    for name, (text, _) in VARIABLES.items():
        monkeypatch.setenv(f"POSTTRAINLLM_{name.upper()}", text)
    settings = {"auto_envvar_prefix": "POSTTRAINLLM", **serve.context_settings}
    found = serve.make_context("serve", [], **settings).params
    assert found == {name: value for name, (_, value) in VARIABLES.items()}


def test_an_empty_variable_for_the_key_starts_no_open_server(monkeypatch):
    monkeypatch.setenv("POSTTRAINLLM_API_KEY", "")
    result = invoke("serve", "--gate", "off")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: POSTTRAINLLM_API_KEY: got an empty variable")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "70000"), ("--port", "70000", "65535")),
        (("--port", "-1"), ("--port", "-1")),
        (("--port", "http"), ("--port", "http")),
        (("--slots", "0"), ("--slots", "0", "1 to")),
        (("--queue", "-1"), ("--queue", "-1")),
        (("--prefix-cache-mb", "-1"), ("--prefix-cache-mb", "-1", "0 to")),
        (("--max-context", "1"), ("--max-context", "1", "2 to")),
        (("--max-tokens-limit", "0"), ("--max-tokens-limit", "0")),
        (("--draft-k", "0"), ("--draft-k", "0", "1 to 32")),
        (("--draft-k", "33"), ("--draft-k", "33", "1 to 32")),
        (("--request-timeout", "0"), ("--request-timeout", "0")),
        (("--request-timeout", "nan"), ("--request-timeout", "nan")),
        (("--request-timeout", "inf"), ("--request-timeout", "inf")),
        (("--gate", "maybe"), ("--gate", "maybe", "strict")),
        (("--header-timeout", "0"), ("--header-timeout", "0", "more than 0")),
        (("--body-timeout", "inf"), ("--body-timeout", "inf")),
        (("--max-connections", "0"), ("--max-connections", "0", "1 to")),
        (("--log-level", "loud"), ("--log-level", "loud")),
        (("--accept-rule", "greedy"), ("--accept-rule", "greedy")),
        (("--api-key", ""), ("--api-key",)),
        (("--api-key", "two\nlines"), ("--api-key",)),
        (("--served-model-name", "two\nlines"), ("--served-model-name",)),
        (("--cors-origin", "app.example"), ("--cors-origin", "app.example", "https://")),
        (("--cors-origin", "https://app.example/"), ("--cors-origin", "https://app.example/")),
        (("--no-such-option",), ("--no-such-option",)),
    ],
)
def test_a_bad_option_is_one_line_and_status_2_before_anything_is_loaded(arguments, words):
    result = invoke("serve", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert "two" not in line or "\n" not in line


def start_in_vain(*arguments):
    """Status, and what is on standard error but the log."""
    command = [sys.executable, "-m", "posttrainllm", "serve", "--port", "0", "--gate", "off", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]
    return done.returncode, lines


def test_what_cannot_be_started_is_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        cases = [
            (("--port", taken), 1, f"127.0.0.1:{taken}: cannot listen there: "),
            (("--host", "no host"), 2, "--host: got 'no host'"),
            (("--host", "203.0.113.1"), 1, "203.0.113.1:0: cannot listen there: "),
            (("--record-dir", file), 2, "--record-dir: "),
            ((tmp_path / "none",), 1, str(tmp_path / "none")),
            (("--max-context", "99999"), 2, "--max-context: got 99999, expected at most the model's "),
            (("--no-draft", "--gate", "strict"), 2, "--gate strict: got no draft"),
        ]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda case: start_in_vain(*case[0]), cases))
    for (arguments, status, words), (code, lines) in zip(cases, found, strict=True):
        assert (code, len(lines)) == (status, 1), (arguments, lines)
        assert lines[0].startswith("error: ")
        assert words in lines[0]


def test_an_address_that_another_server_takes_while_this_one_loads_is_one_error():
    """Two sockets may be bound to one address as long as neither listens."""
    with lifecycle.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with lifecycle.bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(BackendError, match=f"127.0.0.1:{port}: cannot listen there"):
                lifecycle.listen(second)


# time


def test_an_answer_that_takes_too_long_ends_with_504_and_frees_its_row(tmp_path):
    with ServerProcess(tmp_path, *NO_GATE, "--request-timeout", "0.001") as server:
        body = {**PLAIN, "max_tokens": 220}
        late = server.post(COMPLETIONS, body)
        assert late.status_code == 504
        assert "0.001 s" in late.json()["error"]["message"]
        with server.events(COMPLETIONS, {**body, "stream": True}) as events:
            *_, error, done = events
        assert (error["error"]["code"], done) == ("timeout", "[DONE]")
        wait_for(lambda: server.get("/health").json()["slots"]["busy"] == 0)
        assert len(re.findall(r"timed out, \d+ \+ 0 tokens", server.log)) == 2


INTERRUPTED = """
import os, signal, sys
class Stream:
    # as a buffered stream does: a write that interrupts another one raises
    def __init__(self, under):
        self.under, self.busy = under, False
    def write(self, text):
        if self.busy:
            raise RuntimeError("reentrant call")
        self.busy = True
        try:
            self.under.write(text)
            if " serving " in text:
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            self.busy = False
    def flush(self):
        self.under.flush()
    def __getattr__(self, name):
        return getattr(self.under, name)
sys.stderr = Stream(sys.stderr)
from posttrainllm.adapters.cli import cli
cli.main(sys.argv[1:])
"""


def test_a_signal_in_the_middle_of_a_line_of_the_log_stops_the_server(tmp_path):
    server = ServerProcess(tmp_path, *CONTEXT, "--gate", "off", program=INTERRUPTED)
    try:
        assert server.process.wait(timeout=120) == 0, server.log
    finally:
        server.process.kill()
