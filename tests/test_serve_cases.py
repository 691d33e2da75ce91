"""What servers were seen to get wrong, each as it has to be here: requests to a real process, as raw HTTP."""

import json
import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from serving import ServerProcess, wait_for
from support import save_tiny_llama

from posttrainllm.adapters.facade import generate, load
from posttrainllm.adapters.replay.reading import read_trace

KEY = "a secret key"
CONTEXT, SMALL_CONTEXT, DRAFT_K = 251, 64, 4
VOCABULARY = 4096
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CODE = "def moon_phase(day_of_cycle):\n    "
PLAIN = {"prompt": CODE, "max_tokens": 24, "temperature": 0}
SPOKEN = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two slots and room for four that wait."""
    options = ("--gate", "off", "--slots", "2", "--queue", "4", "--max-context", str(CONTEXT))
    folder = tmp_path_factory.mktemp("cases")
    more = ("--cors-origin", "https://app.example", "--record-dir", str(folder / "traces"))
    with ServerProcess(folder, *options, *more, POSTTRAINLLM_API_KEY=KEY) as server:
        server.headers = {"authorization": f"Bearer {KEY}"}
        server.traces = folder / "traces"
        yield server


@pytest.fixture(scope="module")
def small_server(tmp_path_factory):
    """A context that a window of K + 1 = 9 runs past."""
    options = ("--gate", "off", "--draft-k", "8", "--max-context", str(SMALL_CONTEXT))
    with ServerProcess(tmp_path_factory.mktemp("small"), *options) as server:
        yield server


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def complete(server, **changes):
    """The choice and the usage of a completion."""
    response = server.post(COMPLETIONS, {**PLAIN, **changes})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0], response.json()["usage"]


def streamed(server, **changes):
    """Deltas, finish reason and usage of a streamed completion."""
    with server.events(COMPLETIONS, {**PLAIN, **changes, "stream": True}) as events:
        *chunks, done = events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["text"] for chunk in chunks]
    return deltas, chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["usage"]


def assert_refused(response, status, *words, param=...):
    """An error in OpenAI's shape, of one line, that says what it must."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    for word in words:
        assert word in error["message"]
    if param is not ...:
        assert error["param"] == param


def assert_still_answers(server):
    assert text_of(server.post(COMPLETIONS, {**PLAIN, "max_tokens": 2}))


def busy(server):
    """Rows in use and choices that wait."""
    health = server.get("/health").json()
    return health["slots"]["busy"], health["queue"]["waiting"]


# EOS


@pytest.fixture(scope="module")
def stubborn_pair(tmp_path_factory):
    """A target that drafts for itself: folders, and what it says with no EOS in the way."""
    folder = tmp_path_factory.mktemp("eos")
    target = save_tiny_llama(folder / "target", seed=3)
    draft = shutil.copytree(target, folder / "draft")
    pair = load(model=target, speculate=False)
    prompts = ["x", CODE, "import numpy", "1, 4, 9,", "The", "while True:"]
    ids = {
        prompt: generate(pair=pair, prompt=prompt, plain_width=5, max_tokens=20, ignore_eos=True).token_ids
        for prompt in prompts
    }
    return target, draft, ids, pair.tokenizer


def inside_a_block(ids):
    """Places of first occurrences that are neither the first nor the last of a window of 5."""
    return [index for index in range(len(ids)) if index % 5 in (1, 2, 3) and ids[index] not in ids[:index]]


def test_every_eos_of_the_checkpoint_ends_a_reply_inside_an_accepted_block(stubborn_pair, tmp_path):
    """EOS inside an accepted block; several EOS ids, of config.json and generation_config.json."""
    target, draft, ids, tokenizer = stubborn_pair
    places = {prompt: inside_a_block(said)[-1] for prompt, said in ids.items() if inside_a_block(said)}
    ends = {prompt: ids[prompt][place] for prompt, place in places.items()}
    first, second, third, *_ = dict.fromkeys(ends.values())
    for folder in (target, draft):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [first, second]}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": third}))
    options = (str(target), "--draft-model", str(draft), "--gate", "off", "--max-context", "251")
    met = set()
    with ServerProcess(tmp_path, *options) as server:
        for prompt, said in ids.items():
            place = next((i for i, index in enumerate(said) if index in (first, second, third, 0)), None)
            if place is None:
                continue
            met.add(said[place])
            expected = tokenizer.decode(said[:place])
            for asked in (complete, streamed):
                answer = asked(server, prompt=prompt, max_tokens=200)
                usage = answer[-1]
                reason = answer[1] if asked is streamed else answer[0]["finish_reason"]
                text = "".join(answer[0]) if asked is streamed else answer[0]["text"]
                assert (text, reason) == (expected, "stop")
                assert usage["completion_tokens"] == place + 1
                assert usage["draft_accepted"] == usage["draft_proposed"] <= place + 1
            beyond, usage = complete(server, prompt=prompt, max_tokens=20, ignore_eos=True)
            assert beyond["finish_reason"] == "length"
            assert usage["completion_tokens"] == 20
    assert {first, second, third} <= met


