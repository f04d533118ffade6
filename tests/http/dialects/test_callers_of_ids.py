"""Callers that send token ids by routes of vLLM and SkyRL, or read them from chats: the fields that each sends."""

from __future__ import annotations

from fastdeploy.core.request_fields import AddRequest
from support.fake_engine_server import reply_with

CHAT = [{"role": "user", "content": "hi"}]


def test_prime_rl_and_verifiers_send_ids_with_stop_ids_a_salt_a_priority_and_a_session(stack):
    """The body that renderers 0.1.12 makes of a turn, and the header that verifiers adds."""
    stack.script(reply_with([*b"ok", 261]))
    sampling = {"max_tokens": 5, "temperature": 1.0, "stop_token_ids": [261, 262], "logprobs": 1,
                "skip_special_tokens": False}  # fmt: skip
    body = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": sampling, "cache_salt": "7", "priority": -3}
    reply = stack.http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "rollout-1"}).json()
    add = stack.engine.expect(AddRequest)
    assert (add.prompt_token_ids, add.cache_salt, add.priority, add.session) == ([5, 6, 7], "7", -3, "rollout-1")
    assert set(add.sampling.stop_token_ids) == {261, 262} and add.sampling.logprobs == 1
    choice = reply["choices"][0]
    assert choice["token_ids"] == [*b"ok", 261] and reply["request_id"] and reply["usage"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * 3
    assert stack.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128


def test_skyrl_with_harbor_sends_its_session_and_its_salt_in_the_body_of_a_chat(stack):
    """Harbor's agent asks through litellm, and puts both into extra_body. At the end SkyRL finishes the session."""
    stack.script(reply_with(list(b"ok")))
    body = {"model": "tiny", "messages": CHAT, "session_id": "5f3a", "cache_salt": "base@3", "logprobs": True,
            "return_token_ids": True}  # fmt: skip
    reply = stack.post("/v1/chat/completions", **body).json()
    add = stack.engine.expect(AddRequest)
    assert (add.session, add.cache_salt) == ("5f3a", "base@3")
    assert reply["prompt_token_ids"] == add.prompt_token_ids and reply["choices"][0]["token_ids"] == list(b"ok")
    assert len(reply["choices"][0]["logprobs"]["content"]) == 2
    assert stack.http.post("/finish_session", params={"session_id": "5f3a"}).status_code == 200
