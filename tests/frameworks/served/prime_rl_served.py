"""A pytest plugin: prime-rl's test of prompt log probabilities gets the reply of our server, with the numbers of its
script (see scripted.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from scripted import post, with_script


async def served_post(self: Any, url: str, *, cast_to: Any, body: dict[str, Any]) -> httpx.Response:
    """``_FakeOpenAIClient.post``, which asks our server."""
    self.calls.append({"url": url, "cast_to": cast_to, "body": body})
    body = {name: value for name, value in body.items() if name != "model"}  # of no server
    reply = post(urlsplit(url).path, body)
    told = reply["prompt_logprobs"]
    assert len(told) == len(body["token_ids"]) and told[0] is None
    assert all(str(token) in entry for token, entry in zip(body["token_ids"][1:], told[1:], strict=True))
    script = {name: value for name, value in self._payload.items() if name != "prompt_logprobs"}
    merged = with_script(reply, {**script, "choices": reply["choices"]})
    numbers = [
        entry and {token: {"logprob": value["logprob"]} for token, value in entry.items()}
        for entry in self._payload["prompt_logprobs"]
    ]
    return httpx.Response(200, content=json.dumps({**merged, "prompt_logprobs": numbers}).encode())


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "_FakeOpenAIClient") and hasattr(module, "prefill_logprobs"):
            module._FakeOpenAIClient.post = served_post
