"""Agents with a calculator on one of our servers, by the clients of four packages, each in sessions. Run by
test_agent_clients.py in the environment of the frameworks; prints one line of JSON: the answers, by client.

usage: agents_child.py URL QUESTION...
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import agents
import anthropic
import litellm
import openai

from examples.agent_grpo.calculator import TOOLS, call

ASK: Any = {"temperature": 0.0, "max_tokens": 64}
MAX_TURNS = 6


def by_agents_sdk(url: str, question: str, stream: bool) -> str:
    """Let OpenAI's agents SDK hold the whole conversation."""

    @agents.function_tool
    def calculator(expression: str) -> str:
        return call("calculator", json.dumps({"expression": expression}))

    model = agents.OpenAIChatCompletionsModel("default", openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    agent = agents.Agent("solver", model=model, tools=[calculator], model_settings=agents.ModelSettings(**ASK))

    async def run() -> str:
        if not stream:
            return (await agents.Runner.run(agent, question, max_turns=MAX_TURNS)).final_output
        running = agents.Runner.run_streamed(agent, question, max_turns=MAX_TURNS)
        async for _ in running.stream_events():
            pass
        return running.final_output

    agents.set_tracing_disabled(True)
    return asyncio.run(run())


def by_openai(url: str, question: str, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(messages: list[Any]) -> Any:
        if not stream:
            reply = client.chat.completions.create(model="default", messages=messages, tools=TOOLS, **ASK)
            return reply.choices[0].message
        with client.chat.completions.stream(model="default", messages=messages, tools=TOOLS, **ASK) as events:
            return events.get_final_completion().choices[0].message

    return loop(ask, question)


def by_litellm(url: str, question: str, stream: bool) -> str:
    def ask(messages: list[Any]) -> Any:
        fields = {"model": "openai/default", "api_base": f"{url}/v1", "api_key": "none", "tools": TOOLS, **ASK}
        reply: Any = litellm.completion(messages=messages, stream=stream, **fields)
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        return reply.choices[0].message

    return loop(ask, question)


def loop(ask: Callable[[list[Any]], Any], question: str) -> str:
    """Hold the conversation in OpenAI's messages."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = ask(messages)
        if not message.tool_calls:
            return message.content
        calls = [one.model_dump(include={"id", "type", "function"}) for one in message.tool_calls]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for one in message.tool_calls:
            result = call(one.function.name, one.function.arguments)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    return ""


def by_anthropic(url: str, question: str, stream: bool) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    function = TOOLS[0]["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        fields: Any = {"model": "default", "messages": messages, "tools": tools, "max_tokens": ASK["max_tokens"]}
        fields |= {"extra_body": {"temperature": ASK["temperature"]}}
        if stream:
            with client.messages.stream(**fields) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**fields)
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [(one.id, call(one.name, json.dumps(one.input))) for one in calls]
        replies = [{"type": "tool_result", "tool_use_id": name, "content": result} for name, result in results]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": replies}]
    return ""


CLIENTS = {"openai": by_openai, "anthropic": by_anthropic, "agents": by_agents_sdk, "litellm": by_litellm}


def main(url: str, *questions: str) -> dict[str, list[str]]:
    """Each conversation is in the session CLIENT-STREAM-NUMBER."""
    return {
        f"{name}-{int(stream)}": [
            answer(f"{url}/sessions/{name}-{int(stream)}-{i}", question, stream) for i, question in enumerate(questions)
        ]
        for name, answer in CLIENTS.items()
        for stream in (False, True)
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(*sys.argv[1:])), flush=True)
