"""Outputs that a late reader takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.client import request_stream
from fastdeploy.client.choice import Choice, TextOptions
from fastdeploy.client.request_stream import RequestStream, joined
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.messages import Output
from support.fake_runner import expected_tokens
from support.harness import Harness
from support.search import examples

FIRST = Output("r", 1, [5], [Logprob(-1.0)], [Span("v", 0, 0, 1)], prompt_logprobs=[Logprob(-2.0)], cached_tokens=3)
LAST = Output("r", 1, [6, 7], [Logprob(-3.0)] * 2, [Span("v", 0, 1, 3)], "stop", 7, [], 0, 2, "why")


def test_two_outputs_of_a_choice_are_joined_field_by_field():
    (both,) = joined([FIRST, LAST])
    for field in Output.__struct_fields__:
        first, last, found = (getattr(output, field) for output in (FIRST, LAST, both))
        if field in ("request_id", "choice"):
            assert found == first
        elif field in ("finish_reason", "stop_reason", "message"):
            assert found == last
        else:
            assert found == first + last, field
    assert FIRST.token_ids == [5] and LAST.token_ids == [6, 7]


def test_a_late_reader_takes_one_joined_output_of_each_choice_once():
    stream = RequestStream("r", 2, lambda *_: None, lambda _: None)
    other = Output("r", 0, [9])
    for output in (FIRST, other, LAST):
        stream.put(output)
    assert stream.read() == [*joined([FIRST, LAST]), other] and stream.read() == []
    stream.put(Output("r", 0, [8], finish_reason="length"))
    assert stream.ended and [o.token_ids for o in stream.read()] == [[8]]
    stream.put(Output("r", 0, [1]))
    assert stream.read() == [], "outputs after the end are ignored"


def test_outputs_are_joined_once_when_they_are_taken(monkeypatch):
    count = 2000
    stream = RequestStream("r", 1, lambda *_: None, lambda _: None)
    copied: list[int] = []

    def counting(outputs: list[Output]) -> list[Output]:
        copied.append(sum(len(output.token_ids) for output in outputs))
        return joined(outputs)

    monkeypatch.setattr(request_stream, "joined", counting)
    for token in range(count):
        stream.put(Output("r", 0, [token]))
    assert [output.token_ids for output in stream.read()] == [list(range(count))]
    assert sum(copied) == count


def taken(stream: RequestStream, choice: Choice) -> Choice:
    """Give what is there to ``choice``, as Generation does."""
    for output in stream.read():
        if choice.finish_reason is None:
            choice.feed(output)
    return choice


@examples(100)
@given(
    outputs=st.lists(st.tuples(st.text(alphabet="abc", max_size=3), st.booleans()), max_size=6),
    last=st.text(alphabet="abc", max_size=2),
    reason=st.sampled_from(["stop", "length", "abort"]),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=2),
)
def test_a_choice_is_the_same_however_late_its_outputs_are_taken(tokenizer, outputs, last, reason, stops):
    """outputs: with each, whether the reader takes what is there then."""
    final = (last, reason)

    def choice(late: bool) -> tuple:
        stream = RequestStream("r", 1, lambda *_: None, lambda _: None)
        choice, start = Choice(tokenizer, [], TextOptions(tuple(stops))), 0
        for text, takes in [*outputs, final]:
            ids = list(text.encode())
            stream.put(Output("r", 0, ids, spans=[Span("v", 1, start, start + len(ids))] if ids else [],
                              finish_reason=reason if (text, takes) is final else None))  # fmt: skip
            start += len(ids)
            if takes or not late:
                taken(stream, choice)
        return choice.text, choice.token_ids, choice.spans, choice.finish_reason, choice.stop_reason

    assert choice(late=True) == choice(late=False)


@pytest.mark.parametrize("position", [0, 3])
def test_a_retained_result_that_comes_again_ends_at_its_stop_string_also_in_its_last_token(tokenizer, position):
    prompt = next([k] for k in range(10_000) if chr(expected_tokens([k], 4)[position]).isascii())
    h = Harness()
    fields = {"retain_s": 10.0, "fingerprint": "f", "max_tokens": 20}
    h.add("r", prompt, **fields)
    h.run_rounds(position + 1)
    tokens = h.stream("r").tokens
    stop = tokenizer.decode(tokens[-1:])
    assert len(tokens) == position + 1 and tokenizer.decode(tokens).index(stop) == len(tokenizer.decode(tokens)) - 1
    h.send(m.CancelRequest("r", 0, "stop"))  # by an API server, which has found the stop string
    h.run_rounds()
    h.transport.sent["a"].clear()
    h.add("r", prompt, **fields)
    h.run_rounds()
    stream = RequestStream("r", 1, lambda *_: None, lambda _: None)
    for message in h.transport.sent["a"]:
        for output in message.outputs if isinstance(message, m.Outputs) else []:
            stream.put(output)
    choice = taken(stream, Choice(tokenizer, prompt, TextOptions((stop,))))
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (tokens, "stop", stop)
    assert choice.text == tokenizer.decode(tokens).removesuffix(stop)
