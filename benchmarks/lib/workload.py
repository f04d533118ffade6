"""Seeded requests: random token ids as prompts, greedy, no end of sequence."""

from __future__ import annotations

import random
from typing import Any

MAX_PROMPT_ID = 254  # byte-level ids; every checkpoint used here has them


def prompt_ids(seed: int, index: int, length: int) -> list[int]:
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
