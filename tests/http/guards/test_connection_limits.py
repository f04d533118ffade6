"""Limits of one connection, over real sockets. Each limit has its status, and other clients are served."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from fastdeploy.core.config import ServeConfig
from fastdeploy.http.guards.connection_limits import MIN_PROGRESS
from support.fake_engine_server import reply_with
from support.http_calls import in_thread, wait_until
from support.upload_engine import UploadEngine

MIB = 1 << 20
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@contextlib.contextmanager
def connected(stack, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20) as connection:
        connection.sendall(sent)
        yield connection


def answer(connection: socket.socket) -> tuple[int, str, bytes]:
    """Read until the server closes. Return (status, error code, head), or (0, "", b"") without an answer."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)["error"]["code"], head.lower()) if data else (0, "", b"")


def send_until_closed(connection: socket.socket, part: bytes, times: int) -> int:
    """Send ``part`` until the server closes the connection. Return how many times it was sent."""
    for sent in range(times):
        try:
            connection.sendall(part)
        except OSError:
            return sent
    return times


def served(stack) -> bool:
    stack.script(reply_with([97]))
    return stack.post("/v1/completions", prompt=[97], max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "part",
    [b"x-filler: " + b"a" * 8000 + b"\r\n", b"a" * 8192, b"x: y\r\n" * 1000],
    ids=["many headers", "one header without end", "short headers"],
)
def test_endless_headers_are_a_431_and_are_not_read_on(make_stack, part):
    stack = make_stack(max_header_kb=64)
    with connected(stack, GET + b"x-long: a") as connection:
        if not part.startswith(b"a"):
            connection.sendall(b"\r\n")
        assert send_until_closed(connection, part, 20_000) < 20_000
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert answer(connection)[:2] in ((431, "headers_too_large"), (0, ""))
    assert served(stack)


@pytest.mark.parametrize("headers", [b"x-filler: " + b"a" * (65 << 10) + b"\r\n", b"x: y\r\n" * 257])
def test_headers_beyond_a_limit_are_a_431_and_headers_below_it_are_served(make_stack, headers):
    stack = make_stack(max_header_kb=64)
    with connected(stack, GET + headers + b"\r\n") as connection:
        status, code, head = answer(connection)
    assert (status, code) == (431, "headers_too_large") and b"connection: close" in head
    fewer = headers[: len(headers) // 2].rpartition(b"\r\n")[0] or b"x-filler: " + b"a" * (60 << 10)
    with connected(stack, b"GET /health HTTP/1.1\r\nconnection: close\r\n" + fewer + b"\r\n\r\n") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_long_url_is_a_431(make_stack):
    stack = make_stack(max_header_kb=64)
    with connected(stack, b"GET /health?" + b"a" * (65 << 10) + b" HTTP/1.1\r\n\r\n") as connection:
        assert answer(connection)[:2] == (431, "headers_too_large")


def test_trailers_are_dropped(make_stack):
    stack = make_stack()
    stack.script(reply_with([97]))
    body = b'{"prompt": [97]}'
    chunked = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, b"x-trailer: y\r\n" * 1000)
    with connected(stack, POST + b"transfer-encoding: chunked\r\n\r\n" + chunked) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_silent_connection_is_closed(make_stack):
    with connected(make_stack(header_s=0.2)) as connection:
        assert answer(connection) == (0, "", b"")


def test_incomplete_headers_are_a_408(make_stack):
    stack = make_stack(header_s=0.2)
    with connected(stack, b"GET /health HTTP/1.1\r\nhost") as connection:
        assert answer(connection)[:2] == (408, "request_timeout")
    assert served(stack)


