"""`evals/specdec-throughput.sh --serve`: what it asks a server, and what it says of the answers."""

import functools
import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from posttrainllm.evals import serve_throughput
from posttrainllm.evals.bench.asking import Answer, Asker, Group
from posttrainllm.evals.bench.check import problems
from posttrainllm.evals.bench.server import running_server
from posttrainllm.evals.bench.serving import format_serving, summarize_serving
from posttrainllm.kernel.errors import PosttrainllmError

SMALL = ("--repeats", "4", "--prompt-tokens", "6", "--max-tokens", "5")
STATE = {"enabled": True, "reason": None, "draft_k": 4, "accept_rule": None, "verdict": "identical"}


read_tokenizer = functools.cache(serve_throughput._tokenizer)


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    monkeypatch.setattr(serve_throughput, "_tokenizer", read_tokenizer)


class Fake:
    """A server that continues a prompt with its own ids; `change(body, answer)` may alter what it says."""

    def __init__(self, change=lambda body, answer: None, card=None):
        self.asked, self.keys, self.lock = [], [], threading.Lock()
        self.change = change
        self.card = {"id": "fake", "device": "cpu", "dtype": "float32", "speculative": STATE} | (card or {})
        self.meet = None

    def complete(self, body):
        with self.lock:
            self.asked.append(body)
        if self.meet is not None:
            self.meet.wait(10)  # until as many requests are here at the same time
        drafted, count = body.get("speculative", False), body["max_tokens"]
        accepted = len(self.asked) % 5 if drafted else 0
        answer = {
            "choices": [{"text": " ".join(map(str, body["prompt"]))}],
            "usage": {
                "completion_tokens": count,
                "draft_proposed": 4 if drafted else 0,
                "draft_accepted": accepted,
                "accept_rate": accepted / 4 if drafted else None,
            },
            "speculative": {**STATE, "enabled": drafted},
            "timings": {"decode_tokens_per_s": 300.0 if drafted else 200.0},
        }
        self.change(body, answer)
        return answer


