"""Seeded requests: random token ids as prompts, greedy, no end of sequence; and how a closed loop sends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

MAX_PROMPT_ID = 254  # byte-level ids; every checkpoint used here has them


Result = TypeVar("Result")


def prompt_ids(seed: int | str, index: int, length: int) -> list[int]:
    """Prompt number ``index`` of workload ``seed``; prompts of one workload share no prefix but by chance."""
    rng = random.Random(f"{seed}/{index}")
    return [rng.randrange(MAX_PROMPT_ID + 1) for _ in range(length)]


def completion(model: str, prompt: list[int], max_tokens: int, request_id: str = "") -> dict[str, Any]:
    """Body of a streamed POST /v1/completions which runs to max_tokens and tells the ids it made."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if request_id:
        body["request_id"] = request_id
    return body


async def closed_loop(
    send: Callable[[int], Awaitable[Result]], count: int, clients: int, first: int = 0
) -> list[Result]:
    """Call ``send(first)`` to ``send(first + count - 1)``, by ``clients`` that each start their next one when their
    last one ended. Results by client, then in the order of starting."""
    indices = iter(range(first, first + count))

    async def client() -> list[Result]:
        return [await send(index) for index in indices]

    return [result for results in await asyncio.gather(*(client() for _ in range(clients))) for result in results]
