"""What the server makes of requests, where no process is needed: slow bodies, events, what counts are summed from."""

import asyncio
import json

import attrs
import pytest
from pydantic import ValidationError
from starlette.requests import Request

from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.result import Chunk, Timings, TokenLogprobs, Usage
from posttrainllm.adapters.serve.answers import events
from posttrainllm.adapters.serve.app import make_app
from posttrainllm.adapters.serve.body import parse_object, read_body
from posttrainllm.adapters.serve.errors import ApiError, as_api_error, one_line
from posttrainllm.adapters.serve.formats import ChatFormat, CompletionFormat
from posttrainllm.adapters.serve.guard import Guard
from posttrainllm.adapters.serve.jobs import Outcome, Update
from posttrainllm.adapters.serve.logprobs import completion_logprobs
from posttrainllm.adapters.serve.prepare import Choice, Work, prepare_chat, prepare_completion
from posttrainllm.adapters.serve.schema import ChatRequest, CompletionRequest, parse
from posttrainllm.adapters.serve.settings import ServeSettings
from posttrainllm.adapters.serve.totals import totals
from posttrainllm.kernel.errors import BackendError, CapacityError, NonFiniteError, UsageError

SETTINGS = ServeSettings(
    name="a-model",
    other_names=("/where/it/is",),
    context=100,
    longest_text=1000,
    max_body_bytes=2**20,
    max_tokens=50,
    accept_rule="coupled",
    vocab_size=4096,
    prompt_vocab_size=4097,
    api_key="secret",
    request_timeout_s=None,
    created=0,
    fingerprint="fp",
)


@pytest.fixture(scope="module")
def tokenizer(embedded_pair):
    return embedded_pair.tokenizer


def completion(tokenizer, settings=SETTINGS, **body):
    return prepare_completion(parse(CompletionRequest, {"prompt": "x", **body}), settings, tokenizer)


def chat(tokenizer, **body):
    message = {"role": "user", "content": "x"}
    return prepare_chat(parse(ChatRequest, {"messages": [message], **body}), SETTINGS, tokenizer)


# bodies


def request_of(messages, **headers):
    """A request whose body arrives in these ASGI messages, then no more."""
    left = list(messages)

    async def receive():
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b""}
    return Request({**scope, "headers": [(n.encode(), v.encode("latin-1")) for n, v in headers.items()]}, receive)


def part(body, *, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def read(messages, *, seconds=30.0, **headers):
    return parse_object(asyncio.run(read_body(request_of(messages, **headers), 2**20, seconds=seconds)))


def test_a_body_may_come_in_pieces_that_split_characters():
    text = '{"prompt": "é🥞"}'.encode()
    assert read([part(text[:13], more=True), part(text[13:16], more=True), part(text[16:])]) == {"prompt": "é🥞"}


def test_a_body_that_does_not_come_in_time_is_told_408():
    with pytest.raises(ApiError, match=r"got no whole body in 0\.05 s") as caught:
        read([part(b'{"prompt"', more=True)], seconds=0.05)
    assert caught.value.status == 408


def test_a_body_whose_client_leaves_is_no_fault_of_ours():
    with pytest.raises(ApiError) as caught:
        read([part(b'{"prompt"', more=True), {"type": "http.disconnect"}])
    assert caught.value.status == 400


def test_a_body_too_large_is_told_before_it_is_read_where_its_length_is_declared():
    declared = {"content-length": str(2**40)}
    with pytest.raises(ApiError) as caught:
        read([], **declared)
    assert caught.value.status == 413


@pytest.mark.parametrize("declared", ["", "-1", "many", "9" * 5000, "\xb2"])
def test_a_length_that_is_none_is_not_believed(declared):
    assert read([part(b"{}")], **{"content-length": declared}) == {}


# fields


def count_errors(kind, body):
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 1000}),
        (CompletionRequest, {"prompt": [[{}]] * 1000}),
        (CompletionRequest, {"prompt": [["a"] * 1000]}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 1000}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["a"] * 1000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1000)), "a")}),
        (ChatRequest, {"messages": [{}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatRequest, {"messages": [], "modalities": ["x"] * 1000}),
    ],
)
def test_the_errors_of_a_list_are_not_collected(tokenizer, kind, body):
    """To collect those of a body of 8 MiB took minutes and gigabytes."""
    assert count_errors(kind, body) < 10  # one a branch of a union
    with pytest.raises(ApiError) as caught:
        (prepare_chat if kind is ChatRequest else prepare_completion)(parse(kind, body), SETTINGS, tokenizer)
    assert len(str(caught.value)) < 200


