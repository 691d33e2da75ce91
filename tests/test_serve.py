"""`posttrainllm serve` as OpenAI's own client sees it: a real process, one server for most of the file."""

from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from serving import ServerProcess
from test_cli import invoke

from posttrainllm.adapters.facade import generate
from posttrainllm.adapters.gate.prompts import read_prompts
from posttrainllm.adapters.replay.reading import read_trace

DRAFT_K, CONTEXT = 4, 251  # C is then 256
SHAPE = ("--gate", "off", "--draft-k", str(DRAFT_K), "--max-context", str(CONTEXT))
CODE = "def moon_phase(day_of_cycle):\n    "
PROSE = "The baker on our street closes at noon, "


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Four slots, everything recorded."""
    folder = tmp_path_factory.mktemp("serve")
    with ServerProcess(folder, *SHAPE, "--slots", "4", "--record-dir", str(folder / "traces")) as server:
        server.traces = folder / "traces"
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory):
    """One slot: the shapes of `sample`."""
    with ServerProcess(tmp_path_factory.mktemp("narrow"), *SHAPE, "--slots", "1") as server:
        yield server


@attrs.frozen
class Answer:
    """What must not depend on who else asks."""

    text: str
    finish_reason: str
    completion_tokens: int


OURS = ("speculative", "accept_rule", "ignore_eos", "min_p", "top_k", "repetition_penalty", "stop_token_ids")


def arguments_of(request):
    """What the client takes by name, and what it only passes on."""
    own = {name: value for name, value in request.items() if name in OURS}
    return {"model": "target-16m", **{n: v for n, v in request.items() if n not in OURS}, "extra_body": own}


def endpoint_of(client, request):
    return client.chat.completions if "messages" in request else client.completions


def ask(client, request):
    """An answer of one choice, put together again where it is streamed."""
    answer = endpoint_of(client, request).create(**arguments_of(request))
    if not request.get("stream"):
        (choice,) = answer.choices
        text = choice.message.content if "messages" in request else choice.text
        return Answer(text, choice.finish_reason, answer.usage.completion_tokens)
    texts, reasons, usages = [], [], []
    for chunk in answer:
        usages += [chunk.usage] if chunk.usage is not None else []
        for choice in chunk.choices:
            texts.append((choice.delta.content if "messages" in request else choice.text) or "")
            reasons += [choice.finish_reason] if choice.finish_reason is not None else []
    (reason,), (usage,) = reasons, usages
    return Answer("".join(texts), reason, usage.completion_tokens)


def completion(prompt, max_tokens=24, *, temperature=0, **options):
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, **options}


def chat(content, max_tokens=24, *, temperature=0, **options):
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": temperature, **options}


def test_the_model_is_listed_with_its_context_and_the_state_of_speculation(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("target-16m", "model")
    assert model.max_model_len == CONTEXT
    assert model.speculative["enabled"] is True
    assert model.speculative["draft_k"] == DRAFT_K
    assert client.models.retrieve("target-16m").id == model.id


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1, "seed": 5},
        {"temperature": 1, "seed": 5, "accept_rule": "coupled"},
        {"temperature": 0.8, "seed": 6, "stop": ["\n", "."]},
    ],
    ids=["greedy", "leviathan", "coupled", "stops"],
)
def test_the_deltas_of_a_stream_join_to_the_text_that_is_not_streamed(client, make, options):
    whole = ask(client, make(CODE, 24, **options))
    assert ask(client, make(CODE, 24, **options, stream=True)) == whole
    assert whole.completion_tokens > 0
    assert whole.finish_reason in ("stop", "length")


PARALLEL = (
    completion(CODE, 24),
    completion(PROSE, 11, temperature=1, seed=1),
    chat("What is a list?", 21, temperature=0.7, seed=2, stream=True),
    completion("x", 36, temperature=1.3, seed=3, accept_rule="coupled"),
    completion(CODE, 24, stream=True),
    completion(CODE * 6, 15, temperature=1, seed=2**64 - 1),
    chat("Say yes.", 20, stop=["\n"], ignore_eos=True),
    completion(PROSE, 18, temperature=0.9, seed=4, stop=["e", " the"], stream=True),
    completion("1, 4, 9, 16, 15, 36,", 28, speculative=False),
    completion("1, 4, 9, 16, 15, 36,", 28),
    completion(PROSE, 18, temperature=1, seed=5, top_p=0.9, top_k=20),
    completion(CODE, 18, temperature=1, seed=6, min_p=0.1, accept_rule="coupled", stream=True),
    completion([5, 6, 7, 8] * 30, 26, temperature=1, seed=7, logit_bias={"5": -100, "17": 4}),
    completion(CODE, 22, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2),
    chat("Count to ten.", 31, temperature=0.6, seed=8, accept_rule="coupled"),
    completion("Le garçon a mangé une crêpe 🥞", 24, temperature=1, seed=9, ignore_eos=True, stream=True),
)


def test_16_requests_in_parallel_on_4_slots_get_what_each_gets_alone(client):
    serial = [ask(client, request) for request in PARALLEL]
    with ThreadPoolExecutor(len(PARALLEL)) as threads:
        together = list(threads.map(lambda request: ask(client, request), PARALLEL))
    assert together == serial
    assert {answer.finish_reason for answer in serial} == {"stop", "length"}
    assert serial[8].text == serial[9].text  # with a draft and without


@pytest.mark.parametrize("make", [completion, chat])
def test_choice_i_is_the_request_whose_seed_is_i_more(client, make):
    request = make(CODE, 12, temperature=1, seed=40)
    answer = endpoint_of(client, request).create(**arguments_of({**request, "n": 3}))
    texts = [choice.message.content if make is chat else choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = [ask(client, {**request, "seed": 40 + index}) for index in range(3)]
    assert texts == [one.text for one in alone]
    assert answer.usage.completion_tokens == sum(one.completion_tokens for one in alone)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_list_of_prompts_is_answered_in_order(client):
    prompts = [CODE, PROSE, "x"]
    answer = client.completions.create(model="target-16m", prompt=prompts, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == [ask(client, completion(p, 12)).text for p in prompts]
    assert answer.usage.completion_tokens == 36


def said(value):
    """Usage, speculative and timings of an answer or a chunk."""
    value = value.model_dump() if hasattr(value, "model_dump") else value
    return value.get("usage"), value.get("speculative"), value.get("timings")


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}])
def test_counts_and_state_are_in_the_body_and_at_the_end_of_a_stream(client, make, options):
    request = make(CODE, 12)
    usage, speculative, timings = said(endpoint_of(client, request).create(**arguments_of(request)))
    assert usage["draft_proposed"] >= usage["draft_accepted"] > 0
    assert usage["accept_rate"] == usage["draft_accepted"] / usage["draft_proposed"]
    assert usage["completion_tokens"] == 12
    assert speculative == {
        "enabled": True,
        "reason": "the gate is switched off",
        "draft_k": DRAFT_K,
        "policy": "fixed",
        "accept_rule": None,
        "verdict": "not gated",
    }
    assert timings["steps"] < 12
    streamed = {**request, "stream": True, **({"stream_options": options} if options else {})}
    chunks = list(endpoint_of(client, request).create(**arguments_of(streamed)))
    *before, last = chunks
    assert said(last)[:2] == (usage, speculative)
    assert said(last)[2].keys() == timings.keys()
    assert all(said(chunk) == (None, None, None) for chunk in before)
    assert (last.choices == []) == (options == {"include_usage": True})


def test_the_rule_that_decides_is_named_where_one_does(client):
    for rule in ("leviathan", "coupled"):
        request = completion(CODE, 4, temperature=1, seed=1, accept_rule=rule)
        assert said(client.completions.create(**arguments_of(request)))[1]["accept_rule"] == rule


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 3, "accept_rule": "coupled"}])
def test_without_speculation_the_text_is_the_same_and_nothing_is_proposed(client, options):
    request = completion(CODE, 24, **options)
    answer = client.completions.create(**arguments_of({**request, "speculative": False}))
    assert answer.choices[0].text == ask(client, request).text
    usage, speculative, _ = said(answer)
    assert (usage["draft_proposed"], usage["draft_accepted"], usage["accept_rate"]) == (0, 0, None)
    assert speculative["enabled"] is False
    assert speculative["reason"] == "the request asked for none"


# T=0: the same bytes with a draft, without one, and from `sample`

SOME = slice(2, 8)  # chat, another script, a list, numbers, code, one token


def assert_the_same_with_and_without_a_draft(server, prompts, max_tokens):
    client = server.client()
    requests = [
        completion(prompt, max_tokens, ignore_eos=True, speculative=drafted)
        for prompt in prompts
        for drafted in (True, False)
    ]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda request: ask(client, request), requests))
    assert answers[::2] == answers[1::2]
    assert {answer.completion_tokens for answer in answers} == {max_tokens}


def assert_what_sample_gives(server, pair, prompts, max_tokens):
    """--no-draft --plain-width K+1; prompt and reply are within C = 256 on both sides."""
    plain, client = pair.plain("--no-draft"), server.client()
    for prompt in prompts:
        reference = generate(pair=plain, prompt=prompt, plain_width=DRAFT_K + 1, max_tokens=max_tokens)
        answer = ask(client, completion(prompt, max_tokens))
        assert (answer.text, answer.finish_reason) == (reference.text, reference.finish_reason)
        assert answer.completion_tokens == reference.usage.completion_tokens


def gate_texts(which):
    return [prompt.text for prompt in read_prompts(None, 100)[which]]


def test_greedy_text_is_that_of_the_same_server_without_speculation(server):
    assert_the_same_with_and_without_a_draft(server, gate_texts(SOME), 32)


@pytest.mark.slow
def test_greedy_text_of_100_prompts_is_that_of_the_same_server_without_speculation(server):
    assert_the_same_with_and_without_a_draft(server, gate_texts(slice(None)), 64)


def test_greedy_text_is_that_of_sample_without_a_draft_at_the_same_width(narrow_server, embedded_pair):
    assert_what_sample_gives(narrow_server, embedded_pair, gate_texts(SOME), 32)


@pytest.mark.slow
def test_greedy_text_of_100_prompts_is_that_of_sample_without_a_draft_at_the_same_width(narrow_server, embedded_pair):
    assert_what_sample_gives(narrow_server, embedded_pair, gate_texts(slice(None)), 64)


# traces

RECORDED = (
    completion(CODE, 24),
    completion(CODE, 24, temperature=1, seed=11),
    completion(
        PROSE,
        24,
        temperature=1,
        seed=12,
        logit_bias={"17": 3, "20": -100},
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
    ),
    completion("x", 24, temperature=0.8, seed=13, accept_rule="coupled"),
    completion(CODE, 20, speculative=False),
)


def test_the_trace_of_a_request_among_others_replays_bit_for_bit(server, client):
    def recorded(request):
        answer = client.completions.with_raw_response.create(**arguments_of(request))
        return answer.headers["x-request-id"], answer.parse()

    with ThreadPoolExecutor(len(RECORDED)) as threads:
        answers = list(threads.map(recorded, RECORDED))
    for request, (request_id, answer) in zip(RECORDED, answers, strict=True):
        assert answer.id == request_id
        file = server.traces / f"{request_id}-0.jsonl"
        trace = read_trace(str(file))
        assert trace.header.request_id == request_id
        assert trace.header.rows == 4
        steps = len(trace.steps)
        # from a step the caches are refilled: once is enough where the rest is the same
        for first in (0, steps // 2) if "presence_penalty" in request else (0,):
            result = invoke("replay", str(file), "--from-step", str(first))
            assert result.exit_code == 0, result.stdout + result.stderr
            assert f"steps {first} to {steps - 1} of {steps} as recorded" in result.stdout


def test_every_choice_has_a_trace_of_its_own(server, client):
    answer = client.completions.create(**arguments_of(completion(CODE, 8, temperature=1, seed=1)), n=2)
    keys = {read_trace(str(server.traces / f"{answer.id}-{index}.jsonl")).header.key for index in (0, 1)}
    assert len(keys) == 2


# log probabilities


def close(first, second):
    return first == pytest.approx(second, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 3, "accept_rule": "coupled"}])
def test_log_probabilities_of_chat_are_those_without_speculation(client, options):
    def content(speculative):
        request = chat("What is a list?", 20, speculative=speculative, logprobs=True, top_logprobs=5, **options)
        answer = client.chat.completions.create(**arguments_of(request))
        return answer.choices[0].message.content, answer.choices[0].logprobs.content

    text, drafted = content(True)
    plain_text, plain = content(False)
    assert text == plain_text
    assert len(drafted) == 20
    assert "".join(entry.token for entry in drafted) == text
    assert [entry.token for entry in drafted] == [entry.token for entry in plain]
    assert close([entry.logprob for entry in drafted], [entry.logprob for entry in plain])
    assert min(entry.logprob for entry in drafted) < -0.01
    for one, other in zip(drafted, plain, strict=True):
        assert len(one.top_logprobs) == 5
        assert bytes(one.bytes).decode() == one.token
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert close(values, [top.logprob for top in other.top_logprobs])
        if not options:
            assert one.token == one.top_logprobs[0].token
            assert one.logprob == one.top_logprobs[0].logprob


def test_log_probabilities_of_a_stream_are_those_of_the_whole(client):
    request = chat("What is a list?", 16, logprobs=True, top_logprobs=2, temperature=1, seed=3)
    whole = client.chat.completions.create(**arguments_of(request)).choices[0].logprobs.content
    chunks = list(client.chat.completions.create(**arguments_of({**request, "stream": True})))
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in whole]
    assert len(whole) == 16


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_completions_are_those_without_speculation(client, stream):
    def columns(speculative):
        request = completion(CODE, 20, speculative=speculative, logprobs=5, stream=stream)
        answer = client.completions.create(**arguments_of(request))
        found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for part in answer if stream else [answer]:
            for choice in part.choices:
                for name, column in found.items():
                    column += getattr(choice.logprobs, name) if choice.logprobs is not None else []
        return found

    drafted, plain = columns(True), columns(False)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["text_offset"] == plain["text_offset"]
    assert close(drafted["token_logprobs"], plain["token_logprobs"])
    assert {len(column) for column in drafted.values()} == {20}
    assert min(drafted["token_logprobs"]) < -0.01
    for token, logprob, top in zip(*(drafted[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert 5 <= len(top) <= 6
        assert top[token] == logprob == max(top.values())


def test_no_log_probabilities_unless_they_are_asked_for(client):
    assert client.completions.create(**arguments_of(completion(CODE, 4))).choices[0].logprobs is None
    assert client.chat.completions.create(**arguments_of(chat("x", 4))).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROSE * 8, [3000, 5, 6, 7]], ids=["text", "ids"])
def test_an_echo_scores_the_prompt_too(client, prompt, stream):
    request = completion(prompt, 8, echo=True, logprobs=2, stream=stream)
    texts, tokens, logprobs, offsets = [], [], [], []
    answer = client.completions.create(**arguments_of(request))
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts.append(choice.text)
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens
                logprobs += choice.logprobs.token_logprobs
                offsets += choice.logprobs.text_offset
    text = "".join(texts)
    assert text == "".join(tokens)
    if isinstance(prompt, str):
        assert text.startswith(prompt)
    assert text.endswith(ask(client, completion(prompt, 8)).text)
    assert logprobs[0] is None
    assert all(value < 0 for value in logprobs[1:])
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
def test_the_parts_of_a_split_character_stand_where_it_does(client, stream):
    prompt = "x = '\U0001f642 \xe9 \u65e5\u672c'  # y"
    request = completion(prompt, 4, echo=True, logprobs=0, stop=["zzz", "\n "], stream=stream)
    answer = client.completions.create(**arguments_of(request))
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices if choice.logprobs]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert "\ufffd" in tokens
    whole = [(token, offset) for token, offset in zip(tokens, offsets, strict=True) if "\ufffd" not in token]
    assert len(whole) > 8
    for token, offset in whole:
        if offset + len(token) <= len(prompt):
            assert prompt[offset:].startswith(token)


def test_the_log_probabilities_of_an_echoed_prompt_are_those_of_its_ids_as_a_reply(client):
    """Greedy ids scored as they are decoded, then echoed as part of a prompt."""
    reply = client.completions.create(**arguments_of(completion(CODE, 12, logprobs=0)))
    echoed = client.completions.create(
        **arguments_of(completion(CODE + reply.choices[0].text, 1, echo=True, logprobs=0))
    )
    first = len(echoed.choices[0].logprobs.tokens) - 1 - 12
    scored = echoed.choices[0].logprobs.token_logprobs[first:-1]
    assert echoed.choices[0].logprobs.tokens[first:-1] == reply.choices[0].logprobs.tokens
    assert close(scored, reply.choices[0].logprobs.token_logprobs)
