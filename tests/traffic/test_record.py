"""The recorder as a proxy: what the engine and the client see, and what is in the file."""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct

import httpx
import pytest
from blake3 import blake3

from fastdeploy.traffic.file import Outcome, read_records
from fastdeploy.traffic.record import SMALL_BYTES
from traffic.wire import OK, STREAM, chunk, read_head, recorder

KEY = "sk-a-key-that-must-not-be-found"
MORE_THAN_SOCKETS_HOLD = 96 << 20  # bytes


def answering(reply: bytes, heads: list[bytes] | None = None):
    """Return a script that answers each request without a body by ``reply``."""

    async def script(reader, writer):
        while True:
            head = await read_head(reader)
            if heads is not None:
                heads.append(head)
            writer.write(reply)

    return script


async def test_the_engine_gets_the_request_as_it_was_but_for_its_own_host_and_headers_of_one_connection(tmp_path):
    heads = []
    async with recorder(tmp_path / "a", answering(OK, heads)) as wire:
        answer = await wire.ask(
            b"GET /v1//models/?a=1&a=%20b+c HTTP/1.1\r\nHost: trainer:1\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n"
            b"TE: trailers\r\nAuthorization: Bearer key\r\nX-Big: " + b"x" * 40000 + b"\r\n\r\n"
        )
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\n{}")
    line, *headers = heads[0].decode().strip().split("\r\n")
    assert line == "GET /v1//models/?a=1&a=%20b+c HTTP/1.1"
    assert sorted(headers) == sorted(
        [f"host: {wire.upstream[7:]}", "authorization: Bearer key", "x-big: " + "x" * 40000]
    )
    (exchange,) = wire.recording().exchanges
    assert exchange.target == "/v1//models/?a=1&a=%20b+c"


async def test_each_piece_of_a_stream_is_passed_on_and_recorded_with_its_bounds_before_the_next_one_comes(tmp_path):
    sent = [b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n", b"da", b"ta: 4\n\n"]
    seen = asyncio.Event()

    async def script(reader, writer):
        await read_head(reader)
        writer.write(STREAM)
        for piece in sent:
            seen.clear()
            writer.write(chunk(piece))
            await seen.wait()
        writer.write(b"0\r\n\r\n")

    got = []
    async with (
        recorder(tmp_path / "a", script) as wire,
        httpx.AsyncClient() as http,
        http.stream("GET", wire.url + "/s") as reply,
    ):
        async for piece in reply.aiter_raw():
            got.append(piece)
            seen.set()
    (exchange,) = wire.recording().exchanges
    assert got == sent == [data for _, data in exchange.pieces]
    times = [exchange.began, exchange.sent, exchange.answered, *(at for at, _ in exchange.pieces), exchange.ended]
    assert times == sorted(times) and exchange.outcome is Outcome.COMPLETE


async def test_chunks_that_come_together_keep_their_bounds(tmp_path):
    reply = STREAM + chunk(b"data: 1\n\n") + chunk(b"data: 2\n\n") + b"0\r\n\r\n"
    async with recorder(tmp_path / "a", answering(reply)) as wire, httpx.AsyncClient() as http:
        await http.get(wire.url)
    assert [data for _, data in wire.recording().exchanges[0].pieces] == [b"data: 1\n\n", b"data: 2\n\n"]


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 70000"),
        (b"GET", b"HTTP/1.1 204 No Content"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\netag: 7"),
    ],
)
async def test_a_reply_without_a_body_stays_one(tmp_path, method, reply):
    async with recorder(tmp_path / "a", answering(reply + b"\r\n\r\n")) as wire:
        answer = await wire.ask(method + b" / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert answer == reply + b"\r\nconnection: close\r\n\r\n"
    assert wire.recording().exchanges[0].outcome is Outcome.COMPLETE


async def test_a_compressed_reply_and_one_that_ends_with_its_connection_pass_untouched(tmp_path):
    body = gzip.compress(b'{"a": 1}')
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"

    async def script(reader, writer):
        await read_head(reader)
        writer.write(head + body)

    async with (
        recorder(tmp_path / "a", script) as wire,
        httpx.AsyncClient() as http,
        http.stream("GET", wire.url) as reply,
    ):
        assert b"".join([piece async for piece in reply.aiter_raw()]) == body
    exchange = wire.recording().exchanges[0]
    assert b"".join(data for _, data in exchange.pieces) == body and exchange.outcome is Outcome.COMPLETE


async def test_a_client_that_waits_for_100_continue_gets_it_from_the_engine_or_its_refusal(tmp_path):
    refused = b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n"
    bodies = []

    async def script(reader, writer):
        while True:
            head = await read_head(reader)
            if b"refuse" in head:
                writer.write(refused)
                return
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            bodies.append(await reader.readexactly(4))
            writer.write(OK)

    ask = b"POST /%b HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    async with recorder(tmp_path / "a", script) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(ask % b"take")
        assert await read_head(reader) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"1234")
        assert (await read_head(reader)).startswith(b"HTTP/1.1 200")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(ask % b"refuse")
        assert (await read_head(reader)).startswith(b"HTTP/1.1 413")
        writer.close()
    assert bodies == [b"1234"]