def test_incomplete_headers_behind_an_answered_request_are_a_408(make_stack):
    with connected(make_stack(header_s=0.2), b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /version HTT")
        assert answer(connection)[:2] == (408, "request_timeout")


@pytest.mark.parametrize("length", [100, 10 * MIB])
def test_an_incomplete_body_is_a_408(make_stack, length):
    stack = make_stack(body_idle_s=0.2)
    with connected(stack, POST + b'content-length: %d\r\n\r\n{"prompt"' % length) as connection:
        assert answer(connection)[:2] == (408, "request_timeout")
    assert served(stack)


def test_an_incomplete_upload_is_a_408_and_leaves_no_file(make_stack, tmp_path):
    stack = make_stack(body_idle_s=0.2, upload_dir=str(tmp_path))
    UploadEngine(stack.engine)
    head = b"POST /v1/update_weights HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    with connected(stack, head + b"content-length: 10000000\r\n\r\n" + bytes(1000)) as connection:
        assert answer(connection)[:2] == (408, "request_timeout")
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_body_that_arrives_slowly_but_steadily_is_accepted(make_stack):
    """Each part arrives in time, and all parts together take much longer than body_idle_s."""
    stack = make_stack(body_idle_s=60.0)
    stack.script(reply_with([97]))
    parts = [b'{"prompt": [97]' + b" " * 2 * MIB, b" " * 2 * MIB, b" " * 2 * MIB, b" " * 2 * MIB, b"}"]

    def slowly():
        for part in parts[:-1]:
            yield part
            wait_until(lambda: received(stack) >= MIN_PROGRESS)
            (connection,) = connections(stack)
            on_its_loop(connection, connection._overdue)
        yield parts[-1]

    assert stack.http.post("/v1/completions", content=slowly()).status_code == 200


def test_no_timer_runs_while_the_server_answers(make_stack):
    stack = make_stack(header_s=0.2, body_idle_s=0.2, keepalive_s=0.1)
    body = {"prompt": [97], "stream": True, "request_id": "r"}
    with stack.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        for _ in range(6):
            assert next(line for line in lines if line).startswith(": keep-alive")
        stack.engine.emit("r", [97], finish_reason="length")
        assert any(line == "data: [DONE]" for line in lines)


def test_connections_beyond_the_limit_are_a_429_until_others_have_gone(make_stack):
    stack = make_stack(max_connections=4)
    with contextlib.ExitStack() as others:
        for _ in range(3):  # the fourth connection is that of stack.http
            others.enter_context(connected(stack))
        wait_until(lambda: len(stack.server._server.server_state.connections) == 4)
        with connected(stack) as connection:
            status, code, head = answer(connection)
        assert (status, code) == (429, "server_busy") and b"retry-after: 1" in head
        assert served(stack), "on an old connection"
    wait_until(lambda: len(stack.server._server.server_state.connections) == 1)
    with connected(stack, b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_too_many_pipelined_requests_are_refused(stack):
    """The first request is never answered, so all others wait."""
    body = b'{"prompt": [97], "stream": true}'
    with connected(stack, (POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)) * 100) as connection:
        assert answer(connection) == (0, "", b""), "the client would take an answer for that of the first request"
    assert served(stack)


def half_body(size: int) -> bytes:
    return POST + b'content-length: %d\r\n\r\n{"prompt": [97]' % size + b" " * (size // 2)


def test_half_sent_bodies_hold_no_more_than_their_limit_and_small_requests_are_served(make_stack):
    stack = make_stack(max_bodies_mb=4, max_body_mb=2, body_idle_s=60.0)
    with contextlib.ExitStack() as others:
        for _ in range(10):
            in_thread(send, others.enter_context(connected(stack)), half_body(2 * MIB))
        wait_until(lambda: received(stack) >= 2 * MIB)
        assert served(stack)
        assert received(stack) <= 4 * MIB


def send(connection: socket.socket, data: bytes) -> None:
    """Send ``data``, unless the connection ends before."""
    with contextlib.suppress(OSError):
        connection.sendall(data)


def connections(stack) -> tuple:
    return tuple(stack.server._server.server_state.connections)


def on_its_loop(connection, action: Callable[[], None]) -> None:
    """Run ``action`` on the event loop of a connection of the server, and wait for its end."""
    done = threading.Event()
    connection.loop.call_soon_threadsafe(lambda: (action(), done.set()))
    assert done.wait(20)


def received(stack) -> int:
    """Return the bytes of incomplete bodies that the server has read since the last look at their progress."""
    return sum(connection._progress for connection in connections(stack))


def test_a_large_body_waits_for_room_and_is_then_served(make_stack):
    stack = make_stack(max_bodies_mb=1, max_body_mb=1, body_idle_s=60.0)
    stack.script(reply_with([97]))
    content = b'{"prompt": [97]' + b" " * (MIB - 100) + b"}"
    with connected(stack, half_body(MIB)):
        wait_until(lambda: received(stack) >= MIB // 2)
        replies = [in_thread(stack.http.post, "/v1/completions", content=content) for _ in range(3)]
        assert served(stack), "a small body does not wait"
        assert not any(reply.done() for reply in replies)
    assert [reply.result(20).status_code for reply in replies] == [200] * 3


def test_a_body_that_waits_too_long_for_room_is_a_429(make_stack):
    stack = make_stack(max_bodies_mb=256, max_body_mb=256, body_idle_s=2.0)
    with connected(stack, half_body(256 * MIB)[: 2 * MIB]):
        wait_until(lambda: received(stack) > MIB)  # more than is read before the body has its room
        for connection in connections(stack):
            on_its_loop(connection, connection._stop_timer)  # the first body arrives steadily
        body = b'{"prompt": [97]' + b" " * MIB + b"}"
        reply = stack.http.post("/v1/completions", content=body, timeout=100)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "server_busy")
    assert reply.headers["retry-after"] == "1" and reply.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"])
def test_the_bytes_of_a_body_are_freed_while_its_answer_is_made(make_stack, path):
    stack = make_stack(keepalive_s=0.1)
    fields = {
        "/v1/completions": b'"prompt": [97]',
        "/v1/chat/completions": b'"messages": [{"role": "user", "content": "a"}]',
        "/inference/v1/generate": b'"token_ids": [97], "sampling_params": {}',
        "/generate": b'"input_ids": [97]',
    }
    content = b'{"stream": true, ' + fields[path] + b" " * 8 * MIB + b"}"
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with stack.http.stream("POST", path, content=content) as reply:
            assert next(reply.iter_lines()).startswith(": keep-alive")
            assert tracemalloc.get_traced_memory()[0] - before < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("path", ["/nowhere", "/v1/update_weights"])
def test_the_body_of_a_refused_request_is_not_read_to_its_end(make_stack, path):
    stack = make_stack(max_upload_mb=1)
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n" % path.encode()
    with connected(stack, head + b"content-length: 4000000000\r\n\r\n") as connection:
        assert send_until_closed(connection, bytes(MIB), 200) < 200
        status, _, answered = answer(connection)
        assert (status in (404, 413) and b"connection: close" in answered) or status == 0


def test_the_answer_to_a_refused_request_reaches_a_client_that_still_sends(make_stack):
    stack = make_stack(max_body_mb=1)
    reply = stack.http.post("/v1/completions", content=b" " * 3 * MIB)
    assert reply.status_code == 413 and reply.headers["connection"] == "close"


@pytest.mark.parametrize("field", ["max_connections", "max_header_kb", "header_s", "body_idle_s", "max_bodies_mb"])
def test_limits_are_checked_at_the_start(field):
    with pytest.raises(Exception, match=field):
        ServeConfig(model="m", **{field: 0}).check()