def test_a_field_that_is_unknown_is_found_before_anything_is_checked():
    with pytest.raises(ApiError, match="b: this server has no such field"):
        parse(CompletionRequest, {"prompt": [{}], "b": 1, **{f"c{index}": 1 for index in range(1000)}})


def test_whole_numbers_may_be_written_with_a_point(tokenizer):
    work = completion(tokenizer, max_tokens=7.0, seed=3.0, top_k=2.0, prompt=[5.0, 6])
    assert (work.params.max_tokens, work.params.seed, work.params.top_k) == (7, 3, 2)
    assert work.choices[0].prompt == (5, 6)


def test_limits_are_those_of_the_server_and_of_the_context(tokenizer):
    ids = [5] * 30
    limits = [completion(tokenizer, prompt=ids, max_tokens=most).choices[0].limit for most in (1, 50, 51, 10**30)]
    assert limits == [31, 80, 80, 80]
    assert completion(tokenizer, prompt=[5] * 99, max_tokens=9).choices[0].limit == 100
    assert completion(tokenizer, prompt=ids).choices[0].limit == 46  # 16 where nothing is said
    assert chat(tokenizer).choices[0].limit == len(chat(tokenizer).choices[0].prompt) + 50
    with pytest.raises(CapacityError, match="got 100 tokens, expected fewer than the context of 100"):
        completion(tokenizer, prompt=[5] * 100)


def test_a_text_that_cannot_fit_is_not_encoded(tokenizer):
    """8 MiB take 20 s, and whoever comes next waits for the same thread."""
    encoded = []
    watched = attrs.evolve(tokenizer, backend=Watched(tokenizer.backend, encoded))
    for text, characters in (("a" * 1001, 1001), ("word " * 10**5, 5 * 10**5)):
        with pytest.raises(CapacityError, match=rf"got {characters} characters, expected at most 1000, .* 100 tokens"):
            completion(watched, prompt=["x", text])
        with pytest.raises(CapacityError, match="messages: got"):
            chat(watched, messages=[{"role": "user", "content": text}])
    assert encoded == ["x", "x"]
    with pytest.raises(CapacityError, match=r"prompt: got \d+ tokens"):
        completion(watched, prompt=["a b " * 250, "y"])
    assert encoded[2:] == ["a b " * 250]  # and no more of the list than is needed to refuse it


@attrs.define
class Watched:
    """A tokenizer that tells what it was given."""

    backend: object
    encoded: list

    def encode(self, text, **options):
        self.encoded.append(text)
        return self.backend.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self.backend, name)


def test_what_is_not_said_is_as_in_openais_api_and_the_servers_rule(tokenizer):
    for work in (completion(tokenizer), chat(tokenizer)):
        assert (work.params.temperature, work.params.accept_rule) == (1.0, "coupled")
        assert (work.speculate, work.stream, work.include_usage) == (True, False, False)
    assert completion(tokenizer, accept_rule="leviathan").params.accept_rule == "leviathan"


def test_seeds_go_up_over_choices_and_start_again_over_prompts_and_wrap(tokenizer):
    work = completion(tokenizer, prompt=["a", "b"], n=2, seed=2**64 - 1)
    assert [choice.seed for choice in work.choices] == [2**64 - 1, 0, 2**64 - 1, 0]
    fresh = completion(tokenizer, n=100)
    assert len({choice.seed for choice in fresh.choices}) == 100


