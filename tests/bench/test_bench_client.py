"""The client, against a local server that cuts its stream at arbitrary places."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from fastdeploy.bench.client import Client, ServerError, Stream, WireError

TEXT = "zwölf µs"


def event(ids: list[int], text: str = "", reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


GOOD = event([1, 2], TEXT) + b": ping\n\n" + event([3]) + event([], "", "abort") + b"data: [DONE]\n\n"


def against(pieces: list[bytes], use: Callable, pause_s: float = 0.0):
    """Run ``use(client)`` against a server that answers every request with ``pieces``, one write each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await use(Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))

    return asyncio.run(run())


def framed(body: bytes, cut: int) -> list[bytes]:
    """Return a chunked response whose HTTP chunks and writes are not aligned with events or characters."""
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 11]), body[i : i + 11]) for i in range(0, len(body), 11))
    wire += b"0\r\n\r\n"
    return [wire[i : i + cut] for i in range(0, len(wire), cut)]


async def read(client: Client):
    stream: Stream = await client.stream("/v1/completions", {"stream": True}, "r1")
    return await stream.wait_closed()


@pytest.mark.parametrize("cut", [1, 3, 17, 5000])
def test_a_stream_is_read_whole_wherever_it_is_cut(cut: int):
    log = against(framed(GOOD, cut), read)
    assert (log.status, log.token_ids, log.text, log.reason) == (200, [1, 2, 3], TEXT, "abort")
    assert (log.comments, len(log.finals), log.done_markers, log.error) == (1, 1, 1, None)
    assert log.ended_once


def test_a_broken_stream_has_not_ended_once():
    log = against([framed(GOOD, 5000)[0][:-9]], read)
    assert log.token_ids == [1, 2, 3]
    assert "middle of a response" in log.error
    assert not log.ended_once


def test_a_stream_without_done_has_not_ended_once():
    assert not against(framed(GOOD.removesuffix(b"data: [DONE]\n\n"), 5000), read).ended_once


def test_text_without_a_token_is_not_counted_as_a_token():
    log = against(framed(event([1], "a") + event([], "b", "abort") + b"data: [DONE]\n\n", 5000), read)
    assert (log.num_tokens, len(log.tokens), log.text) == (1, 1, "ab")


def test_a_refusal_is_kept_with_its_status_headers_and_body():
    body = b'{"error": {"message": "paused", "type": "t", "code": "c"}}'
    head = b"HTTP/1.1 503 No\r\nRetry-After: 1\r\nContent-Length: %d\r\n\r\n" % len(body)
    log = against([head, body], read)
    assert (log.status, log.headers["retry-after"], json.loads(log.error)["error"]["code"]) == (503, "1", "c")
    assert log.num_tokens == 0


def test_an_error_in_the_middle_of_a_stream_is_kept():
    log = against(framed(event([1]) + b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n', 9), read)
    assert log.error == "engine died"
    assert not log.ended_once


def test_waiting_for_tokens_returns_at_that_many_and_not_at_the_end():
    async def use(client: Client) -> tuple[int, bool]:
        stream = await client.stream("/", {}, "r1")
        await stream.wait_tokens(2)
        seen, ended = stream.log.num_tokens, stream.log.closed_at is not None
        stream.cancel()
        return seen, ended

    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert against([head, event([1]), event([2]), *[b": wait\n\n"] * 20], use, pause_s=0.02) == (2, False)


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-LENGTH: 5\r\n\r\nhello", "hello"),
        (b"HTTP/1.1 200 OK\r\n\r\nends with the connection", "ends with the connection"),
        (b"HTTP/1.1 200 OK\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None),
        (b"nonsense\r\n\r\n", None),
    ],
)
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_response_ends_as_its_head_says_and_one_that_breaks_is_an_error(wire: bytes, body: str | None, cut: int):
    pieces = [wire[i : i + cut] for i in range(0, len(wire), cut)]

    async def use(client: Client) -> object:
        return (await client.call("GET", "/")).body

    if body is None:
        with pytest.raises(WireError):
            against(pieces, use)
    else:
        assert against(pieces, use) == body


def test_a_control_call_returns_its_result_and_a_refusal_raises():
    async def use(client: Client) -> object:
        return await client.post("/v1/resume")

    head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n"
    good, bad = b'{"status": "success", "result": 7}', b'{"status": "error", "result": null}'
    assert against([head % (200, len(good)), good], use) == 7
    for status, body in ((409, good), (200, bad)):
        with pytest.raises(ServerError):
            against([head % (status, len(body)), body], use)
