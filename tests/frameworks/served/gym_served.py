"""A pytest plugin: NeMo-Gym's tests of its model server send to our server what they send to a mock of vLLM's client.

A reply has the words of the test's script (see scripted.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
from scripted import post, with_script

OF_A_CHAT = ("id", "object", "choices", "model", "created")


def plain(value: Any) -> Any:
    """Return a reply as JSON has it, without fields that are not set."""
    return value if isinstance(value, dict) else value.model_dump(mode="json", exclude_none=True)


def served_mock(**settings: Any) -> AsyncMock:
    """Return a mock that answers a chat with the reply of our server, with the words of ``return_value``."""
    script = settings.get("return_value")
    mock = AsyncMock(**settings)
    if not (isinstance(script, dict) and "choices" in script) and not hasattr(script, "choices"):
        return mock

    async def answer(*args: Any, **body: Any) -> Any:
        if "messages" in body:
            wanted = {name: value for name, value in body.items() if name != "model" and value is not None}
            reply = await asyncio.to_thread(post, "/v1/chat/completions", {"max_tokens": 8, **wanted})
            words = {name: value for name, value in plain(script).items() if name in OF_A_CHAT and name != "choices"}
            with_script(reply, words)
            choice = reply["choices"][0]
            assert choice["message"]["role"] == "assistant" and choice["finish_reason"]
        return script

    mock.side_effect = answer
    return mock


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "AsyncMock"):
            module.AsyncMock = served_mock
