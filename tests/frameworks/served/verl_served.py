"""A pytest plugin: verl's tests of agent loops sample from our server where they have a fake manager of servers.

The client is verl's own kind of object: ``generate`` takes token ids and returns verl's TokenOutput. The tests of the
response budget keep verl's fake, which plays a server's arithmetic for 8192 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

URL = os.environ["FASTDEPLOY_URL"]
MAX_TOKENS = 8  # the tests have room for 16


class ServerManager:
    """verl's interface of a manager of rollout servers."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        body = {
            "request_id": request_id,
            "token_ids": prompt_ids,
            "sampling_params": {"logprobs": 0, "max_tokens": MAX_TOKENS, **sampling_params},
        }
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(f"{URL}/inference/v1/generate", json=body)
        choice = reply.raise_for_status().json()["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return TokenOutput(token_ids=choice["token_ids"], log_probs=logprobs, stop_reason="completed")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "_FakeServerManager"):
            module._FakeServerManager = ServerManager
