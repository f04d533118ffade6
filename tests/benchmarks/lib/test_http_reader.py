from __future__ import annotations

import pytest

from benchmarks.lib.http_reader import EventReader, ResponseReader, WireError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = b': keep-alive\n\ndata: {"a": 1}\n\n:\r\ndata: one\r\ndata: two\r\n\r\nevent: x\ndata:[DONE]\n\n'


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_a_chunked_body_comes_out_the_same_however_the_bytes_are_cut(step: int, chunk: int):
    wire = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS, chunk)
    reader = ResponseReader()
    body = b"".join(reader.feed(wire[i : i + step]) for i in range(0, len(wire), step))
    assert (body, reader.status, reader.done) == (EVENTS, 200, True)
    assert reader.headers["content-type"] == "text/event-stream"
    reader.feed_eof()


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_body_with_content_length_ends_by_itself(step: int):
    wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\ncontent-LENGTH: 5\r\nRetry-After: 1\r\n\r\nhello"
    reader = ResponseReader()
    body = b"".join(reader.feed(wire[i : i + step]) for i in range(0, len(wire), step))
    assert (body, reader.status, reader.headers["retry-after"], reader.done) == (b"hello", 503, "1", True)


def test_a_body_without_a_length_ends_with_the_connection():
    reader = ResponseReader()
    assert reader.feed(HEAD + b"\r\nabc") == b"abc"
    assert not reader.done
    reader.feed_eof()
    assert reader.done


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
        HEAD + b"Content-Length: 9\r\n\r\nab",
    ],
)
def test_a_connection_that_breaks_in_the_middle_is_an_error_and_no_end(wire: bytes):
    reader = ResponseReader()
    reader.feed(wire)
    with pytest.raises(WireError, match="middle of a response"):
        reader.feed_eof()


@pytest.mark.parametrize("wire", [b"nonsense\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_bytes_that_are_not_http_raise(wire: bytes):
    with pytest.raises(WireError):
        ResponseReader().feed(wire)


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_events_are_found_across_any_cut_and_comments_are_counted_not_returned(step: int):
    reader = EventReader()
    events = [event for i in range(0, len(EVENTS), step) for event in reader.feed(EVENTS[i : i + step])]
    assert events == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]
    assert reader.comments == 2