def test_an_id_of_stop_token_ids_ends_a_reply_also_where_eos_does_not(server, embedded_pair):
    ids = embedded_pair.tokenizer.encode(complete(server)[0]["text"])
    choice, usage = complete(server, stop_token_ids=[ids[5]], ignore_eos=True)
    assert choice["finish_reason"] == "stop"
    assert usage["completion_tokens"] <= 6


# max_tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", ["0", "-1", '"abc"', "NaN", "Infinity", "1e400", "1.5", "true", "[]", "-1e30"])
def test_a_max_tokens_that_makes_no_sense_is_refused(small_server, path, value):
    body = json.dumps({"prompt": "x"} if path == COMPLETIONS else {"messages": SPOKEN["messages"]})
    content = f'{body[:-1]}, "max_tokens": {value}}}'
    refused = small_server.post_bytes(path, content.encode())
    assert_refused(refused, 400, "NaN" if value == "NaN" else "Infinity" if value == "Infinity" else "max_tokens")


@pytest.mark.parametrize("value", ["1e9", "1000000000", "1000000000000000000000", "1e30", "64"])
def test_a_max_tokens_past_the_context_is_cut_to_it(small_server, value):
    content = f'{{"prompt": "x", "temperature": 0, "ignore_eos": true, "max_tokens": {value}}}'
    answer = small_server.post_bytes(COMPLETIONS, content.encode()).json()
    assert answer["usage"]["total_tokens"] == SMALL_CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_null_is_the_default_of_max_tokens_and_of_everything_else(small_server):
    names = ("temperature", "top_p", "stop", "n", "logit_bias", "seed", "stream", "stream_options", "user", "logprobs")
    body = {"prompt": "x", "max_tokens": None, "ignore_eos": True, **dict.fromkeys(names)}
    assert small_server.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 16
    chat = {**SPOKEN, "max_tokens": None, "ignore_eos": True, **dict.fromkeys(names)}
    assert small_server.post(CHAT, chat).json()["usage"]["total_tokens"] == SMALL_CONTEXT


def test_max_completion_tokens_is_the_name_that_counts_for_chat(small_server):
    body = {**SPOKEN, "max_tokens": None, "max_completion_tokens": 3, "ignore_eos": True}
    assert small_server.post(CHAT, body).json()["usage"]["completion_tokens"] == 3


# seeds


def test_8_seeds_in_parallel_give_what_they_give_in_series(server):
    """A seed that is ignored, or shared between parallel requests."""
    requests = [{**PLAIN, "max_tokens": 12, "temperature": 1, "seed": seed} for seed in range(1, 7)]
    series = [text_of(server.post(COMPLETIONS, request)) for request in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        parallel = list(threads.map(lambda request: text_of(server.post(COMPLETIONS, request)), requests))
    assert parallel == series
    assert len(set(series)) == len(series)


def test_without_a_seed_every_request_and_every_choice_differs(server):
    """At T=1.5 twelve ids have over 40 bits of entropy: two equal texts of four come once in 10^10 runs."""
    body = {**PLAIN, "max_tokens": 12, "temperature": 1.5, "n": 2}
    texts = [choice["text"] for _ in range(2) for choice in server.post(COMPLETIONS, body).json()["choices"]]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70, 1.5, "1", True])
def test_a_seed_out_of_range_is_refused(server, seed):
    assert_refused(server.post(COMPLETIONS, {**PLAIN, "seed": seed}), 400, "seed", param="seed")
    assert_still_answers(server)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 7.0])
