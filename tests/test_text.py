from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.adapters.text import IncrementalDecoder, StopMatcher


def pieces_of(tokenizer, ids):
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(index) for index in ids]
    return [*pieces, decoder.flush()]


@settings(max_examples=80, deadline=None)
@given(ids=st.lists(st.integers(1, 4095), max_size=40))
def test_the_pieces_of_any_ids_add_up_to_the_text_of_the_whole(embedded_pair, ids):
    tokenizer = embedded_pair.tokenizer
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "mixed é日👍 end", "  leading spaces"]
)
def test_no_piece_ends_inside_a_character(embedded_pair, text):
    tokenizer = embedded_pair.tokenizer
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_flushed_as_replacements(embedded_pair):
    tokenizer = embedded_pair.tokenizer
    ids = tokenizer.encode("日")[:-1]
    assert len(ids) >= 1
    pieces = pieces_of(tokenizer, ids)
    assert pieces[-1] == tokenizer.decode(ids)
    assert "".join(pieces[:-1]) == ""


def run(stops, pieces):
    matcher, out = StopMatcher(stops), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped:
            return "".join(out), True
    return "".join(out) + matcher.flush(), False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["ab"], ["xa", "by"], ("x", True)),
        (["ab"], ["xa", "cy"], ("xacy", False)),
        (["ab"], ["a"], ("a", False)),
        (["aab"], ["a", "a", "a", "b", "!"], ("a", True)),
        (["abcd", "bc"], ["a", "b", "c", "d"], ("a", True)),
        (["bc", "abc"], ["xabc"], ("x", True)),
        ([], ["abc"], ("abc", False)),
        (["\n\n"], ["one\n", "\ntwo"], ("one", True)),
    ],
)
def test_a_stop_string_cuts_the_text_and_held_text_is_flushed(stops, pieces, expected):
    assert run(stops, pieces) == expected


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 19)),
)
def test_the_text_goes_out_up_to_a_stop_string_and_holds_none_of_them(text, stops, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    out, stopped = run(stops, [text[first:last] for first, last in pairwise(edges)])
    starts = [text.find(stop) for stop in stops if stop in text]
    assert stopped == bool(starts)
    if not starts:
        assert out == text
    else:
        # the cut is where one of them begins: the first to be complete, or one that begins before it in the same piece
        assert text.startswith(out)
        assert any(text.startswith(stop, len(out)) for stop in stops)
        assert not any(stop in out for stop in stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abc", max_size=20), stop=st.text("abc", min_size=1, max_size=4), cuts=st.sets(st.integers(1, 19)))
def test_with_one_stop_string_the_cut_does_not_depend_on_how_the_text_arrives(text, stop, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    expected = (text[: text.find(stop)], True) if stop in text else (text, False)
    assert run([stop], [text[first:last] for first, last in pairwise(edges)]) == expected
