"""/v1/chat/completions/tokens: a chat whose prompt the client has tokenised, as verifiers' token client sends it."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletion

from fastdeploy.core.request_fields import AddRequest
from support.fake_engine_server import reply_with
from support.http_calls import events

ROUTE = "/v1/chat/completions/tokens"
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
# The body that the token client of verifiers makes of its sampling arguments.
BODY = {"model": "tiny", "messages": MESSAGES, "tools": None, "tokens": [5, 6, 7], "logprobs": True,
        "max_completion_tokens": 3, "temperature": 1.0, "return_token_ids": True,
        "chat_template_kwargs": {}}  # fmt: skip


def test_the_tokens_are_the_prompt_and_the_reply_is_that_of_a_chat(stack):
    stack.script(reply_with(list(b"hey")))
    client = openai.OpenAI(base_url=stack.server.url + "/v1", api_key="none", max_retries=0)
    reply = client.post("/chat/completions/tokens", body=BODY, cast_to=ChatCompletion)
    add = stack.engine.expect(AddRequest)
    assert (add.prompt_token_ids, add.sampling.max_tokens, add.sampling.logprobs) == ([5, 6, 7], 3, 0)
    assert reply.object == "chat.completion" and reply.choices[0].message.content == "hey"
    assert reply.prompt_token_ids == [5, 6, 7] and reply.choices[0].token_ids == list(b"hey")
    assert len(reply.choices[0].logprobs.content) == 3 and reply.usage.prompt_tokens == 3


def test_it_streams_as_a_chat_does(stack):
    stack.script(reply_with(list(b"hey")))
    *payloads, _ = events(stack.post(ROUTE, **BODY, stream=True))
    assert "".join(payload["choices"][0]["delta"]["content"] for payload in payloads) == "hey"


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", None), ("tokens", []), ("tokens", "abc"), ("tokens", ["a"]), ("tokens", [[1]]), ("tokens", [272]),
     ("tokens", [1] * 128), ("messages", None), ("messages", []), ("tools", [{"type": "function"}])],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_name(module_stack, field, value):
    reply = module_stack.post(ROUTE, **BODY | {field: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_the_route_of_messages_takes_no_tokens(module_stack):
    reply = module_stack.post("/v1/chat/completions", **BODY)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