def test_every_seed_of_64_bits_works(server, seed):
    body = {**PLAIN, "max_tokens": 4, "temperature": 1, "seed": seed, "n": 2}
    assert server.post(COMPLETIONS, body).json() | {"timings": 0, "id": 0, "created": 0} == server.post(
        COMPLETIONS, body
    ).json() | {"timings": 0, "id": 0, "created": 0}


# bias and min_p


@pytest.fixture(scope="module")
def greedy_ids(server, embedded_pair):
    reference = generate(pair=embedded_pair.plain("test"), prompt=CODE, plain_width=DRAFT_K + 1, max_tokens=24)
    return list(reference.token_ids)


def test_a_bias_of_minus_100_keeps_the_greedy_id_out_with_speculation_too(server, greedy_ids, embedded_pair):
    """A bias that is ignored under speculation."""
    unwanted = sorted(set(greedy_ids))[:4]
    bias = {str(index): -100 for index in unwanted}
    (drafted, usage), (plain, _) = (complete(server, logit_bias=bias, logprobs=0, speculative=s) for s in (True, False))
    assert drafted["text"] == plain["text"] != complete(server)[0]["text"]
    assert drafted["logprobs"]["tokens"] == plain["logprobs"]["tokens"]
    assert not {embedded_pair.tokenizer.piece(index) for index in unwanted} & set(drafted["logprobs"]["tokens"])
    assert usage["draft_proposed"] > 0


def test_a_bias_of_100_gives_one_id_over_and_over(server, embedded_pair):
    for temperature in (0, 1):
        choice, _ = complete(server, logit_bias={"77": 100}, temperature=temperature, seed=1, max_tokens=12)
        assert choice["text"] == embedded_pair.tokenizer.decode([77] * 12)


@pytest.mark.parametrize("options", [{"min_p": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 0.5}])
def test_what_warps_the_law_warps_it_with_speculation_too(server, options):
    """min_p that is ignored under speculation."""
    options = {"temperature": 1, "seed": 4, "accept_rule": "coupled", "max_tokens": 12, **options}
    (drafted, usage), (plain, _) = (complete(server, **options, speculative=wanted) for wanted in (True, False))
    assert drafted == plain
    assert usage["draft_proposed"] > 0
    free = {
        name: value for name, value in options.items() if name in ("temperature", "seed", "accept_rule", "max_tokens")
    }
    assert drafted["text"] != complete(server, **free)[0]["text"]


def test_a_min_p_of_1_is_greedy_at_any_temperature(server):
    greedy = complete(server)[0]["text"]
    for rule in ("leviathan", "coupled"):
        assert complete(server, temperature=1, min_p=1, accept_rule=rule)[0]["text"] == greedy


# stop strings


@pytest.fixture(scope="module")
def whole(server):
    """What stops cut."""
    return complete(server)[0]["text"]


@pytest.mark.parametrize(("start", "size"), [(0, 1), (3, 2), (7, 5), (11, 9), (20, 3), (26, 14)])
def test_no_part_of_a_stop_string_is_let_out(server, whole, start, size):
    """A stop string over tokens and chunks, that may end inside an accepted block."""
    stop = whole[start : start + size]
    expected = whole[: whole.find(stop)]
    deltas, reason, usage = streamed(server, stop=[stop, "never there"])
    assert ("".join(deltas), reason) == (expected, "stop")
    choice, plain_usage = complete(server, stop=stop, speculative=False)
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert usage["completion_tokens"] == plain_usage["completion_tokens"]
    assert usage["draft_accepted"] <= usage["completion_tokens"]


def test_held_back_text_is_let_out_where_the_stop_does_not_come(server, whole):
    stops = [whole[-4:] + "?", whole[5:12] + "\x00", whole[-1:] + whole]
    deltas, reason, _ = streamed(server, stop=stops)
    assert ("".join(deltas), reason) == (whole, "length")
    assert complete(server, stop=stops)[0] == {"index": 0, "text": whole, "logprobs": None, "finish_reason": "length"}


def test_of_overlapping_stops_the_first_to_be_complete_counts(server):
    whole = complete(server, max_tokens=40)[0]["text"]
    long, inner = whole[10:40], whole[14:17]
    assert whole.find(inner) == 14
    for stops in ([long, inner], [inner, long]):
        deltas, reason, _ = streamed(server, stop=stops, max_tokens=40)
        assert ("".join(deltas), reason) == (whole[:14], "stop")
    same_start = [whole[10:14], whole[10:18]]
    assert complete(server, stop=same_start)[0]["text"] == whole[: whole.find(same_start[0])]


