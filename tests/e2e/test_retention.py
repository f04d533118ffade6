"""retain_s over real sockets: a client that lost its connection still gets its answer, computed only once."""

from __future__ import annotations

import json
import os
import signal
import socket
import uuid

import pytest

from e2e.server import PROMPT, Reply, Server, in_background, until


def body(request_id: str, **more) -> dict:
    fields = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "return_token_ids": True}
    return {**fields, "request_id": request_id, "retain_s": 30, **more}


def send(server: Server, content: dict) -> socket.socket:
    """Send a POST without reading the answer."""
    raw = json.dumps(content)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode())
    return connection


def tokens_made(server: Server) -> int:
    return int(server.metric("generation_tokens_total"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_lost_its_connection_gets_every_token_and_none_is_computed_twice(server, stream):
    name, before = uuid.uuid4().hex, tokens_made(server)
    connection = send(server, body(name, stream=stream))
    until(lambda: tokens_made(server) > before + 20, 30, "the request runs")
    connection.close()
    for _ in range(4):  # both API servers are asked
        choice = server.post("/v1/completions", body(name)).json["choices"][0]
        assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 1500
        spans = choice["weight_versions"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, 1500)
    assert tokens_made(server) - before == 1500


def test_a_live_request_taken_over_by_another_connection_ends_for_the_first(server):
    name = uuid.uuid4().hex
    before = tokens_made(server)
    first = in_background(server.post, "/v1/completions", body(name, max_tokens=3900))  # runs for seconds
    until(lambda: tokens_made(server) > before + 20, 30, "the request runs")
    second = in_background(server.post, "/v1/completions", body(name, max_tokens=3900))
    reply = first.result(60)
    assert reply.status == 409 and reply.json["error"]["code"] == "attached_elsewhere"
    server.post("/v1/abort_requests", {"req_ids": [name]})
    assert len(second.result(60).json["choices"][0]["token_ids"]) == tokens_made(server) - before


def test_another_body_under_the_same_id_and_a_retained_request_without_an_id_are_refused(server):
    name = uuid.uuid4().hex
    server.post("/v1/completions", body(name, max_tokens=5))
    reply = server.post("/v1/completions", body(name, max_tokens=6))
    assert reply.status == 409 and reply.json["error"]["code"] == "duplicate_request_id"
    nameless = body(name)
    del nameless["request_id"]
    reply = server.post("/v1/completions", nameless)
    assert reply.status == 400 and "request_id" in reply.json["error"]["message"]


def test_a_deadline_ends_a_request_with_the_tokens_it_has(server):
    reply = server.post("/v1/completions", {**body("d"), "retain_s": 0, "deadline_s": 0.3, "max_tokens": 4000})
    choice = reply.json["choices"][0]
    assert reply.status == 200 and choice["finish_reason"] == "abort" and choice["stop_reason"] == "deadline"
    assert len(choice["token_ids"]) < 4000


def answer_of_the_new_engine(server: Server, fields: dict) -> Reply:
    """Send a request until the API server that answers has found the new engine."""
    replies = []

    def is_answered() -> bool:
        replies.append(server.post("/v1/completions", fields))
        return replies[-1].status != 503

    until(is_answered, 30, "the API server finds the new engine")
    return replies[-1]


@pytest.mark.slow
def test_after_the_death_of_the_engine_a_retained_result_is_lost_and_not_computed_again(start_server):
    server = start_server("--workers", "2")
    server.post("/v1/completions", body("ended", max_tokens=5)).ok()
    running = send(server, body("running"))
    until(lambda: tokens_made(server) > 20, 30, "the request runs")
    running.close()
    os.kill(server.engine_pid, signal.SIGKILL)
    until(lambda: server.get("/ready").status != 200, 20, "the engine is gone")
    server.wait_ready()
    for _ in range(4):  # both API servers are asked
        for fields in (body("ended", max_tokens=5), body("running"), body("running", stream=True)):
            reply = answer_of_the_new_engine(server, fields)
            assert reply.status == 410 and reply.json["error"]["code"] == "result_lost", reply.body
    assert tokens_made(server) == 0
    server.post("/v1/completions", body("ended-2", max_tokens=5)).ok()
    server.post("/v1/reset", {})
    server.post("/v1/completions", body("ended", max_tokens=5)).ok()