async def test_an_answer_that_comes_before_the_end_of_an_upload_reaches_the_client(tmp_path):
    async def script(reader, writer):
        await read_head(reader)
        writer.write(b"HTTP/1.1 409 Conflict\r\ncontent-length: 2\r\n\r\n{}")
        await asyncio.sleep(3600)  # reads no more

    async with recorder(tmp_path / "a", script) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 1000)
        assert (await read_head(reader)).startswith(b"HTTP/1.1 409")
        writer.close()


async def test_a_connection_on_which_an_upload_did_not_end_has_no_other_request(tmp_path):
    heads = []

    async def script(reader, writer):
        while True:
            heads.append((await read_head(reader)).partition(b" HTTP")[0])
            writer.write(OK)

    async with recorder(tmp_path / "a", script) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n")
        await reader.readuntil(b"{}")
        writer.close()
        await wire.ask(b"GET /next HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert wire.connections == 2
    assert heads == [b"POST /upload", b"GET /next"]


async def test_a_reply_that_ends_with_its_connection_and_is_reset_has_failed(tmp_path):
    async def script(reader, writer):
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nab")
        await asyncio.sleep(0.05)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with recorder(tmp_path / "a", script) as wire:
        await wire.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    (exchange,) = wire.recording().exchanges
    assert exchange.outcome is Outcome.UPSTREAM_FAILED and exchange.pieces[0][1] == b"ab"


async def unsent(writer: asyncio.StreamWriter) -> int:
    """Return the number of bytes that a writer holds when the other side has read nothing for a while."""
    sizes = [0]
    while len(sizes) < 20 or len(set(sizes[-20:])) > 1:
        await asyncio.sleep(0.01)
        sizes.append(writer.transport.get_write_buffer_size())
    return sizes[-1]


async def test_the_engine_waits_for_a_client_that_does_not_read_its_reply(tmp_path):
    sending = asyncio.Future()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n"

    async def script(reader, writer):
        await read_head(reader)
        writer.write(head % MORE_THAN_SOCKETS_HOLD + bytes(MORE_THAN_SOCKETS_HOLD))
        sending.set_result(writer)
        await writer.drain()

    async with recorder(tmp_path / "a", script) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert await unsent(await sending) > 0
        writer.transport.abort()


async def test_the_client_waits_for_an_engine_that_does_not_read_its_upload(tmp_path):
    go_on = asyncio.Event()

    async def script(reader, writer):
        await read_head(reader)
        await go_on.wait()
        await reader.readexactly(MORE_THAN_SOCKETS_HOLD)
        writer.write(OK)

    async with recorder(tmp_path / "a", script) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % MORE_THAN_SOCKETS_HOLD + bytes(MORE_THAN_SOCKETS_HOLD))
        assert await unsent(writer) > 0
        go_on.set()
        await reader.readuntil(b"{}")
        writer.close()


