"""Pause, resume and abort over real sockets, with the embedded model and two API servers."""

from __future__ import annotations

import time

import httpx
import pytest

from e2e.server import LONG, PROMPT, LiveStream, in_background, until


@pytest.fixture(autouse=True)
def left_resumed_and_idle(server):
    yield
    for hold in server.get("/v1/is_paused").result["holds"]:
        server.post("/v1/resume", {"hold_id": hold["id"]})
    server.post("/v1/abort_requests", {"abort_all": True})
    until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0, 30, "idle")
    assert server.metric("available_gpu_block_num") == server.metric("max_gpu_block_num")


def streams(server, count, **params):
    return [LiveStream(server, [*PROMPT, i], **params) for i in range(count)]


def first_tokens(running, count):
    until(lambda: sum(bool(s.tokens) for s in running) >= count, 30, f"{count} streams run")
    return [s for s in running if s.tokens]


def test_abort_returns_running_requests_at_once_with_all_tokens_and_no_invented_eos(server):
    """Four places in the batch, 10 streams over two API servers."""
    alone = server.complete([*PROMPT, 0], max_tokens=400, ignore_eos=True)["token_ids"]
    all_streams = streams(server, 10)
    first_tokens(all_streams, 4)
    until(lambda: server.metric("num_requests_waiting") == 6, 30, "the other requests wait")
    report = server.post("/v1/pause", {"mode": "abort"}).result
    assert report["is_paused"] and report["rejecting_new_requests"] and report["admission"] == "reject"
    for s in all_streams:
        s.wait_end(20)
    assert [s.finals for s in all_streams] == [["abort"]] * 10
    assert sum(bool(s.tokens) for s in all_streams) == 4 and report["counts"]["aborted"] == 10
    assert report["tokens_returned"] == sum(len(s.tokens) for s in all_streams)
    zero = all_streams[0].tokens
    assert zero[:400] == alone[: len(zero)]
    for _ in range(6):  # both API servers answer some of them
        refused = server.post("/v1/completions", {"prompt": PROMPT})
        assert refused.status == 503 and refused.json["error"]["code"] == "rejecting_new_requests"
        assert int(refused.headers["retry-after"]) >= 1 and "content-length" in refused.headers
    assert server.get("/health").status == 200 and server.get("/ready").status == 503
    assert server.post("/v1/resume").result["status"] == "running"
    assert server.get("/ready").status == 200
    assert len(server.complete(PROMPT, max_tokens=3, ignore_eos=True)["token_ids"]) == 3


def test_an_aborted_reply_has_all_fields_even_without_a_token(server):
    busy = streams(server, 4)
    first_tokens(busy, 4)
    body = {"prompt": PROMPT, "return_token_ids": True, "logprobs": 0, "request_id": "queued-one", "max_tokens": 5}
    waiting = in_background(server.post, "/v1/completions", body)
    until(lambda: server.metric("num_requests_waiting") == 1, 30, "the request waits")
    result = server.post("/v1/abort_requests", {"req_ids": ["queued-one", "nobody"]}).result
    assert result == {"aborted": [{"request_id": "queued-one", "output_token_count": 0}], "not_found": ["nobody"]}
    choice = waiting.result(30).ok()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == [] and choice["text"] == "" and choice["weight_versions"] == []
    assert choice["logprobs"]["token_logprobs"] == [] and choice["logprobs"]["tokens"] == []


def test_keep_only_delays_the_tokens_of_a_stream(server, alone):
    """No token arrives during the pause. All tokens equal those of an undisturbed run."""
    before = server.metric("generation_tokens_total")
    stream = LiveStream(server, PROMPT, max_tokens=LONG).wait_for_tokens(5)
    assert server.post("/v1/pause", {"mode": "keep"}).result["counts"]["kept"] == 1
    made = server.metric("generation_tokens_total") - before
    until(lambda: len(stream.tokens) == made, 30, "the reader has all tokens")
    time.sleep(0.3)
    assert len(stream.tokens) == made and not stream.ended.is_set()
    server.post("/v1/resume")
    tokens = stream.wait_for_tokens(made + 500).abort().tokens
    assert tokens[:2500] == alone[: len(tokens)]


