"""How requests of all dialects name their session."""

from __future__ import annotations

import pytest

from fastdeploy.core.request_fields import AddRequest
from support.fake_engine_server import reply_with

BODIES = {
    "/v1/completions": {"prompt": [104, 105]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/inference/v1/generate": {"token_ids": [104, 105], "sampling_params": {}},
    "/generate": {"input_ids": [104, 105]},
}


@pytest.fixture
def stack(make_stack):
    stack = make_stack()
    stack.script(reply_with([104]))
    return stack


def asked(stack, path, headers=None, **fields) -> AddRequest:
    """Return the engine's request for a request with these headers and fields."""
    reply = stack.http.post(path, json=BODIES[path] | fields, headers=headers)
    assert reply.status_code == 200, reply.text
    return stack.engine.expect(AddRequest)


def test_every_dialect_passes_the_session_on(stack):
    for path in BODIES:
        assert asked(stack, path).session == ""
        assert asked(stack, path, {"X-Session-ID": "0"}).session == "0"
        assert asked(stack, path, {"X-SMG-Routing-Key": "key"}).session == "key"
        assert asked(stack, path, session_id=0).session == "0"
        assert asked(stack, path, {"X-Session-ID": "header"}, session_id="body").session == "body"
        assert asked(stack, path, {"X-Session-ID": "header"}, session_id=None).session == "header"
        assert asked(stack, path, session="s", stale_ok=True).stale_ok
        assert asked(stack, path, routing_key="r").session == "r"
        assert asked(stack, path, user="somebody").session == ""


def test_a_session_of_another_type_is_refused_by_name(stack):
    for path, body in BODIES.items():
        for value in (True, 1.5, ["a"], {"id": "a"}, "x" * 257):
            reply = stack.http.post(path, json=body | {"session_id": value})
            assert reply.status_code == 400 and "session_id" in reply.text


def test_a_header_that_is_too_long_is_refused_by_name(stack):
    reply = stack.http.post("/v1/completions", json=BODIES["/v1/completions"], headers={"X-Session-ID": "x" * 257})
    assert reply.status_code == 400 and "x-session-id" in reply.text
