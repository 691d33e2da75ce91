"""Models by their id of the hub, from a stand-in for it on this machine."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from adapter_files import modules_of, save_mlx_lm
from support import save_tiny_llama

from posttrainllm.adapters.loading.hub import locate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn(BaseHTTPRequestHandler):
    """The few answers of the hub that a download needs."""

    folder = None
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, *, body):
        path = self.path.split("?")[0]
        self.asked.append(path)
        files = {file.name: file for file in self.folder.iterdir()}
        if path.startswith("/api/models/owner/tiny/revision/"):
            siblings = [{"rfilename": name} for name in sorted(files)]
            return self.send(json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}).encode(), body)
        if path.startswith("/api/models/owner/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": name} for name, file in files.items()
            ]
            return self.send(json.dumps(entries).encode(), body)
        if path.startswith("/owner/tiny/resolve/") and path.rsplit("/", 1)[-1] in files:
            return self.send(files[path.rsplit("/", 1)[-1]].read_bytes(), body)
        self.send_response(404)
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def send(self, content, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """Environment of a process whose hub is here and whose cache is empty."""
    StandIn.folder, StandIn.asked = save_tiny_llama(tmp_path / "tiny", seed=1), []
    (StandIn.folder / "modeling_tiny.py").write_text("raise SystemExit('a checkpoint may not run code')")
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    yield {
        **kept,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "cache"),
        "XDG_CACHE_HOME": str(tmp_path / "own"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    server.shutdown()
    server.server_close()


def sample(model, environment, **changes):
    return subprocess.run(
        [sys.executable, "-m", "posttrainllm", "sample", model, "--prompt", "def", "--max-tokens", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | changes,
    )


def test_an_id_of_the_hub_is_downloaded_once_without_its_code(hub):
    done = sample("owner/tiny", hub)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["model"] == "owner/tiny"
    assert len(result["token_ids"]) == 4
    assert any(path.endswith("/model.safetensors") for path in StandIn.asked)
    assert not any(path.endswith(".py") for path in StandIn.asked)
    offline = sample("owner/tiny", hub, HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout)["token_ids"] == result["token_ids"]


def test_an_adapter_may_be_an_id_of_the_hub(hub, tmp_path):
    save_mlx_lm(StandIn.folder, modules_of(2))
    done = sample("owner/tiny", hub)
    command = [sys.executable, "-m", "posttrainllm", "sample", "owner/tiny", "--adapter-path", "owner/tiny"]
    command += ["--prompt", "def", "--max-tokens", "4", "--json", "--record", str(tmp_path / "trace.jsonl")]
    adapted = subprocess.run(command, capture_output=True, text=True, timeout=300, env=hub)
    assert adapted.returncode == 0, adapted.stderr
    assert json.loads(adapted.stdout)["adapters"] == {"target": "owner/tiny"}
    assert json.loads(adapted.stdout)["token_ids"] != json.loads(done.stdout)["token_ids"]
    assert any(path.endswith("/adapters.safetensors") for path in StandIn.asked)


def test_a_pair_of_the_hub_can_be_gated_and_its_traces_replayed(hub, tmp_path):
    trace = str(tmp_path / "trace.jsonl")
    for arguments in (
        ["gate", "owner/tiny", "--draft-model", "owner/tiny", "--prompts", "2", "--max-tokens", "4"],
        [
            "sample",
            "owner/tiny",
            "--draft-model",
            "owner/tiny",
            "--prompt",
            "def",
            "--max-tokens",
            "4",
            "--record",
            trace,
        ],
        ["replay", trace],
    ):
        command = [sys.executable, "-m", "posttrainllm", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=hub)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("owner/huge", {}, "the hub answers 404 (does it exist, is it private or gated?)"),
        ("owner/tiny", {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached and its cache here does not hold it"),
        ("owner/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached"),
    ],
    ids=["unknown", "offline", "unreachable"],
)
def test_an_id_that_cannot_be_had_is_one_line(hub, model, changes, message):
    done = sample(model, hub, **changes)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {model}: got neither a directory here nor a model of the hub: {message}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "/a/b", "a/b/c", "../a/b", "~/a"])
def test_what_cannot_be_an_id_is_taken_as_a_path(path):
    assert str(locate(path)) == path.removeprefix("./")
