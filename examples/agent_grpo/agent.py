"""The agent: a loop over the chat route by the ``openai`` package. It knows of no trainer."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from examples.agent_grpo.calculator import TOOLS, call

MAX_TURNS = 6
MAX_TOKENS = 64  # of a turn


async def solve(client: AsyncOpenAI, question: str, *, temperature: float, seed: int) -> str:
    """Return the agent's answer; "" if it has none after MAX_TURNS."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="default", messages=messages, tools=TOOLS, temperature=temperature, seed=seed, max_tokens=MAX_TOKENS
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for one in message.tool_calls:
            assert one.type == "function"
            result = call(one.function.name, one.function.arguments)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    return ""
