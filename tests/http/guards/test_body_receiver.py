"""The body of an upload that is received past the parser: the connection stays in order, and its limits hold."""

from __future__ import annotations

import json
import os
import socket

import pytest

from support.http_calls import wait_until
from support.upload_engine import SESSION, UploadEngine

BODY = os.urandom(300_000)
STATUS = b"GET /v1/weights HTTP/1.1\r\nhost: localhost\r\n\r\n"


def head(body: bytes = BODY, more: str = "") -> bytes:
    fields = f"host: localhost\r\ncontent-type: application/octet-stream\r\ncontent-length: {len(body)}\r\n{more}"
    return f"POST /v1/weights/chunk?session_id={SESSION} HTTP/1.1\r\n{fields}\r\n".encode()


@pytest.fixture
def body_idle_s():
    return 60.0


@pytest.fixture
def stack(make_stack, tmp_path, body_idle_s):
    stack = make_stack(upload_dir=str(tmp_path), body_idle_s=body_idle_s)
    stack.uploads = UploadEngine(stack.engine)
    return stack


@pytest.fixture
def connection(stack):
    with socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20) as connection:
        yield connection


def read_reply(connection: socket.socket) -> tuple[int, dict]:
    """Return status and body of the next reply, without a byte of a later one."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += connection.recv(1) or pytest.fail(f"the connection ended: {raw!r}")
    fields = dict(line.split(b": ", 1) for line in raw.split(b"\r\n")[1:-2])
    body = b""
    while len(body) < int(fields.get(b"content-length", b"0")):
        body += connection.recv(int(fields[b"content-length"]) - len(body))
    return int(raw.split()[1]), json.loads(body or b"{}")


@pytest.mark.parametrize("first", [0, 1000, 70_000, len(BODY) - 1, len(BODY)])
def test_a_connection_takes_further_requests_after_an_upload(stack, connection, first):
    """first: bytes of the body that come together with the headers."""
    for number in (1, 2):
        connection.sendall(head() + BODY[:first])
        connection.sendall(BODY[first:])
        assert read_reply(connection)[0] == 200
        assert stack.uploads.bodies == [BODY] * number
        connection.sendall(STATUS)
        assert read_reply(connection)[0] == 200


def test_requests_that_are_sent_behind_an_upload_are_answered_in_order(stack, connection):
    connection.sendall((head() + BODY + STATUS) * 2)
    replies = [read_reply(connection) for _ in range(4)]
    assert [status for status, _ in replies] == [200] * 4
    assert ["session" in reply["result"] for _, reply in replies] == [False, True] * 2
    assert stack.uploads.bodies == [BODY, BODY]


def test_a_client_that_waits_for_100_continue_is_told_to_go_on(stack, connection):
    connection.sendall(head(more="expect: 100-continue\r\n"))
    assert read_reply(connection)[0] == 100
    connection.sendall(BODY)
    assert read_reply(connection)[0] == 200 and stack.uploads.bodies == [BODY]


@pytest.mark.parametrize("body_idle_s", [0.5])
def test_a_body_that_makes_no_progress_is_a_408(stack, connection, tmp_path):
    connection.sendall(head() + BODY[:100_000])
    status, reply = read_reply(connection)
    assert (status, reply["error"]["code"]) == (408, "request_timeout")
    assert connection.recv(1) == b"", "the connection is closed"
    wait_until(lambda: not list(tmp_path.iterdir()))
    assert not stack.uploads.calls


@pytest.mark.parametrize("body_idle_s", [0.5])
def test_a_body_that_waits_for_the_engine_is_not_too_slow(stack, connection):
    """The server is the slow side."""
    stack.uploads.reads = False
    connection.sendall(head() + BODY)
    wait_until(lambda: stack.uploads.calls)
    connection.settimeout(1.5)  # three times body_idle_s
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(20)
    stack.uploads.go_on()
    assert read_reply(connection)[0] == 200