@contextmanager
def served(fake):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            fake.keys.append(self.headers.get("authorization"))
            self.reply(200, {"data": [fake.card]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = fake.complete(body)
            self.reply(answer.pop("status", 200), answer.pop("instead", answer))

        def reply(self, status, value):
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # its shutdown waits as long
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measured(fake, *arguments):
    with served(fake) as url:
        return CliRunner().invoke(serve_throughput.command, ["--url", url, *SMALL, *arguments])


# what is asked


def test_it_asks_the_standard_workload_in_turns_after_a_warm_up():
    fake = Fake()
    done = measured(fake)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert [body["speculative"] for body in fake.asked] == [
        *(True, False, True, False, False, True),
        *(True, False, False, True),
    ]
    prompts = [tuple(body["prompt"]) for body in fake.asked]
    assert prompts[::2] == prompts[1::2]  # both are asked for each prompt before the next one
    assert len(set(prompts)) == 5  # case: repeated prompts flatter a benchmark
    assert prompts[0] not in prompts[2:]  # the warm-up's own
    for body in fake.asked:
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0, True)
        assert len(body["prompt"]) == 6
    result = json.loads(done.stdout.splitlines()[-1])
    assert [row["prompts"] for row in result["rows"]] == [4, 4]


def test_the_prompts_are_those_of_bench(embedded_pair):
    from posttrainllm.evals.accept_rate import HELD_OUT, read_prompts
    from posttrainllm.evals.throughput import choose_prompts

    fake = Fake()
    measured(fake)
    expected = choose_prompts(embedded_pair.tokenizer, read_prompts(HELD_OUT), 6, 5)
    assert [body["prompt"] for body in fake.asked[::2]] == expected


def test_parallel_requests_are_sent_at_the_same_time():
    fake = Fake()
    fake.meet = threading.Barrier(2)
    done = measured(fake, "--parallel", "2")
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert not fake.meet.broken
    for first in range(0, len(fake.asked), 2):
        one, other = fake.asked[first : first + 2]
        assert one["speculative"] == other["speculative"]
        assert one["prompt"] != other["prompt"]
    assert json.loads(done.stdout.splitlines()[-1])["parallel"] == 2


def test_the_key_is_sent():
    fake = Fake()
    measured(fake, "--api-key", "secret")
    assert fake.keys == ["Bearer secret"]


# what is said


def test_it_prints_a_table_and_ends_in_one_json_line():
    done = measured(Fake())
    *table, line = done.stdout.splitlines()
    assert any(text.startswith("speculative: true") and "300.0" in text for text in table)
    assert any(
        text.startswith("speculative: false") and text.endswith("4 of 4 the same as speculative") for text in table
    )
    assert any("accept rate of 4 requests: mean" in text for text in table)
    assert max(map(len, table)) <= 120
    assert problems(line, 0.0) == []
    assert measured(Fake(), "--json").stdout.count("\n") == 1


def answer(text, rate, decode=100.0, tokens=10):
    return Answer(
        text=text,
        tokens=tokens,
        proposed=0 if rate is None else 10,
        accepted=0 if rate is None else round(rate * 10),
        accept_rate=rate,
        decode_tokens_per_s=decode,
        enabled=rate is not None,
        reason=None,
    )


def group(seconds, *answers):
    return Group(answers=answers, seconds=seconds)


def test_rates_ratios_and_what_was_accepted_are_those_of_the_answers():
    rounds = [
        [
            group(0.2, answer("a", 0.6), answer("b", 0.2)),
            group(0.4, answer("a", None), answer("b", None)),
            group(0.25, answer("a", None), answer("c", None)),
        ],
        [
            group(0.1, answer("d", 1.0), answer("e", None)),
            group(0.5, answer("d", None), answer("e", None)),
            group(1.0, answer("d", None), answer("e", None)),
        ],
    ]
    value = summarize_serving(["true", "false", "plain"], rounds)
    first, second, third = value["rows"]
    assert (first["tok_s"], first["tok_s_range"]) == (150.0, [100.0, 200.0])
    assert first["ratio_range"] == [1.25, 5.0]  # 100 to 80, 200 to 40
    assert second["ratio_range"] == [0.625, 1.0]
    assert (first["equal"], second["equal"], third["equal"]) == (4, 4, 3)
    assert value["failed"] is False  # the server without a draft has another width: near-ties may differ
    assert value["accept_rate"] == {"requests": 3, "mean": 0.6, "min": 0.2, "share_0.6": 0.6667, "pooled": 0.6}
    assert any("minimum 0.200, 67% at 0.6 or more" in line for line in format_serving(value))


def test_one_answer_has_no_rate_where_the_server_gives_none():
    rounds = [[group(1.0, answer("a", 0.5, decode=None)), group(1.0, answer("a", None, decode=None))]]
    assert summarize_serving(["true", "false"], rounds)["rows"][0]["decode_tok_s"] is None


def test_a_text_that_differs_is_reported_as_failed_and_not_as_fast():
    """Case: a fast wrong answer, to one prompt of those that are counted."""

    def wrong(body, answer):
        if body["speculative"] and len(fake.asked) > 8:
            answer["choices"][0]["text"] += "!"

    fake = Fake(wrong)
    done = measured(fake)
    assert done.exit_code == 3
    *table, line = done.stdout.splitlines()
    row = next(text for text in table if text.startswith("speculative: true"))
    assert "failed" in row
    assert "300.0" not in row
    assert json.loads(line)["failed"] is True
    assert "speculative: false: 3 of 4 texts are those of speculative: true" in problems(line, 0.0)


def test_too_low_an_accept_rate_is_a_problem_where_one_is_expected():
    line = measured(Fake()).stdout.splitlines()[-1]
    mean = json.loads(line)["accept_rate"]["mean"]
    assert problems(line, mean) == []
    assert problems(line, mean + 0.01) == [f"got a mean accept rate of {mean}, expected {mean + 0.01} or more"]


def test_a_result_that_lacks_something_is_told_so():
    value = json.loads(measured(Fake()).stdout.splitlines()[-1])
    del value["server"], value["rows"][0]["ratio"]
    assert problems(json.dumps(value), 0.0) == ["server is missing", "speculative: true: ratio is missing"]


# what goes wrong


def failed(fake, *arguments):
    done = measured(fake, *arguments)
    assert isinstance(done.exception, PosttrainllmError), done.exception
    assert len(str(done.exception).splitlines()) == 1
    return str(done.exception)


def test_a_server_that_does_not_speculate_is_not_measured():
    off = {"speculative": {**STATE, "enabled": False, "reason": "no draft model was given"}}
    assert failed(Fake(card=off)) == "the server does not speculate: no draft model was given"
    assert "does not say whether it speculates" in failed(Fake(card={"speculative": None}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 500, "instead": {"error": {"message": "the engine failed"}}}, "got status 500, expected 200: the"),
        ({"status": 429, "instead": {"error": "full"}}, "got status 429, expected 200: full"),
        ({"status": 502, "instead": b"<html>"}, "got status 502 and no JSON"),
        ({"instead": []}, "got no answer of `posttrainllm serve`: TypeError"),
        ({"usage": {}}, "got no answer of `posttrainllm serve`: KeyError: 'completion_tokens'"),
        ({"choices": []}, "got no answer of `posttrainllm serve`: IndexError"),
    ],
)
def test_an_answer_that_is_an_error_is_one_line(change, message):
    assert message in failed(Fake(lambda body, answer: answer.update(change)))


