from posttrainllm.adapters.completion import Completion
from posttrainllm.adapters.params import SamplingParams
from posttrainllm.adapters.rows import RowStep


def step(*tokens: int, proposed: int = 4, accepted: int | None = None) -> RowStep:
    return RowStep(
        tokens=tokens,
        proposed=proposed,
        accepted=len(tokens) - 1 if accepted is None else accepted,
        finite=True,
        margins=(),
    )


def half_a_character(tokenizer) -> int:
    """An id whose bytes begin a character and do not end it."""
    return next(index for index in range(tokenizer.size) if tokenizer.decode([index]) == "\ufffd")


def test_a_stop_string_that_only_the_last_flush_completes_ends_the_reply_as_a_stop(embedded_pair):
    params = SamplingParams(stop="\ufffd", max_tokens=1)
    completion = Completion(embedded_pair.tokenizer, params, prompt_tokens=1, count=1)
    chunk = completion.absorb(step(half_a_character(embedded_pair.tokenizer)))
    assert (chunk.text, chunk.finish_reason) == ("", "stop")


def test_ids_behind_the_one_that_ends_a_reply_are_neither_kept_nor_counted(embedded_pair):
    tokenizer = embedded_pair.tokenizer
    end = next(iter(tokenizer.eos_ids))
    word = tokenizer.encode("def")[-1]
    completion = Completion(tokenizer, SamplingParams(max_tokens=9), prompt_tokens=1, count=9)
    chunk = completion.absorb(step(word, end, word, word, word))
    assert (chunk.token_ids, chunk.finish_reason) == ((word, end), "stop")
    usage = completion.usage()
    assert (usage.completion_tokens, usage.draft_proposed, usage.draft_accepted) == (2, 2, 2)
