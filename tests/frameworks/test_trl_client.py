"""TRL's synchronous VLLMClient on a real server: see trl_child.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.fleet_server import server_of
from e2e.server import SMALL, Server
from frameworks.conftest import run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trusting(kind: str) -> Iterator[Server]:
    with server_of(kind, *SMALL, "--trust-request-chat-template") as server:
        yield server


@pytest.fixture(scope="module")
def results(trusting) -> dict[str, Any]:
    return run_child("trl_child.py", trusting.url)


@pytest.mark.parametrize("way", ["plain", "tools", "template", "null"])
def test_every_completion_of_a_chat_has_a_logprob_for_each_token(results, way):
    rows = results["chats"][way]
    assert len(rows) == 4 and all(0 < tokens == logprobs <= 6 for tokens, logprobs in rows)


def test_tools_are_rendered_by_the_template_that_is_in_force(results):
    """The embedded model's own template has no tools."""
    prompts = results["prompts"]
    assert prompts["tools"] == prompts["plain"] == prompts["null"]
    assert not any("[add]" in prompt for prompt in prompts["plain"])
    assert all(prompt.startswith("[add]") for prompt in prompts["template"])


def test_completions_of_token_ids(results):
    assert results["completed"] == [[5, 5]] * 4 and results["echoed"]
    assert results["world"] == 1
