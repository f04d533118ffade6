"""A server without --faults tells a client that asks for one, in place of a test that proves nothing."""

from __future__ import annotations


def test_a_header_is_refused_with_the_name_of_the_flag(stack):
    reply = stack.http.post("/v1/completions", json={"prompt": "hi"}, headers={"X-Fault": "stream_cut"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "X-Fault" and "--faults" in reply.json()["error"]["message"]


def test_the_route_is_not_there_and_the_answer_names_the_flag(stack):
    for method in ("GET", "POST", "DELETE"):
        reply = stack.http.request(method, "/v1/faults")
        assert reply.status_code == 404 and "--faults" in reply.json()["error"]["message"]


def test_no_metric_of_faults_is_shown(stack):
    assert "faults_injected" not in stack.http.get("/metrics").text
