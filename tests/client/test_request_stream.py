"""Outputs that a late reader takes."""

from __future__ import annotations

from fastdeploy.client import request_stream
from fastdeploy.client.request_stream import RequestStream, joined
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.inter_communicator.messages import Output

FIRST = Output("r", 1, [5], [Logprob(-1.0)], [Span("v", 0, 0, 1)], prompt_logprobs=[Logprob(-2.0)], cached_tokens=3)
LAST = Output("r", 1, [6, 7], [Logprob(-3.0)] * 2, [Span("v", 0, 1, 3)], "stop", 7, [], 0, 2, "why")


def test_two_outputs_of_a_choice_are_joined_field_by_field():
    both = joined([FIRST, LAST])
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
    assert stream.take() == [joined([FIRST, LAST]), other] and stream.take() == []
    stream.put(Output("r", 0, [8], finish_reason="length"))
    assert stream.ended and [o.token_ids for o in stream.take()] == [[8]]
    stream.put(Output("r", 0, [1]))
    assert stream.take() == [], "outputs after the end are ignored"


def test_outputs_are_joined_once_when_they_are_taken(monkeypatch):
    count = 2000
    stream = RequestStream("r", 1, lambda *_: None, lambda _: None)
    copied: list[int] = []

    def counting(outputs: list[Output]) -> Output:
        copied.append(sum(len(output.token_ids) for output in outputs))
        return joined(outputs)

    monkeypatch.setattr(request_stream, "joined", counting)
    for token in range(count):
        stream.put(Output("r", 0, [token]))
    assert [output.token_ids for output in stream.take()] == [list(range(count))]
    assert sum(copied) == count