def test_an_answer_that_is_shorter_than_asked_for_is_not_counted_as_fast():
    assert "got an answer of 3 tokens, expected 5" in failed(
        Fake(lambda body, answer: answer["usage"].update(completion_tokens=3))
    )


def test_a_server_that_is_not_there_is_one_line():
    with served(Fake()) as url:
        pass
    done = CliRunner().invoke(serve_throughput.command, ["--url", url, *SMALL])
    assert str(done.exception).startswith(f"{url}/v1/models: ")


@pytest.mark.parametrize("url", ["", "nonsense", "http://", "ftp://x", "http://[", "http://127.0.0.1:99999"])
def test_a_url_that_is_none_is_one_line(url):
    done = CliRunner().invoke(serve_throughput.command, ["--url", url, *SMALL])
    assert isinstance(done.exception, PosttrainllmError), done.exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "--repeats: got 0, expected 1 or more"),
        (("--parallel", "0"), "--parallel: got 0, expected 1 or more"),
        (("--parallel", "3"), "--repeats: got 4, expected a multiple of --parallel, 3"),
        (("--max-tokens", "0"), "--max-tokens: got 0"),
        (("--prompt-tokens", "0"), "--prompt-tokens: got 0"),
        (("--draft-k", "0"), "--draft-k: got 0, expected 1 to 32"),
        (("--repeats", "40"), "--repeats: got 40, expected at most 38: a prompt of 6 tokens for each and 1 to warm up"),
        (("--repeats", "38", "--parallel", "2"), "--repeats: got 38, expected at most 37"),
        (("--prompts-file", "/nowhere"), "/nowhere: No such file"),
    ],
)
def test_bad_options_are_said_before_anything_is_asked(arguments, message):
    fake = Fake()
    assert message in failed(fake, *arguments)
    assert fake.asked == fake.keys == []


def test_a_model_without_a_draft_is_refused_before_a_server_starts(tiny_checkpoint):
    done = CliRunner().invoke(serve_throughput.command, [str(tiny_checkpoint)])
    assert "got MODEL without --draft-model" in str(done.exception)


# the process


def test_a_server_that_ends_before_it_answers_is_told_with_its_last_line():
    told = pytest.raises(PosttrainllmError, match=r"the server ended with status 2 before it answered: .*draft-k")
    with told, running_server(["--draft-k", "99"]):
        pass


@pytest.mark.slow
def test_a_server_that_does_not_answer_in_time_is_ended(tiny_checkpoint):
    told = pytest.raises(PosttrainllmError, match="did not answer within 0 s")
    with told, running_server([str(tiny_checkpoint)], start_s=0.2):
        pass


@pytest.mark.slow
def test_the_script_measures_a_real_server_and_keeps_table_and_result(tmp_path):
    script = Path(__file__).parent.parent / "evals" / "specdec-throughput.sh"
    done = subprocess.run(
        [script, "--serve", "--short", "--out", str(tmp_path / "kept"), "--max-tokens", "24"],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"table.txt", "result.json"}
    result = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert result["benchmark"] == "serve-throughput"
    assert [row["name"] for row in result["rows"]] == [
        *("speculative: true", "speculative: false", "server without a draft")
    ]
    assert result["rows"][1]["equal"] == 3


@pytest.mark.slow
def test_requests_of_a_real_server_with_slots_have_the_texts_that_they_have_without_the_draft():
    arguments = ["--parallel", "2", "--repeats", "4", "--max-tokens", "24", "--no-plain", "--json"]
    done = CliRunner().invoke(serve_throughput.command, arguments)
    assert done.exit_code == 0, done.exception
    value = json.loads(done.stdout)
    assert value["rows"][1]["equal"] == 4
    assert value["accept_rate"]["requests"] == 4


def test_an_asker_holds_no_connection_after_it_is_closed():
    with served(Fake()) as url:
        asker = Asker(url, local=True)
        asker.card()
        asker.close()
        with pytest.raises(RuntimeError, match="closed"):
            asker.card()
