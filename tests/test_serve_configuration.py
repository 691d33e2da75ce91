"""Where the options of `serve` come from: the command line, variables, a file; and the key, which is never shown."""

import sys
from pathlib import Path

import attrs
import pytest
from serving import ServerProcess
from test_cli import invoke
from test_serve_process import VARIABLES

from posttrainllm.adapters.draft_length import DraftLength
from posttrainllm.adapters.serve import lifecycle
from posttrainllm.adapters.serve.command import serve
from posttrainllm.adapters.serve.configuration import unknown_variables

KEY = "a key that must stay secret"
WHOLE = """
model = "a/folder"
draft-model = "another"
dtype = "bfloat16"
no-draft = true
draft-k = "auto:7"
forward = "module"
adapter-path = "lora"
draft-adapter-path = "draft-lora"
kv-bits = "8"
kv-group-size = "32"
accept-rule = "coupled"
host = "::1"
port = 81
slots = 3
max-context = 99
max-tokens-limit = 98
prefix-cache-mb = 7
queue = 5
gate = "strict"
api-key = "k"
api-key-file = "key.txt"
cors-origin = ["https://a.example", "https://b.example"]
served-model-name = "n"
request-timeout = 2.5
header-timeout = 3.5
body-timeout = 4.5
max-connections = 77
record-dir = "traces"
log-level = "debug"
"""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """What should have been refused fails here, in place of serving until somebody stops it."""

    def serve_until_stopped(*_, **__):
        raise AssertionError("a server was started")

    monkeypatch.setattr(lifecycle, "serve_until_stopped", serve_until_stopped)


@pytest.fixture
def started(monkeypatch):
    """What `serve` would be started with; nothing is loaded."""
    seen = []

    def serve_until_stopped(options, listener, *, cors_origins, limits):
        seen.append((options, listener.getsockname(), cors_origins))
        return 0

    monkeypatch.setattr(lifecycle, "serve_until_stopped", serve_until_stopped)

    def start(*arguments):
        result = invoke("serve", *arguments)
        assert result.exit_code == 0, result.stderr
        options, address, cors_origins = seen.pop()
        return {**attrs.asdict(options, recurse=False), "port": address[1], "cors_origin": cors_origins}

    return start