# clients that leave


class Bystander:
    """A stream that goes on beside what is tested."""

    def __init__(self, server, **changes):
        self._server, self._changes = server, changes
        self.begun = threading.Event()
        self._deltas = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(60)

    def _read(self):
        with self._server.events(COMPLETIONS, {**PLAIN, **self._changes, "stream": True}) as events:
            for event in events:
                if event != "[DONE]":
                    self._deltas.append(event["choices"][0]["text"])
                    self.begun.set()

    def text(self):
        self._thread.join(60)
        return "".join(self._deltas)


LONG = {**PLAIN, "max_tokens": 230, "ignore_eos": True, "temperature": 1, "seed": 1}


def leavers(server):
    """Ids of the requests whose clients left, and how much of their replies had been sent."""
    line = r"(cmpl-\w+): the client left(?:, \d+ \+ (\d+) tokens| while its request was read)"
    return [(request_id, int(tokens or 0)) for request_id, tokens in re.findall(line, server.log)]


def leave(server, body, when):
    """Leave, and wait until the server has seen it."""
    before = len(leavers(server))
    server.leave(COMPLETIONS, body, when)
    wait_for(lambda: len(leavers(server)) == before + 1)
    return leavers(server)[-1]


def had_a_row(server, request_id):
    """A trace begins once the prompt is read and the choice has its row."""
    return (server.traces / f"{request_id}-0.jsonl").exists()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row_and_disturbs_nobody(server, stream):
    """A client that leaves while it is answered, streaming or not."""
    alone, _ = complete(server, max_tokens=120, ignore_eos=True, seed=2, temperature=1)
    other = Bystander(server, max_tokens=120, ignore_eos=True, seed=2, temperature=1)

    def when(connection):
        wait_for(lambda: busy(server) == (2, 0))
        wait_for(lambda: len(list(server.traces.iterdir())) == traces + 1)
        if stream:
            connection.recv(64)

    traces = len(list(server.traces.iterdir()))
    request_id, sent = leave(server, {**LONG, "stream": stream}, when)
    assert sent < LONG["max_tokens"]
    wait_for(lambda: busy(server)[0] <= 1)
    trace = read_trace(str(server.traces / f"{request_id}-0.jsonl"))
    assert trace.end == "cancelled"  # and not what ends it when it runs on for nobody
    assert other.text() == alone["text"]
    wait_for(lambda: busy(server) == (0, 0))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_is_forgotten(server, stream):
    others = [Bystander(server, max_tokens=200, ignore_eos=True) for _ in range(2)]
    request_id, sent = leave(server, {**LONG, "stream": stream}, lambda _: wait_for(lambda: busy(server) == (2, 1)))
    wait_for(lambda: busy(server) != (2, 1))
    assert busy(server) == (2, 0)  # it left the line, and no row was free for it
    assert others[0].text() == others[1].text() != ""
    wait_for(lambda: busy(server) == (0, 0))
    assert sent == 0
    assert not had_a_row(server, request_id)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_row(server, stream):
    other = Bystander(server, max_tokens=100, ignore_eos=True)
    # scored for the echo, then read: 4 chunks of one model, then 4 of each
    body = {**LONG, "prompt": [7] * 250, "echo": True, "logprobs": 1, "stream": stream}
    request_id, sent = leave(server, body, lambda _: wait_for(lambda: busy(server)[0] == 2))
    assert sent == 0
    wait_for(lambda: busy(server)[0] <= 1)
    assert not had_a_row(server, request_id)
    assert other.text() == complete(server, max_tokens=100, ignore_eos=True)[0]["text"]
    wait_for(lambda: busy(server) == (0, 0))


@pytest.mark.slow
def test_a_storm_of_requests_of_which_many_are_dropped_changes_no_answer_and_leaves_nothing_behind(server):
    request = {**PLAIN, "temperature": 1, "seed": 5}
    alone = text_of(server.post(COMPLETIONS, request))

    def one(number):
        draw = random.Random(number)
        body = {**LONG, "prompt": [draw.randrange(VOCABULARY)] * draw.choice([1, 64, 65, 128, 200])}
        body |= {"stream": draw.random() < 0.5, "n": draw.choice([1, 1, 2, 5]), "echo": draw.random() < 0.3}
        if number % 4 == 0:
            return server.post(COMPLETIONS, request)
        server.leave(COMPLETIONS, {**body, "logprobs": 2}, lambda _: time.sleep(draw.random() * draw.choice([0.01, 1])))
        return None

    with ThreadPoolExecutor(8) as threads:
        answers = [answer for answer in threads.map(one, range(160)) if answer is not None]
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert {text_of(answer) for answer in answers if answer.status_code == 200} <= {alone}
    wait_for(lambda: busy(server) == (0, 0))
    assert text_of(server.post(COMPLETIONS, request)) == alone


