"""Connections whose sending side is closed behind a request, over real sockets. A control call gets its answer; a
generation is cancelled, since its client may be gone."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output
from support.http_calls import answer, wait_until
from support.upload_engine import UploadEngine

VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(stack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.http.base_url.port), timeout=20)


def exchange_half_closed(stack, request: bytes) -> bytes:
    """Send ``request``, close the sending side, and return all that comes until the server closes."""
    with connect(stack) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def bodies(raw: bytes) -> list[dict]:
    """Return the bodies of successful replies that follow each other."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        nbytes = int(fields[b"content-length"])
        found, raw = [*found, json.loads(raw[:nbytes])], raw[nbytes:]
    return found


def connections(stack) -> set:
    return set(stack.server._server.server_state.connections)


def closed_early(stack, kind: type) -> None:
    """Let the engine answer a call of ``kind`` only when the server knows that the client sends no more."""

    def reply(call: m.Call) -> m.Reply:
        wait_until(lambda: any(connection._half_closed for connection in connections(stack)))
        return m.Reply(call.call_id, {"answered": kind.__name__}, None)

    stack.engine.replies[kind] = reply


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/pause", b'{"mode": "wait"}', m.PauseArgs),
        ("/v1/resume", b"{}", m.ResumeArgs),
        ("/v1/update_weights", b'{"model_path": "/w", "version": 1}', m.UpdateWeightsArgs),
        ("/v1/abort_requests", b'{"abort_all": true}', m.AbortArgs),
    ],
)
@pytest.mark.parametrize("behind", [b"", b"\r\n"])
def test_a_control_call_of_a_client_that_closes_its_sending_side_is_answered(stack, path, body, kind, behind):
    """``nc -N`` does that. A pause whose answer is lost would stand, and nobody would know."""
    closed_early(stack, kind)
    (reply,) = bodies(exchange_half_closed(stack, post(path, body) + behind))
    assert reply.get("result", reply)["answered"] == kind.__name__


def test_all_complete_requests_of_a_connection_are_answered_in_order(stack):
    closed_early(stack, m.PauseArgs)
    answer(stack, m.ResumeArgs, {"answered": "ResumeArgs"})
    sent = post("/v1/pause", b"{}") + VERSION + post("/v1/resume", b"{}")
    first, second, third = bodies(exchange_half_closed(stack, sent))
    assert [reply["result"]["answered"] for reply in (first, third)] == ["PauseArgs", "ResumeArgs"]
    assert "version" in second


def test_an_upload_of_a_client_that_closes_its_sending_side_is_answered(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    uploads = UploadEngine(stack.engine)
    body = bytes(300_000)
    raw = exchange_half_closed(stack, post("/v1/update_weights?version=1", body, "application/octet-stream"))
    assert len(bodies(raw)) == 1 and uploads.bodies == [body]


@pytest.mark.parametrize("sent", [b"", VERSION[:10], post("/v1/pause", b"{}")[:-1]])
def test_a_connection_without_a_complete_request_is_closed(stack, sent):
    others = connections(stack)
    assert exchange_half_closed(stack, sent) == b""
    wait_until(lambda: connections(stack) <= others)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["half", "closed", "reset"])
def test_a_generation_is_cancelled_when_its_client_ends_the_connection_in_any_way(stack, stream, how):
    body = json.dumps({"prompt": "a", "stream": stream, "request_id": "gone"}).encode()
    stack.script(lambda add: [one_output(add, 0, [97], 0)])
    others = connections(stack)
    with connect(stack) as connection:
        connection.sendall(post("/v1/completions", body))
        wait_until(lambda: stack.engine.requests)
        if stream:
            assert b"data: " in connection.recv(65536)
        if how == "half":
            connection.shutdown(socket.SHUT_WR)
        else:
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        assert stack.engine.expect(m.CancelRequest) == m.CancelRequest("gone", None, "abort")
        if how == "half":
            rest = b"".join(iter(lambda: connection.recv(65536), b""))
            assert b"sending side" in rest and b"[DONE]" not in rest, rest
            assert stream or rest.startswith(b"HTTP/1.1 400 "), rest
    wait_until(lambda: connections(stack) <= others)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_pause_behind_a_generation_is_answered_though_the_generation_is_cancelled(stack, stream, waits):
    """A hold whose answer is lost would stand, and nobody would know."""
    answer(stack, m.PauseArgs, {"answered": "PauseArgs"})
    stack.script(lambda add: [one_output(add, 0, [97], 0)])
    body = json.dumps({"prompt": "a", "stream": stream, "request_id": "gone"}).encode()
    with connect(stack) as connection:
        connection.sendall(post("/v1/completions", body) + post("/v1/pause", b'{"hold_id": "h1"}'))
        if waits:
            wait_until(lambda: stack.engine.requests)
        connection.shutdown(socket.SHUT_WR)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    first, second = raw.split(b"HTTP/1.1 ")[1:]
    assert b"sending side" in first and b"[DONE]" not in first, first
    assert stream or first.startswith(b"400 "), first
    (reply,) = bodies(b"HTTP/1.1 " + second)
    assert reply["result"] == {"answered": "PauseArgs"}


def test_a_generation_is_cancelled_when_its_connection_breaks_while_another_request_waits_behind_it(stack):
    with connect(stack) as connection:
        connection.sendall(post("/v1/completions", b'{"prompt": "a", "request_id": "gone"}') + VERSION)
        wait_until(lambda: stack.engine.requests)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert stack.engine.expect(m.CancelRequest) == m.CancelRequest("gone", None, "abort")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"input_ids": [97]}),
        ("/inference/v1/generate", {"token_ids": [97], "sampling_params": {}}),
    ],
)
def test_a_stream_that_is_cut_before_its_first_token_ends_with_an_error_and_not_with_done(stack, path, body):
    raw = exchange_half_closed(stack, post(path, json.dumps({**body, "stream": True}).encode()))
    assert b"sending side" in raw and b"[DONE]" not in raw, raw


def test_an_incomplete_request_behind_a_complete_one_takes_no_answer_away(stack):
    closed_early(stack, m.PauseArgs)
    sent = post("/v1/pause", b"{}") + VERSION + post("/v1/resume", b"{}")[:-1]
    first, second = bodies(exchange_half_closed(stack, sent))
    assert first["result"] == {"answered": "PauseArgs"} and "version" in second


def test_an_export_for_a_client_that_closes_its_sending_side_is_sent_whole(stack, tmp_path):
    content = bytes(range(256)) * (1 << 16)

    def export(call: m.Call) -> m.Reply:
        wait_until(lambda: any(connection._half_closed for connection in connections(stack)))
        (tmp_path / "export").write_bytes(content)
        result = {"path": str(tmp_path / "export"), "nbytes": len(content), "version": "v", "weight_epoch": 1}
        return m.Reply(call.call_id, {**result, "fingerprint": "f", "eos_token_ids": []}, None)

    stack.engine.replies[m.ExportWeightsArgs] = export
    raw = exchange_half_closed(stack, b"GET /v1/weights/export HTTP/1.1\r\nhost: localhost\r\n\r\n")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and body == content