def test_a_model_is_known_by_its_name_and_by_where_it_was_loaded_from(tokenizer):
    for name in ("a-model", "/where/it/is", None):
        assert completion(tokenizer, model=name).choices
    with pytest.raises(ApiError, match="got 'other', expected 'a-model'") as caught:
        completion(tokenizer, model="other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_an_id_that_the_target_can_read_but_not_emit_may_stand_in_a_prompt_alone(tokenizer):
    assert completion(tokenizer, prompt=[4096]).choices[0].prompt == (4096,)
    for field, value in (("logit_bias", {"4096": 1}), ("stop_token_ids", [4096])):
        with pytest.raises(
            CapacityError, match=f"{field}: got token id 4096, expected 0 to 4095, of a vocabulary of 4096"
        ):
            completion(tokenizer, **{field: value})


def test_choices_are_counted_over_prompts(tokenizer):
    assert len(completion(tokenizer, prompt=["x"] * 32, n=4).choices) == 128
    with pytest.raises(ApiError, match="n: got 5, expected 1 to 4") as caught:
        completion(tokenizer, prompt=["x"] * 32, n=5)
    assert caught.value.param == "n"
    with pytest.raises(ApiError):
        completion(tokenizer, prompt=["x"] * 129)


def test_parts_of_a_message_are_joined(tokenizer):
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    joined = chat(tokenizer, messages=[{"role": "user", "content": parts}])
    assert joined.choices[0].prompt == chat(tokenizer, messages=[{"role": "user", "content": "ab"}]).choices[0].prompt


def test_the_key_is_in_no_description_of_the_settings():
    assert "secret" not in repr(SETTINGS)


@pytest.mark.parametrize("key", ["plain", "with a space", "clé 🔑"])
def test_a_key_is_compared_byte_for_byte(key):
    guard = Guard(None, key)

    def asked(value):
        headers = {"authorization": value.encode().decode("latin-1")}
        return guard.check_key(request_of([], **headers))

    for value in (f"Bearer {key}", f"bearer {key}", f"Bearer  {key} "):
        asked(value)
    for value in ("", "Bearer", "Bearer ", f"Basic {key}", key, f"Bearer {key}x", f"Bearer {key[:-1]}", "Bearer ключ"):
        with pytest.raises(ApiError) as caught:
            asked(value)
        assert caught.value.status == 401


# errors


@pytest.mark.parametrize(
    ("error", "status", "param", "message"),
    [
        (UsageError("--top-p: got 2, expected less"), 400, "top_p", "top_p: got 2, expected less"),
        (UsageError("no field here"), 400, None, "no field here"),
        (CapacityError("prompt: got 9 tokens, expected fewer"), 400, "prompt", "prompt: got 9 tokens, expected fewer"),
        (NonFiniteError("step 3"), 500, None, "step 3"),
        (BackendError("/home/me/x is broken"), 500, None, "an error inside the server; its log says more"),
        (ValueError("a secret"), 500, None, "an error inside the server; its log says more"),
    ],
)
def test_a_client_is_told_what_it_can_mend_and_nothing_of_the_machine(error, status, param, message):
    told = as_api_error(error)
    assert (told.status, told.param, str(told)) == (status, param, message)


def test_what_a_client_wrote_is_one_line_of_printable_text():
    text = one_line("a\nb\x1b[31m\u2028\ud800\U000e0001é🥞" + "c" * 5000)
    assert text.startswith("a\\nb\\x1b[31m\\u2028\\ud800\\U000e0001é🥞ccc")
    assert text.isprintable()
    assert len(text) < 1000


@pytest.mark.parametrize("target", ["/api/version", "http://proxy.example/api/version"])
def test_a_fault_of_ours_has_the_shape_of_its_path_whatever_the_target(target):
    """There is no scheduler to ask for the version."""
    app, sent = make_app(None, attrs.evolve(SETTINGS, api_key=None)), []

    async def send(message):
        sent.append(message)

    scope = {**request_of([], host="x").scope, "method": "GET", "path": target, "raw_path": target.encode()}
    with pytest.raises(AttributeError):  # for the log
        asyncio.run(app(scope, request_of([]).receive, send))
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"]) == {"error": "an error inside the server; its log says more"}


# answers


def outcome(*, tokens, proposed, accepted, steps=2, at=1.0, enabled=True, index=0, cached=0):
    return Outcome(
        index=index,
        cached_tokens=cached,
        usage=Usage(
            prompt_tokens=3,
            completion_tokens=tokens,
            total_tokens=3 + tokens,
            draft_proposed=proposed,
            draft_accepted=accepted,
            accept_rate=None,
        ),
        timings=Timings(
            prefill_s=at, ttft_s=at, decode_s=at, decode_tokens_per_s=5.0, steps=steps, tokens_per_step=tokens / steps
        ),
        queue_s=at,
        speculative={"enabled": enabled},
    )


def work_of(count, **changes):
    choice = Choice(prompt=(1, 2, 3), seed=1, limit=9)
    options = {
        "params": SamplingParams(),
        "prompts": 1,
        "prompt_tokens": 3,
        "speculate": True,
        "stream": True,
        "include_usage": False,
    } | changes
    return Work(choices=(choice,) * count, **options)


def test_counts_are_sums_and_times_the_longest_of_any_choice():
    value = totals(
        work_of(2),
        [outcome(tokens=4, proposed=6, accepted=3, at=1.0), outcome(tokens=2, proposed=0, accepted=0, at=2.0)],
    )
    assert value["usage"] == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens": 6,
        "total_tokens": 9,
        "draft_proposed": 6,
        "draft_accepted": 3,
        "accept_rate": 0.5,
    }
    timings = value["timings"]
    assert (timings["queue_s"], timings["prefill_s"], timings["ttft_s"], timings["decode_s"]) == (2.0, 2.0, 1.0, 2.0)
    assert (timings["steps"], timings["tokens_per_step"], timings["decode_tokens_per_s"]) == (4, 1.5, None)