def test_state_queries_and_aborts_are_answered_during_a_drain(server):
    """A resume during the drain gives the pause's caller 409 with a report."""
    running = streams(server, 2)
    first_tokens(running, 2)
    call = in_background(server.post, "/v1/pause", {"mode": "wait", "admission": "reject"})

    def rejecting():
        status = server.get("/v1/is_paused").result
        return status["rejecting_new_requests"] and status

    status = until(rejecting, 30, "requests are rejected")
    assert not status["is_paused"] and status["phase"] == "draining" and status["counts"]["running"] == 2
    assert server.post("/v1/completions", {"prompt": PROMPT}).status == 503
    assert server.post("/v1/resume").result["status"] == "running"
    answer = call.result(30)
    assert answer.status == 409 and answer.json["error"]["code"] == "pause_interrupted"
    assert answer.json["error"]["report"]["status"] == "interrupted"
    assert not any(s.ended.is_set() for s in running)


def test_requests_that_are_tokenised_while_a_pause_begins_are_held(server):
    """Long texts arrive while a pause begins. A request that the pause did not end may not run before the resume."""
    body = {"prompt": "12+34=" * 150, "max_tokens": 2500, "ignore_eos": True}
    calls = [in_background(server.post, "/v1/completions", body) for _ in range(12)]
    server.post("/v1/pause", {"mode": "abort", "admission": "hold"})
    calls += [in_background(server.post, "/v1/completions", body) for _ in range(4)]

    def num_answered():
        return sum(call.done() for call in calls)

    def all_arrived():
        return server.get("/v1/is_paused").result["counts"]["queued"] + num_answered() == 16

    until(all_arrived, 20, "every request is held or answered")
    before = server.metric("generation_tokens_total")
    time.sleep(0.3)
    assert server.metric("generation_tokens_total") == before and server.metric("num_requests_running") == 0
    assert num_answered() <= 12
    server.post("/v1/resume")
    until(lambda: server.metric("num_requests_running") > 0, 20, "the held requests run")
    until(lambda: server.post("/v1/abort_requests", {"abort_all": True}).result and num_answered() == 16, 20, "the end")
    assert {call.result().json["choices"][0]["finish_reason"] for call in calls} == {"abort"}


def test_the_engine_stays_paused_until_the_last_of_two_controllers_resumes(server):
    """Every caller gets an answer, and no caller releases the hold of another."""
    assert server.post("/v1/pause", {"mode": "keep", "hold_id": "trainer"}).status == 200
    assert server.post("/v1/pause", {"mode": "keep"}).status == 200
    assert server.post("/v1/resume").result["still_held_by"] == ["trainer"]
    assert server.get("/v1/is_paused").result["is_paused"]
    assert server.post("/v1/resume", {"hold_id": "nobody"}).result["unknown"] == ["nobody"]
    assert server.post("/v1/resume", {"hold_id": "trainer"}).result["status"] == "running"


def test_an_unpaired_pause_with_a_ttl_ends_by_itself(server):
    server.post("/v1/pause", {"mode": "keep", "ttl_s": 0.5})
    until(lambda: not server.get("/v1/is_paused").result["is_paused"], 30, "the hold expires")


def test_held_requests_run_after_the_resume_and_are_cancelled_when_their_client_disconnects(server):
    server.post("/v1/pause", {"mode": "keep"})
    stays = LiveStream(server, PROMPT, max_tokens=4)
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.TimeoutException):
        client.post(server.url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
    until(lambda: server.metric("num_requests_waiting") == 1, 30, "the request of the client that left is cancelled")
    server.post("/v1/resume")
    assert stays.wait_end(20).finals == ["length"]


def test_a_frozen_stream_gets_comments_that_prevent_time_outs(strict_server):
    server = strict_server
    with httpx.Client(timeout=30) as client:
        body = {"prompt": PROMPT, "stream": True, "ignore_eos": True, "max_tokens": 3000}
        with client.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.post("/v1/pause", {"mode": "keep"})
            assert any(line.startswith(":") for line in lines)
    server.post("/v1/resume")


def test_control_replies_are_json_envelopes_and_bad_fields_are_named(server):
    reply = server.post("/v1/pause?mode=keep&clear_cache=false")
    assert reply.status == 200 and reply.json["status"] == "success" and reply.json["error_message"] is None
    assert "content-length" in reply.headers and reply.headers["content-type"].startswith("application/json")
    assert server.post("/v1/resume/").status == 200
    for body, field in (
        ({"mode": "sometimes"}, "mode"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"lora_name": ""}, "lora_name"),
        ({"on_timeout": "explode"}, "on_timeout"),
        ({"no_such_field": 1}, "no_such_field"),
    ):
        bad = server.post("/v1/pause", body)
        assert bad.status == 400 and field in bad.json["error"]["message"], bad.body
    assert server.post("/v1/abort_requests").status == 400
    assert not server.get("/v1/is_paused").result["rejecting_new_requests"]