def written(folder: Path, text: str, name: str = "serve.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def parsed(*arguments):
    settings = {"auto_envvar_prefix": "POSTTRAINLLM", **serve.context_settings}
    return serve.make_context("serve", list(arguments), **settings).params


def test_every_option_can_stand_in_a_file(tmp_path, monkeypatch):
    path = written(tmp_path, WHOLE)
    expected = {name: value for name, (_, value) in VARIABLES.items()}
    assert parsed("--config", path) == expected
    monkeypatch.setenv("POSTTRAINLLM_CONFIG", path)
    assert parsed() == expected


def test_numbers_are_taken_where_an_option_takes_them(tmp_path):
    found = parsed("--config", written(tmp_path, "draft-k = 3\nrequest-timeout = 5\nno-draft = false\n"))
    assert found["draft_k"] == DraftLength(most=3)
    assert (found["request_timeout"], found["no_draft"]) == (5.0, False)


def test_the_command_line_comes_before_variables_before_the_file_before_defaults(tmp_path, monkeypatch, started):
    """Every option but one is told apart by who set it."""
    path = written(tmp_path, "slots = 2\nqueue = 2\nmax-context = 200\nport = 0\nno-draft = true\n")
    assert {name: started("--port", "0")[name] for name in ("slots", "queue", "max_context", "speculate")} == {
        "slots": 1,
        "queue": 64,
        "max_context": None,
        "speculate": True,
    }
    monkeypatch.setenv("POSTTRAINLLM_SLOTS", "3")
    monkeypatch.setenv("POSTTRAINLLM_QUEUE", "3")
    found = started("--config", path, "--slots", "4")
    assert [found[name] for name in ("slots", "queue", "max_context", "speculate")] == [4, 3, 200, False]
    assert found["gate"] == "auto"


BAD_FILES = [
    ("prot = 80\n", ("'prot'", "expected an option of `serve`", "did you mean port?")),
    ("max_context = 80\n", ("'max_context'", "did you mean max-context?")),
    ("config = 'other.toml'\n", ("'config'",)),
    ("help = true\n", ("'help'",)),
    ("[serve]\nport = 80\n", ("'serve'", "expected an option")),
    ("port = '80'\n", ("port: got a text, '80', expected a whole number",)),
    ("port = true\n", ("port: got true or false, 'True', expected a whole number",)),
    ("port = 1.5\n", ("port: got a number, '1.5', expected a whole number",)),
    ("request-timeout = 'long'\n", ("request-timeout: got a text, 'long', expected a number",)),
    ("no-draft = 1\n", ("no-draft: got a whole number, '1', expected true or false",)),
    ("draft-k = 1.5\n", ("draft-k: got a number, '1.5', expected a whole number or a text",)),
    ("draft-k = [1]\n", ("draft-k: got a list, expected a whole number or a text",)),
    ("model = 2026-11-30\n", ("model: got a date or a time", "expected a text")),
    ("cors-origin = '*'\n", ("cors-origin: got a text, '*', expected a list of texts",)),
    ("cors-origin = [1]\n", ("cors-origin: got a list, expected a list of texts",)),
    ("port = {}\n", ("port: got a table, expected a whole number",)),
    ("api-key = 123\n", ("api-key: got a whole number, expected a text",)),
    ("api-key = ''\n", ("api-key: got an empty text, expected a text",)),
    ("port = 80\nport = 81\n", ("got no TOML", "line 2")),
    ("port 80\n", ("got no TOML", "line 1")),
    # known keys, types that fit, values that do not: as on the command line
    ("port = 70000\n", ("--port: got 70000, expected 0 to 65535",)),
    ("gate = 'maybe'\n", ("--gate", "maybe")),
    ("draft-k = 99\n", ("--draft-k: got 99",)),
]


@pytest.mark.parametrize(("text", "words"), BAD_FILES, ids=lambda value: str(value)[:24])
def test_a_bad_file_is_one_line_with_got_and_expected(tmp_path, text, words):
    result = invoke("serve", "--config", written(tmp_path, text))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert "123" not in line.replace(str(tmp_path), "")  # what may be a key is not shown


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "directory"),
        (lambda path: path.write_bytes(b"port = 80 # \xff"), "byte 12 is no UTF-8"),
        (lambda path: path.write_bytes(b"#" * (2**20 + 1)), "more than 1048576 bytes"),
        (lambda path: path.write_bytes(b"a = " + b"[" * 100_000), "got no TOML"),
    ],
    ids=["none", "a folder", "no UTF-8", "large", "deep"],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, make, words):
    path = tmp_path / "serve.toml"
    make(path)
    result = invoke("serve", "--config", str(path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --config: {path}: ")
    assert words in line


def test_a_variable_of_the_wrong_type_is_one_line_that_names_the_option(monkeypatch):
    """A container platform may set POSTTRAINLLM_PORT=tcp://10.0.0.1:8090 for a service of that name."""
    monkeypatch.setenv("POSTTRAINLLM_PORT", "tcp://10.0.0.1:8090")
    result = invoke("serve")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "--port" in line
    assert "tcp://10.0.0.1:8090" in line


def test_a_variable_that_no_option_reads_is_named_without_its_value():
    environment = {"POSTTRAINLLM_API_KEYS": KEY, "POSTTRAINLLM_PORT": "1", "POSTTRAINLLM_BLAS": "off", "PATH": ""}
    environment |= {f"POSTTRAINLLM_{name.upper()}": "" for name in VARIABLES} | {"POSTTRAINLLM_CONFIG": ""}
    assert unknown_variables(serve, environment, prefix="POSTTRAINLLM_") == ["POSTTRAINLLM_API_KEYS"]


# the key


def test_the_key_comes_from_an_option_a_variable_a_file_or_the_configuration(tmp_path, monkeypatch, started):
    file = written(tmp_path, f"{KEY}\n", "key")
    assert started("--port", "0")["api_key"] is None
    assert started("--port", "0", "--api-key-file", file)["api_key"] == KEY
    assert started("--port", "0", "--config", written(tmp_path, f"api-key-file = '{file}'\n"))["api_key"] == KEY
    assert started("--port", "0", "--config", written(tmp_path, "api-key = 'k1'\n"))["api_key"] == "k1"
    monkeypatch.setenv("POSTTRAINLLM_API_KEY", "k2")
    assert started("--port", "0")["api_key"] == "k2"
    # a file of the command line before a text of a variable, and a text of a variable before a file of the file
    assert started("--port", "0", "--api-key-file", file)["api_key"] == KEY
    assert started("--port", "0", "--config", written(tmp_path, f"api-key-file = '{file}'\n"))["api_key"] == "k2"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "got nothing, or what a header cannot carry"),
        (b"\n", "got nothing, or what a header cannot carry"),
        (b"two\nlines\n", "cannot carry"),
        (b"caf\xe9", "cannot carry"),
        (b"k" * 4097, "more than 4096 bytes"),
        (None, "No such file"),
    ],
    ids=["empty", "a line's end", "two lines", "no ASCII", "long", "none"],
)
def test_a_key_file_that_holds_no_key_starts_no_server(tmp_path, content, words):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    result = invoke("serve", "--api-key-file", str(path))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --api-key-file: {path}: ")
    assert words in line
    assert "two" not in line


