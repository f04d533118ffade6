"""Requests that are too long for the model. Clients recognise the refusal by words, and then cut the prompt or end the
episode: litellm, verifiers and NeMo-Gym by "maximum context length", OpenAI's clients by the code."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from fastdeploy.core.errors import ContextLengthExceeded
from fastdeploy.rl.connection import reply_error
from support.fake_engine_server import reply_with

LIMIT = 128  # of the fake engine
IDS = [97] * LIMIT
TEXT = "a b " * LIMIT
LONG = [{"role": "user", "content": TEXT}]
HI = [{"role": "user", "content": "hi"}]
SGLANG = "/generate"
TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": IDS}, "prompt"),
    ("/v1/completions", {"prompt": TEXT, "stream": True}, "prompt"),
    ("/v1/completions", {"prompt": ["hi", IDS]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": LIMIT, "min_tokens": LIMIT}, "min_tokens"),
    ("/v1/completions", {"prompt": "x" * 64 * 2 * LIMIT}, "prompt"),
    ("/v1/chat/completions", {"messages": LONG}, "messages"),
    ("/v1/chat/completions", {"messages": LONG, "stream": True}, "messages"),
    ("/v1/chat/completions", {"messages": HI, "min_tokens": LIMIT}, "min_tokens"),
    ("/v1/chat/completions/render", {"messages": LONG}, "messages"),
    ("/tokenize", {"messages": LONG}, "messages"),
    ("/detokenize", {"tokens": [*IDS, 97]}, "tokens"),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 1}}, "prompt"),
    (SGLANG, {"input_ids": IDS}, "input_ids"),
    (SGLANG, {"input_ids": [[97], IDS]}, "input_ids[1]"),
    (SGLANG, {"text": TEXT, "stream": True}, "text"),
    (SGLANG, {"text": "hi", "sampling_params": {"min_new_tokens": LIMIT, "max_new_tokens": LIMIT}},
     "sampling_params.min_new_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG, ids=lambda value: value if type(value) is str else "")
def test_every_route_says_in_the_same_words_that_a_request_is_too_long(module_stack, path, body, param):
    reply = module_stack.post(path, **body)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["message"].startswith(f"This model's maximum context length is {LIMIT} tokens. However, you requested")
    assert (error["code"], error["type"], error["param"]) == ("context_length_exceeded", "invalid_request_error", param)
    again = reply_error(reply.status_code, {}, reply.content)
    assert isinstance(again, ContextLengthExceeded) and (again.field, again.message) == (param, error["message"])


def test_the_openai_package_shows_the_code(module_stack):
    client = openai.OpenAI(base_url=module_stack.server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=IDS)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_prompt_that_leaves_room_for_one_token_is_served(stack):
    stack.script(reply_with([97]))
    for path, body in (("/v1/completions", {"prompt": IDS[1:]}), (SGLANG, {"input_ids": IDS[1:]})):
        assert stack.post(path, **body).status_code == 200