# bodies


DEEP = 10**5
BAD_BODIES = {
    "nothing": b"",
    "half": b'{"prompt": "x"',
    "more behind": b'{"prompt": "x"} {}',
    "no JSON": b"prompt=x",
    "a list": b"[]",
    "a text": b'"x"',
    "a number": b"7",
    "null": b"null",
    "true": b"true",
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep field": b'{"prompt": "x", "metadata": {"a": ' + b"[" * DEEP + b"]" * DEEP + b"}}",
    "deep but legible": b'{"prompt": "x", "metadata": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}",
    "open lists": b"[" * DEEP,
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a mark of order": b'\xef\xbb\xbf{"prompt": "x"}',
    "half a surrogate pair": b'{"prompt": "a\\ud800b"}',
    "half a surrogate pair in a list": b'{"prompt": ["a", "\\udc00"]}',
    "half a surrogate pair as a stop": b'{"prompt": "x", "stop": "\\ud800"}',
    "half a surrogate pair as a field": b'{"prompt": "x", "\\ud800": 1}',
    "half a surrogate pair as a bias": b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
    "half a surrogate pair as a model": b'{"prompt": "x", "model": "\\ud800"}',
    "half a surrogate pair for nobody": b'{"prompt": "x", "metadata": {"a": ["\\uDFFF"]}}',
    "half a surrogate pair as a rule": b'{"prompt": "x", "accept_rule": "\\ud800"}',
    "a field over two lines": b'{"prompt": "x", "a\\nERROR b": 1}',
    "a long field": b'{"prompt": "x", "' + b"a" * 10**5 + b'": 1}',
    "a long number": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "a number as a prompt": b'{"prompt": 7}',
    "an object as a prompt": b'{"prompt": {}}',
    "texts and ids": b'{"prompt": ["a", 7]}',
    "true as an id": b'{"prompt": [true]}',
    "no prompt": b"{}",
    "no prompt, null": b'{"prompt": null}',
    "a text as a temperature": b'{"prompt": "x", "temperature": "0"}',
    "a huge temperature": b'{"prompt": "x", "temperature": 1e400}',
}