def test_two_keys_from_one_place_are_refused(tmp_path):
    file = written(tmp_path, KEY, "key")
    config = written(tmp_path, f"api-key = 'k'\napi-key-file = '{file}'\n")
    for arguments in (("--api-key", "k", "--api-key-file", file), ("--config", config)):
        result = invoke("serve", *arguments)
        assert (result.exit_code, result.stderr) == (
            2,
            "error: --api-key-file: got it beside --api-key, expected one of them\n",
        )


@pytest.mark.parametrize("name", ["POSTTRAINLLM_API_KEY_FILE", "POSTTRAINLLM_CONFIG"])
def test_an_empty_variable_for_a_file_starts_no_open_server(monkeypatch, name):
    monkeypatch.setenv(name, "")
    result = invoke("serve", "--gate", "off")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {name}: got an empty variable, expected a path")


def test_the_key_is_in_no_line_of_the_log_nor_in_the_process_s_arguments(tmp_path):
    """At the level that shows prompts, with requests that carry it, rightly and wrongly, and one that fails."""
    config = written(
        tmp_path,
        f"api-key-file = '{written(tmp_path, KEY, 'key')}'\nmax-context = 251\ngate = 'off'\nlog-level = 'debug'\n",
    )
    with ServerProcess(tmp_path, "--config", config, POSTTRAINLLM_API_KEYS=KEY) as server:
        body = {"prompt": "x", "max_tokens": 2}
        right = {"authorization": f"Bearer {KEY}"}
        assert server.post("/v1/completions", body, headers=right).status_code == 200
        assert server.post("/v1/completions", {"bad": 1}, headers=right).status_code == 400
        assert server.post("/v1/completions", body, headers={"authorization": f"Bearer {KEY} "[:-2]}).status_code == 401
        assert server.get("/v1/models", headers={"authorization": f"Basic {KEY}"}).status_code == 401
        assert server.get("/health").status_code == 200
        if sys.platform == "linux":
            assert KEY.encode() not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
        assert server.stop() == 0
        assert "with a key" in server.log
        assert "WARNING no option of this command: POSTTRAINLLM_API_KEYS\n" in server.log
        assert "'x'" in server.log
        assert KEY not in server.log