def test_cached_tokens_are_those_of_each_prompt_that_none_of_its_choices_computed():
    """Two prompts of two choices: the first choice of a prompt computes what the second one finds."""
    found = {0: 64, 1: 128, 2: 192, 3: 0}
    outcomes = [outcome(tokens=1, proposed=0, accepted=0, index=index, cached=found[index]) for index in (3, 1, 0, 2)]
    usage = totals(work_of(4, prompts=2, prompt_tokens=500), outcomes)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 64}


@attrs.define
class Submitted:
    """What a submission says, with no engine behind it."""

    said: list

    async def updates(self, *, beat=None):
        for entry in self.said:
            if isinstance(entry, Exception):
                raise entry
            yield entry


def stream(said, *, kind=CompletionFormat, count=1, **changes):
    shape = kind(request_id="id", created=1, model="m", fingerprint=lambda: "f", tokenizer=None)

    async def collect():
        return [line async for line in events(Submitted(said), work_of(count, **changes), shape)]

    return asyncio.run(collect())


def chunk(text, reason=None):
    return Chunk(text=text, token_ids=(1,), finish_reason=reason)


def objects(lines):
    assert all(line.endswith("\n\n") and line.count("\n") == 2 for line in lines)
    assert lines[-1] == "data: [DONE]\n\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


def test_text_that_looks_like_the_end_of_a_line_stays_within_its_event():
    text = "a\nb\r\nc\x85d\u2028e\u2029f\x0b\x0cg"
    lines = stream([(0, Update(chunk=chunk(text)))])
    assert len(lines[0].splitlines()) == 2  # the event, and the empty line behind it
    assert objects(lines)[0]["choices"][0]["text"] == text


def test_silence_is_a_comment_and_an_error_ends_the_stream_as_an_event():
    lines = stream([None, (0, Update(chunk=chunk("a"))), None, ApiError(500, "it broke", code="c")])
    assert lines[0].startswith(":")
    assert lines[2].startswith(":")
    assert objects(lines)[-1] == {
        "error": {"message": "it broke", "type": "invalid_request_error", "param": None, "code": "c"}
    }


@pytest.mark.parametrize("include_usage", [True, False])
def test_usage_comes_once_behind_the_last_of_all_choices(include_usage):
    ended = [
        (index, Update(chunk=chunk("z", "stop"), outcome=outcome(tokens=1, proposed=0, accepted=0))) for index in (1, 0)
    ]
    found = objects(stream(ended, count=2, kind=ChatFormat, include_usage=include_usage))
    openings, rest = found[:2], found[2:]
    assert [entry["choices"][0]["delta"]["role"] for entry in openings] == ["assistant"] * 2
    assert [("usage" in entry) for entry in rest] == ([False, False, True] if include_usage else [False, True])
    assert rest[-1]["usage"]["completion_tokens"] == 2
    assert [choice["index"] for entry in rest for choice in entry["choices"]] == [1, 0]


def test_a_chunk_that_lets_no_text_out_is_no_event():
    lines = stream([(0, Update(chunk=chunk(""))), (0, Update(chunk=chunk("a")))])
    assert len(objects(lines)) == 1


def test_of_two_ids_with_one_text_the_likelier_is_the_alternative_of_that_name():
    """Parts of characters all look alike; whoever asks whether the id was the likeliest compares with the largest."""

    class Tokenizer:
        def piece(self, index):
            return "\ufffd" if index < 2 else chr(index)

    token = TokenLogprobs(token_id=1, logprob=-3.0, top=((0, -0.5), (97, -1.0)))
    found = completion_logprobs([token], Tokenizer(), offsets=[0], first=1)
    assert found["token_logprobs"] == [-3.0]
    assert list(found["top_logprobs"][0].items()) == [("\ufffd", -0.5), ("a", -1.0)]
