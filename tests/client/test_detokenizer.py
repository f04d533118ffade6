"""Incremental decoding, and stop strings."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.client.choice import Choice, TextOptions
from fastdeploy.client.detokenizer import IncrementalDecoder, StopSearch
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.inter_communicator.messages import Output
from support.search import examples

EOS = 261


def feed(choice: Choice, ids: list[int], finish: str | None = None, start: int | None = None, stop_reason=None):
    start = len(choice.token_ids) if start is None else start
    output = Output(
        "r",
        0,
        token_ids=ids,
        logprobs=[Logprob(-float(i)) for i in ids],
        spans=[Span("v", 1, start, start + len(ids))] if ids else [],
        finish_reason=finish,
        stop_reason=stop_reason,
    )
    return choice.feed(output)


def assert_aligned(choice: Choice) -> None:
    assert len(choice.logprobs) == len(choice.token_ids)
    assert (choice.spans[-1].end if choice.spans else 0) == len(choice.token_ids)


@examples(200)
@given(text=st.text(max_size=40), cut=st.integers(0, 40))
def test_the_texts_of_all_pushes_join_to_the_decoding_of_all_ids(tokenizer, text, cut):
    ids = tokenizer.encode_now(text)
    prompt, output = ids[:cut], ids[cut:]
    decoder = IncrementalDecoder(tokenizer, prompt)
    pieces = [decoder.push(token) for token in output] + [decoder.rest()]
    before = tokenizer.decode(prompt)
    if not text.startswith(before):  # the cut is inside a character
        before = before.removesuffix("\ufffd")
    if output:
        assert before + "".join(pieces) == text


def test_an_incomplete_character_is_held_back(tokenizer):
    decoder = IncrementalDecoder(tokenizer, [])
    assert [decoder.push(byte) for byte in "aé😀".encode()] == ["a", "", "é", "", "", "", "😀"]


def test_bytes_that_are_not_utf_8_are_not_held_back_for_ever(tokenizer):
    decoder = IncrementalDecoder(tokenizer, [])
    shown = "".join(decoder.push(0xB9) for _ in range(20))
    assert len(shown) >= 15
    assert shown + decoder.push(ord("a")) == "\ufffd" * 20 + "a"


def test_a_prompt_that_ends_inside_a_character_is_continued(tokenizer):
    first, second = "é".encode()
    choice = Choice(tokenizer, [ord("a"), first], TextOptions())
    assert feed(choice, [second], "length").text == "é"


def test_a_stop_string_over_several_tokens_cuts_ids_logprobs_and_spans_at_the_token_that_completed_it(tokenizer):
    choice = Choice(tokenizer, [], TextOptions(stops=("XYZ",)))
    assert feed(choice, list(b"abX")).text == "ab"
    assert feed(choice, list(b"Y")).text == ""
    delta = feed(choice, list(b"Zcd"), start=4)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [ord("Z")], "stop")
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "XYZ")
    assert choice.token_ids == list(b"abXYZ")
    assert_aligned(choice)


def test_text_is_held_back_only_while_it_may_become_a_stop_string(tokenizer):
    choice = Choice(tokenizer, [], TextOptions(stops=("XYZ",)))
    assert [feed(choice, [byte]).text for byte in b"aXYb"] == ["a", "", "", "XYb"]


@pytest.mark.parametrize("reason", ["abort", "length"])
def test_held_back_text_is_flushed_at_the_end(tokenizer, reason):
    choice = Choice(tokenizer, [], TextOptions(stops=("XYZ",)))
    feed(choice, list(b"aXY"))
    assert feed(choice, [], reason).text == "XY"
    assert (choice.text, choice.finish_reason) == ("aXY", reason)
    assert_aligned(choice)


def test_an_incomplete_character_at_the_end_is_decoded_as_the_tokenizer_does(tokenizer):
    choice = Choice(tokenizer, [], TextOptions())
    ids = list("aé".encode())[:-1]
    assert feed(choice, ids).text == "a"
    assert feed(choice, [], "abort").text == "\ufffd"
    assert choice.text == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("options", "ids", "finish", "text", "num_tokens", "stop_reason"),
    [
        pytest.param({"stops": ("b",)}, b"abc", "abort", "a", 2, "b", id="a stop string overrides an abort"),
        pytest.param({"stops": ("d", "bcd", "cd")}, b"abcd", None, "a", 4, "bcd", id="the earliest stop string ends"),
        pytest.param({"stops": ("bc",), "include_stop": True}, b"abcd", None, "abc", 3, "bc", id="stop string kept"),
        pytest.param({"stops": ("b", "x"), "min_tokens": 3}, b"bbab", None, "bba", 4, "b", id="after min_tokens"),
        pytest.param({"stops": ("\ufffd",)}, b"a\xc3", "length", "a", 2, "\ufffd", id="in an incomplete character"),
        pytest.param(
            {"stops": ("a\ufffd",), "include_stop": True, "min_tokens": 2},
            b"a\xc3",
            "abort",
            "a\ufffd",
            2,
            "a\ufffd",
            id="an incomplete character that ends a stop string which is kept",
        ),
        pytest.param(
            {"stops": ("\ufffd",), "min_tokens": 3}, b"a\xc3", "length", "a\ufffd", 2, None, id="before min_tokens"
        ),
        pytest.param({"skip_special_tokens": False}, [97, EOS], "stop", "a", 2, None, id="EOS adds no text"),
        pytest.param({}, b"ab", "stop", "a", 2, ord("b"), id="a stop token adds no text"),
        pytest.param({}, [97, EOS, 98], "length", "ab", 3, None, id="special tokens skipped"),
        pytest.param({"skip_special_tokens": False}, [97, EOS, 98], "length", "a<eos>b", 3, None, id="special tokens"),
    ],
)
def test_text_ids_and_stop_reason_at_the_end(tokenizer, options, ids, finish, text, num_tokens, stop_reason):
    choice = Choice(tokenizer, [], TextOptions(**options))
    delta = feed(choice, list(ids), finish, stop_reason=stop_reason if type(stop_reason) is int else None)
    assert choice.text == delta.text == text and choice.token_ids == list(ids)[:num_tokens]
    ends_by_length = finish == "length" and stop_reason is None
    assert (choice.finish_reason, choice.stop_reason) == ("length" if ends_by_length else "stop", stop_reason)
    assert_aligned(choice)


def test_spans_of_the_same_weights_are_joined_and_others_are_not(tokenizer):
    choice = Choice(tokenizer, [], TextOptions())
    for start, version in enumerate(("v1", "v1", "v2", "v1")):
        choice.feed(Output("r", 0, token_ids=[97], spans=[Span(version, 1, start, start + 1)]))
    assert [(s.version, s.start, s.end) for s in choice.spans] == [("v1", 0, 2), ("v2", 2, 3), ("v1", 3, 4)]


def test_without_a_tokenizer_ids_pass_and_text_is_empty():
    choice = Choice(None, [], TextOptions())
    feed(choice, [1, 2, 3], "length")
    assert (choice.token_ids, choice.text) == ([1, 2, 3], "")


@examples(200)
@given(
    prompt=st.text(max_size=8),
    output=st.text(alphabet="abcé😀", max_size=12),
    cut=st.integers(0, 40),
    stops=st.lists(st.text(alphabet="abcé😀", min_size=1, max_size=4), max_size=2),
    include=st.booleans(),
    least=st.integers(0, 6),
)
def test_a_resumed_answer_has_the_text_and_the_end_of_an_undisturbed_one(
    tokenizer, prompt, output, cut, stops, include, least
):
    """Known failure 31: a character or a stop string may lie over the point where the answer resumes."""
    before, ids = tokenizer.encode_now(prompt), tokenizer.encode_now(output)

    def answer(resumed: int) -> tuple:
        options = TextOptions(tuple(stops), include, min_tokens=max(least - resumed, 0))
        choice = Choice(tokenizer, before + ids[:resumed], options, resumed)
        shown = ""
        for token in ids[resumed:]:
            if choice.finish_reason is None:
                shown += feed(choice, [token]).text
        if choice.finish_reason is None:
            shown += feed(choice, [], "length").text
        assert shown == choice.text
        return choice.text, choice.finish_reason, choice.stop_reason, ids[:resumed] + choice.token_ids

    undisturbed = answer(0)
    resumed = min(cut, len(ids))
    if resumed < len(undisturbed[3]) or undisturbed[1] == "length":  # not beyond its end
        assert answer(resumed) == undisturbed


def naive_hit(stops: list[str], text: str, old: int) -> tuple[str, int] | None:
    """Return the first stop string of those that end after index ``old``; of two that begin together, the first of
    ``stops``."""
    hits = [
        (end - len(stop), order)
        for end in range(old + 1, len(text) + 1)
        for order, stop in enumerate(stops)
        if text[:end].endswith(stop)
    ]
    return (stops[min(hits)[1]], min(hits)[0]) if hits else None


def naive_held_back(stops: list[str], text: str) -> int:
    beginnings = {stop[:size] for stop in stops for size in range(len(stop))}
    return max(size for size in range(len(text) + 1) if text[len(text) - size :] in beginnings | {""})


@examples(500)
@given(
    stops=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=6), max_size=6),
    pieces=st.lists(st.text(alphabet="ab😀", max_size=5), max_size=8),
)
def test_the_search_agrees_with_a_naive_search(stops, pieces):
    search, text = StopSearch(stops), ""
    for piece in pieces:
        text += piece
        assert search.push(piece) == naive_hit(stops, text, len(text) - len(piece))
        assert search.held_back == naive_held_back(stops, text)


def test_the_work_of_a_search_does_not_depend_on_the_stop_strings():
    """Count function calls while 1,000 characters are pushed: the count is the same on every machine."""

    def calls(stops: list[str]) -> int:
        search, counted = StopSearch(stops), 0

        def count(frame, event, argument) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for _ in range(1000):
                search.push("a")
                search.held_back  # noqa: B018
        finally:
            sys.setprofile(None)
        return counted

    few, many = calls(["ab"]), calls(["a" * 240 + chr(0x4E00 + i) * 16 for i in range(64)])
    assert many <= 2 * few