@pytest.mark.parametrize(("size", "kept"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
async def test_a_small_reply_of_data_is_kept(tmp_path, size, kept):
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {size}\r\n\r\n"
    async with recorder(tmp_path / "a", answering(head.encode() + bytes(size))) as wire:
        await wire.ask(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    (exchange,) = wire.recording().exchanges
    assert (exchange.reply_kept, exchange.reply_size) == (kept, size)
    assert sum(len(data) for _, data in exchange.pieces) == size * kept


async def test_a_client_that_leaves_cancels_its_request_at_the_engine(tmp_path):
    cancelled = asyncio.Event()

    async def script(reader, writer):
        await read_head(reader)
        writer.write(STREAM + chunk(b"data: 1\n\n"))
        await reader.read()
        cancelled.set()

    async with recorder(tmp_path / "a", script) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"data: 1\n\n")
        writer.transport.abort()
        await asyncio.wait_for(cancelled.wait(), 30)
    exchange = wire.recording().exchanges[0]
    assert exchange.outcome is Outcome.CLIENT_LEFT and [data for _, data in exchange.pieces] == [b"data: 1\n\n"]


async def test_a_reply_that_breaks_off_breaks_off_for_the_client(tmp_path):
    async def script(reader, writer):
        await read_head(reader)
        writer.write(STREAM + chunk(b"data: 1\n\n"))

    async with recorder(tmp_path / "a", script) as wire, httpx.AsyncClient() as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(wire.url)
    exchange = wire.recording().exchanges[0]
    assert exchange.outcome is Outcome.UPSTREAM_FAILED and "in the middle" in exchange.error and exchange.pieces


async def test_an_engine_that_cannot_be_reached_or_speaks_no_http_is_a_502_that_names_it(tmp_path):
    async def script(reader, writer):
        await read_head(reader)
        writer.write(b"220 smtp\r\n")

    async with recorder(tmp_path / "a", script, user="me:secret-word@") as wire, httpx.AsyncClient() as http:
        reply = await http.get(wire.url)
    error = reply.json()["error"]
    assert reply.status_code == 502 and error["upstream"] == wire.upstream and "no HTTP/1.1" in error["message"]
    assert "secret-word" not in reply.text
    exchange = wire.recording().exchanges[0]
    assert exchange.outcome is Outcome.UPSTREAM_FAILED and exchange.pieces[0][1] == reply.content


@pytest.mark.parametrize("keep_all", [False, True])
async def test_an_upload_is_in_the_file_as_size_and_hash_or_whole(tmp_path, keep_all):
    body = bytes(range(256)) * 4000
    got = bytearray()

    async def script(reader, writer):
        await read_head(reader)
        got.extend(await reader.readexactly(len(body)))
        writer.write(OK)

    async with recorder(tmp_path / "a", script, keep_all=keep_all) as wire, httpx.AsyncClient() as http:
        await http.post(wire.url, content=body, headers={"content-type": "application/octet-stream"})
    exchange = wire.recording().exchanges[0]
    assert got == body and exchange.request_size == len(body)
    assert exchange.request_hash == blake3(body).hexdigest()
    assert exchange.request == (body if keep_all else None)


async def test_a_chunked_upload_arrives_chunked(tmp_path):
    arrived = []

    async def script(reader, writer):
        arrived.append(await read_head(reader))
        arrived.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(OK)

    async def body():
        yield b'{"prompt": '
        yield b'"a"}'

    async with recorder(tmp_path / "a", script) as wire, httpx.AsyncClient() as http:
        await http.post(wire.url, content=body())
    assert b"transfer-encoding: chunked" in arrived[0] and b"content-length" not in arrived[0]
    assert wire.recording().exchanges[0].request == b'{"prompt": "a"}'


async def test_requests_at_the_same_time_are_recorded_apart(tmp_path):
    release = asyncio.Event()

    async def script(reader, writer):
        while True:
            head = await read_head(reader)
            name = head.split()[1]
            if name == b"/slow":
                await release.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(name), name))

    async with recorder(tmp_path / "a", script) as wire, httpx.AsyncClient() as http:
        slow = asyncio.create_task(http.get(wire.url + "/slow"))
        while not wire.path.exists() or len(list(read_records(str(wire.path)))) < 2:
            await asyncio.sleep(0.01)
        assert (await http.get(wire.url + "/fast")).text == "/fast"
        release.set()
        assert (await slow).text == "/slow"
    slow_one, fast_one = wire.recording().exchanges
    assert (slow_one.path, fast_one.path) == ("/slow", "/fast")
    assert slow_one.began < fast_one.began < fast_one.ended < slow_one.ended


