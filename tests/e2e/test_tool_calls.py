"""A real model that must call tools, with the unmodified ``openai`` package."""

from __future__ import annotations

import json

import openai
import pytest

from e2e.server import SMALL, Server

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "sign": {"enum": ["+", "-"]}},
                "required": ["a", "sign"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "multiply")
]
NAMED = {"type": "function", "function": {"name": "multiply"}}


@pytest.fixture(scope="module", params=[pytest.param("hermes", marks=pytest.mark.slow), "qwen3_coder"])
def client(request):
    with Server(*SMALL, "--tool-call-parser", request.param) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_an_answer_that_must_call_tools_does(client, choice):
    """At a temperature where the model writes nothing like a call by itself. The stream has the same calls."""
    ask = {
        "model": "default", "messages": [{"role": "user", "content": "12+34="}], "tools": TOOLS, "max_tokens": 300,
        "tool_choice": choice, "parallel_tool_calls": False, "temperature": 2.0, "seed": 1, "n": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask)
    for made in whole.choices:
        (call,) = made.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert sorted(arguments) == ["a", "sign"] and 0 <= arguments["a"] <= 99 and arguments["sign"] in "+-"
        assert call.function.name in (("add", "multiply") if choice == "required" else ("multiply",))
        assert made.finish_reason == "tool_calls" and made.message.content == ""
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion()
    assert [c.message.tool_calls[0].function.arguments for c in streamed.choices] == [
        c.message.tool_calls[0].function.arguments for c in whole.choices
    ]