@pytest.mark.parametrize("content", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_body_that_is_none_is_refused_and_the_server_goes_on(server, content):
    """Malformed JSON, non-objects, deep nesting, bytes that are no text."""
    refused = server.post_bytes(COMPLETIONS, content)
    assert_refused(refused, 400)
    assert len(refused.json()["error"]["message"]) < 1000
    assert_still_answers(server)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_another_content_type_is_refused(server, kind):
    refused = server.post_bytes(COMPLETIONS, json.dumps(PLAIN).encode(), content_type=kind)
    assert_refused(refused, 400, "content-type", kind.partition(";")[0])


def test_a_web_page_must_say_json_which_it_has_to_ask_for(server):
    page = {"origin": "https://elsewhere.example"}
    headers = {**server.headers, **page}
    refused = httpx.post(f"{server.url}{COMPLETIONS}", content=json.dumps(PLAIN).encode(), headers=headers)
    assert_refused(refused, 400, "content-type")
    assert text_of(server.post(COMPLETIONS, PLAIN, headers=page))


@pytest.mark.parametrize("kind", [None, "application/json; charset=utf-8", "APPLICATION/JSON"])
def test_what_says_json_or_nothing_is_read_as_json(server, kind):
    assert text_of(server.post_bytes(COMPLETIONS, json.dumps(PLAIN).encode(), content_type=kind))


def test_a_whole_surrogate_pair_is_a_character(server):
    escaped, direct = b'{"prompt": "\\ud83e\\udd5e", "temperature": 0}', '{"prompt": "🥞", "temperature": 0}'.encode()
    answers = [server.post_bytes(COMPLETIONS, content).json() for content in (escaped, direct)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_of_a_name_that_comes_twice_the_last_counts(server):
    content = b'{"prompt": "x", "max_tokens": 9, "temperature": 0, "max_tokens": 2, "ignore_eos": true}'
    assert server.post_bytes(COMPLETIONS, content).json()["usage"]["completion_tokens"] == 2


def chat_body(*contents):
    return {**SPOKEN, "messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", ""]}, "prompt"),
        (COMPLETIONS, {"prompt": [[5], []]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a", ""]}, "stop"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{}]}, "messages.0.role"),
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": [None]}, "messages.0"),
        (CHAT, {"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
        (CHAT, {}, "messages"),
    ],
)
def test_what_is_empty_and_cannot_be_answered_is_refused(server, path, body, word):
    assert_refused(server.post(path, body), 400, word)


@pytest.mark.parametrize("contents", [("",), (None,), ([],), ("", "x"), ([{"type": "text", "text": ""}],)])
def test_empty_messages_of_a_conversation_work(server, contents):
    """Empty content."""
    assert server.post(CHAT, chat_body(*contents)).status_code == 200


def test_empty_collections_are_defaults(server):
    assert complete(server, stop=[], logit_bias={}, stop_token_ids=[], metadata={}) == complete(server)


# the context


def test_the_tail_is_generated_to_the_last_position_of_the_context(small_server):
    """A look-ahead of 9 positions beside a context that has 4 left."""
    for ids in ([5] * 60, [5] * 63):
        for speculative in (True, False):
            body = {"prompt": ids, "temperature": 0, "ignore_eos": True, "max_tokens": 99, "speculative": speculative}
            answer = small_server.post(COMPLETIONS, body).json()
            assert answer["usage"]["completion_tokens"] == SMALL_CONTEXT - len(ids)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["choices"][0]["text"] == text_of(
                small_server.post(COMPLETIONS, {**body, "speculative": None})
            )


def test_beyond_the_context_of_a_draft_that_has_half_of_the_targets_the_target_goes_on_alone(tmp_path):
    target = save_tiny_llama(tmp_path / "target", seed=1, context=128)
    draft = save_tiny_llama(tmp_path / "draft", seed=2, layers=1, context=64)
    with ServerProcess(tmp_path, str(target), "--draft-model", str(draft), "--gate", "off") as server:
        for length, drafted in ((40, True), (100, False)):
            body = {"prompt": [5] * length, "max_tokens": 999}
            answers = [complete(server, **body, ignore_eos=True, speculative=wanted) for wanted in (True, False)]
            assert answers[0][0] == answers[1][0]
            assert [usage["total_tokens"] for _, usage in answers] == [128, 128]
            assert (answers[0][1]["draft_proposed"] > 0) == drafted


@pytest.mark.parametrize("length", [64, 65, 3000])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(small_server, length):
    refused = small_server.post(COMPLETIONS, {"prompt": [5] * length, "max_tokens": 1})
    assert_refused(refused, 400, str(length), str(SMALL_CONTEXT), param="prompt")
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    content = "word " * length
    refused = small_server.post(CHAT, chat_body(content))
    assert_refused(refused, 400, str(SMALL_CONTEXT), param="messages")


# what is named in a request


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("options", [{}, {"include_obfuscation": True}, {"chunk_size": 7}, None])
def test_stream_options_without_include_usage_are_ignored(server, path, options):
    body = PLAIN if path == COMPLETIONS else SPOKEN
    with server.events(path, {**body, "stream": True, "stream_options": options}) as events:
        *_, last, done = events
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] > 0


def test_stream_options_without_a_stream_are_ignored(server):
    assert complete(server, stream_options={}) == complete(server)


@pytest.mark.parametrize("index", [VOCABULARY, 10**9, 2**31, 2**63, 10**18, -1, -(10**9)])
@pytest.mark.parametrize(
    ("field", "value_of"),
    [
        ("prompt", lambda index: [5, index]),
        ("prompt", lambda index: [[5], [index]]),
        ("logit_bias", lambda index: {str(index): 1}),
        ("stop_token_ids", lambda index: [index]),
    ],
)
def test_an_id_past_the_vocabulary_is_refused_and_the_server_goes_on(server, field, value_of, index):
    """Ids that the model lacks, which would write past the end of an array."""
    refused = server.post(COMPLETIONS, {**PLAIN, field: value_of(index)})
    assert_refused(refused, 400, field, str(index), str(VOCABULARY), param=field)
    assert_still_answers(server)


@pytest.mark.parametrize("index", [0, VOCABULARY - 1])
def test_the_first_and_the_last_id_of_the_vocabulary_work(server, index):
    options = {"prompt": [index], "logit_bias": {str(index): -100}, "stop_token_ids": [index]}
    assert complete(server, **options)[0]["text"]


UNKNOWN = {"top_a": 1, "grammar": "x", "Prompt": "y", "tools_": []}
ACTIVE = {
    CHAT: {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "modalities": ["text", "audio"],
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        **UNKNOWN,
    },
    COMPLETIONS: {"suffix": "x", "best_of": 3, **UNKNOWN},
}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in ACTIVE.items() for field in fields])
def test_what_is_active_and_not_supported_is_refused_by_name(server, path, field):
    body = SPOKEN if path == CHAT else PLAIN
    assert_refused(server.post(path, {**body, field: ACTIVE[path][field]}), 400, field)


