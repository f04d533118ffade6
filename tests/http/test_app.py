"""Limits and rewriting of requests before their routes, and the answers to unexpected exceptions."""

from __future__ import annotations

import http.client
import json

import pytest

from fastdeploy.core.errors import NonFiniteLogits
from fastdeploy.http.errors import error_response
from support.fake_engine_server import reply_with
from support.http_calls import exchange


def test_a_body_beyond_the_limit_is_a_413(make_stack):
    stack = make_stack(max_body_mb=1)
    stack.script(reply_with([97]))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 1048577\r\n\r\n"
    status, body = exchange(stack, head)
    assert b" 413 " in status and body["error"]["code"] == "request_too_large", "without waiting for the body"
    content = b'{"prompt": [97]' + b" " * (1 << 20)
    for reply in (
        stack.http.post("/v1/completions", content=content + b"}"),
        stack.http.post("/v1/completions", content=(content[i : i + 65536] for i in range(0, len(content), 65536))),
    ):
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "request_too_large"
    assert stack.http.post("/v1/completions", content=content[: (1 << 20) - 1] + b"}").status_code == 200


def test_an_unexpected_exception_is_a_json_500_and_the_connection_stays_open(stack, monkeypatch):
    async def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(stack.server.client, "call", fail)
    connection = http.client.HTTPConnection("127.0.0.1", stack.http.base_url.port, timeout=30)
    connection.connect()
    connection.auto_open = 0
    for _ in range(2):
        connection.request("POST", "/v1/pause", body=b"{}")
        reply = connection.getresponse()
        assert reply.status == 500 and json.loads(reply.read())["error"]["code"] == "internal_error"
    connection.close()


def test_bytes_that_are_not_http_get_a_json_400(module_stack):
    head, body = exchange(module_stack, b"GARBAGE\r\n\r\n")
    assert b" 400 " in head and b"application/json" in head
    assert body["error"]["code"] == "invalid_field"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/is_paused/"])
def test_head_is_answered_like_get_without_a_body(module_stack, path):
    reply = module_stack.http.head(path)
    assert reply.status_code == 200 and reply.content == b"" and int(reply.headers["content-length"]) > 0
    assert module_stack.http.head("/v1/pause").status_code == 405


def test_our_own_errors_are_logged_in_one_line_and_unexpected_exceptions_with_a_traceback(caplog):
    for error, is_bug in ((NonFiniteLogits("not finite"), False), (ZeroDivisionError("a bug"), True)):
        caplog.clear()
        assert error_response(error).status_code == 500
        (record,) = caplog.records
        assert str(error) in record.getMessage() and bool(record.exc_info) == is_bug