async def test_no_key_is_in_the_file_wherever_it_stood(tmp_path):
    """The raw bytes of the file are searched, and those of its records."""
    other = "another-key-of-the-engine"
    reply = b'{"settings": {"api_key": "%b"}, "error": "no such key: %b"}' % (other.encode(), KEY.encode())
    event = b"data: " + KEY.encode()[:9], KEY.encode()[9:] + b"\n\n"  # a key in two pieces of a stream

    async def script(reader, writer):
        head = await read_head(reader)
        length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        if b"/stream" in head:
            writer.write(STREAM + chunk(event[0]) + chunk(event[1]) + b"0\r\n\r\n")
        elif b"/zip" in head:
            body = gzip.compress(reply)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
        else:
            writer.write(
                b"HTTP/1.1 401 No\r\ncontent-type: application/json\r\nset-cookie: s=%b; Path=/\r\n"
                b"location: http://u:%b@h/?token=%b\r\ncontent-length: %d\r\n\r\n%b"
                % (KEY.encode(), KEY.encode(), KEY.encode(), len(reply), reply)
            )

    sent = [
        {"headers": {"Authorization": f"Bearer {KEY}"}},
        {"headers": {"X-Api-Key": KEY, "api-key": KEY, "Cookie": f"a=b; session={KEY}"}},
        {"auth": ("user", KEY)},
        {"params": {"api_key": KEY, "access_token": KEY, "token": KEY}},
        {"json": {"messages": [{"api_key": KEY}], "extra": {"deep": [[{"Access-Token": [KEY]}]]}, "prompt": KEY}},
        {"json": {"image": f"https://me:{KEY}@host/a?sig={KEY}", "arguments": f'{{"api_key": "{KEY}"}}'}},
        {"data": {"password": KEY, "a": "b"}},
        {"content": f'{{"api\\u005fkey": "{KEY}", "n": NaN}}'},
        {"content": f"not json, but api_key=x&token={KEY}"},
        {"files": {"file": ("a.bin", KEY.encode())}},
    ]
    async with recorder(tmp_path / "a", script) as wire, httpx.AsyncClient() as http:
        for fields in sent:
            await http.post(
                wire.url + "/v1/completions", **{"content": b"", **fields} if "headers" in fields else fields
            )
        for path in ("/stream", "/zip", f"/keys/{KEY}"):
            await http.post(wire.url + path, json={})
    found = wire.path.read_bytes() + b"".join(repr(record).encode() for record in read_records(str(wire.path)))
    for key in (KEY, other, KEY[9:]):
        assert key.encode() not in found, key
    exchanges = wire.recording().exchanges
    assert len(exchanges) == len(sent) + 3 and all(one.outcome is Outcome.COMPLETE for one in exchanges)
    assert b"no such key: [removed]" in exchanges[0].pieces[0][1]