NEUTRAL = {
    CHAT: {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "functions": [],
        "function_call": "none",
        "modalities": ["text"],
        "logprobs": False,
    },
    COMPLETIONS: {"suffix": "", "best_of": 1, "echo": False, "top_k": -1},
}
HARMLESS = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "n": 1, "top_p": 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_neutral_values_and_harmless_fields_change_nothing(server, path):
    body = SPOKEN if path == CHAT else PLAIN
    plain, adorned = server.post(path, body), server.post(path, {**body, **NEUTRAL[path], **HARMLESS})
    assert adorned.status_code == 200, adorned.text
    assert adorned.json()["choices"] == plain.json()["choices"]


OUT_OF_RANGE = {
    "temperature": [-0.1, 1e-9, 1e9],
    "top_p": [0, 1.1, -1],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [2.1, -2.1],
    "frequency_penalty": [2.1, -2.1],
    "repetition_penalty": [0, 11],
    "logprobs": [-1, 21, 2**70],
    "n": [0, -1, 129, 2**70],
    "logit_bias": [{"5": 101}, {"5": -101}, {"x": 1}, {"1.5": 1}, {"٣": 1}, {"5": "1"}, []],
    "accept_rule": ["greedy", ""],
    "stop": [["a"] * 65, "a" * 5000, 7],
    "speculative": ["false", 0],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in OUT_OF_RANGE.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(server, field, value):
    assert_refused(server.post(COMPLETIONS, {**PLAIN, field: value}), 400, field, param=field)


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"top_logprobs": 2},
        {"max_completion_tokens": 0},
    ],
)
def test_a_value_out_of_range_of_chat_is_refused_by_the_name_it_has_there(server, changes):
    field = list(changes)[-1]
    assert_refused(server.post(CHAT, {**SPOKEN, **changes}), 400, f"{field}: got", param=field)


# who asks, and where


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"authorization": ""}]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/models", "/v1/models/target-16m"])
def test_another_key_or_none_gets_401(server, path, headers):
    without = {"authorization": "", **headers}
    refused = server.post(path, PLAIN, headers=without) if "completions" in path else server.get(path, headers=without)
    assert_refused(refused, 401)
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in refused.text


def test_health_needs_no_key(server):
    assert server.get("/health", headers={"authorization": ""}).json()["status"] == "ok"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_another_model_gets_404(server, path):
    body = SPOKEN if path == CHAT else PLAIN
    assert_refused(server.post(path, {**body, "model": "gpt-9"}), 404, "gpt-9", "target-16m", param="model")
    assert server.post(path, {**body, "model": "target-16m"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models/gpt-9", "/v1/models/", "/v1/embeddings", "/v1", "/v1/a%0Ab", "//"])
def test_a_path_or_a_model_that_is_not_there_gets_404(server, path):
    assert_refused(server.get(path), 404)


def answer_of(server, method, target, body=b""):
    """The status and the body of the answer to what no client of HTTP would send."""
    lines = {"host": "x", "connection": "close", "content-type": "application/json", "content-length": len(body)}
    start = f"{method} {target} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in {**server.headers, **lines}.items()
    )
    head, _, said = server.raw(f"{start}\r\n".encode() + body).partition(b"\r\n\r\n")
    return int(head.split()[1]), said


@pytest.mark.parametrize("before", ["http://127.0.0.1:80", "HTTP://proxy.example", "https://[::1]:8090", "http://a@b"])
@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/v1/models/target%2D16m?x=http://y/z", "/", "", "?x=1", "/api/no"]
)
def test_a_whole_uri_is_the_path_in_it(server, before, path):
    found = answer_of(server, "GET", before + path)
    expected = answer_of(server, "GET", path if path.startswith("/") else f"/{path}")
    assert found == expected
    assert found[0] == (404 if path == "/api/no" else 200)


def test_what_is_neither_a_path_nor_a_uri_of_http_gets_404(server):
    for target in ("health", "ftp://x/health", "http:///health", "http:/x/health", "/http://x/health", "x://y"):
        assert answer_of(server, "GET", target)[0] == 404


def test_the_log_has_the_path_alone_of_a_whole_uri(server):
    for path, status in ((COMPLETIONS, 200), ("/v1/nothing", 404)):
        body, before = json.dumps(PLAIN).encode(), len(server.log)
        assert answer_of(server, "POST", f"http://user:zanzibar@proxy.example{path}", body)[0] == status
        assert re.search(rf" INFO {path} (cmpl|req)-", server.log[before:])


def test_another_method_gets_405_with_those_that_work(server):
    refused = server.get(COMPLETIONS)
    assert_refused(refused, 405)
    assert refused.headers["allow"] == "POST"
    assert_refused(server.post("/v1/models", {}), 405)


def test_a_body_over_the_limit_gets_413_with_its_length_declared_or_not(server):
    def chunks():
        for _ in range(9):
            yield b" " * 2**20

    too_large = b'{"prompt": "' + b"x" * (8 * 2**20) + b'"}'
    assert_refused(server.post_bytes(COMPLETIONS, too_large), 413, str(2**20 + 64 * CONTEXT))
    refused = httpx.post(f"{server.url}{COMPLETIONS}", content=chunks(), headers=server.headers, timeout=60)
    assert_refused(refused, 413, str(2**20 + 64 * CONTEXT))
    assert_still_answers(server)


def test_a_full_line_gets_429_and_when_to_try_again(server):
    with server.events(COMPLETIONS, {**LONG, "n": 6, "stream": True}) as events:
        next(events)
        refused = server.post(COMPLETIONS, PLAIN)
        assert_refused(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
    wait_for(lambda: busy(server) == (0, 0))
    assert_refused(server.post(COMPLETIONS, {**PLAIN, "n": 7}), 400, "7", "6", param="n")
    assert_still_answers(server)


def test_pages_of_an_allowed_origin_may_read_answers_and_others_not(server):
    allowed, other = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
    answer = server.post(COMPLETIONS, PLAIN, headers=allowed)
    assert answer.headers["access-control-allow-origin"] == allowed["origin"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-origin" not in server.post(COMPLETIONS, PLAIN, headers=other).headers
    refused = server.post(COMPLETIONS, {"prompt": 7}, headers=allowed)
    assert refused.headers["access-control-allow-origin"] == allowed["origin"]


def test_a_browser_may_ask_first_and_needs_no_key_for_that(server):
    wanted = {"access-control-request-headers": "authorization,content-type"}
    for origin, status in (("https://app.example", 200), ("https://evil.example", 400)):
        for method, path in (("POST", CHAT), ("HEAD", "/v1/models")):
            asked = {"origin": origin, "access-control-request-method": method, **wanted}
            answer = httpx.options(f"{server.url}{path}", headers=asked)
            assert answer.status_code == status
            assert ("access-control-allow-origin" in answer.headers) == (status == 200)


# the log


def test_every_request_has_an_id_in_its_header_and_the_log_and_no_text_of_it_is_there(server):
    whole = server.post(COMPLETIONS, {**PLAIN, "prompt": "zanzibar", "stop": "zanzibar", "user": "zanzibar"})
    refused = server.post(CHAT, {**chat_body("zanzibar"), "n": 0})
    for response in (whole, refused):
        request_id = response.headers["x-request-id"]
        assert len([line for line in server.log.splitlines() if request_id in line]) == 1
    assert whole.json()["id"] == whole.headers["x-request-id"]
    assert "zanzibar" not in server.log
    assert KEY not in server.log


def test_every_line_of_the_log_is_one_event_whatever_was_asked(server):
    """Last in this file: everything above has left its lines."""
    for line in server.log.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (INFO|WARNING) ", line), line
    assert server.stop() == 0
