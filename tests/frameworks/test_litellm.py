"""litellm on a real server: see litellm_child.py."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.server import Server
from frameworks.conftest import model_of, run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both(live: Server) -> dict[str, Any]:
    return run_child("litellm_child.py", live.url, model_of(live))


@pytest.fixture(params=["hosted_vllm", "openai"])
def results(request: pytest.FixtureRequest, both) -> dict[str, Any]:
    return both[request.param]


def test_a_whole_reply_and_a_stream_have_the_text_of_the_server(results, live):
    body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0, "max_tokens": 60}
    choice = live.post("/v1/chat/completions", body).ok()["choices"][0]
    assert results["text"] == results["streamed"] == choice["message"]["content"]
    assert results["finish"] == choice["finish_reason"] == "stop"
    assert results["streamed_tokens"] == [results["tokens"]]


def test_each_token_of_a_chat_has_its_logprob(results):
    assert len(results["logprobs"]) == results["tokens"] and all(logprob <= 0 for logprob in results["logprobs"])


def test_a_request_that_is_too_long_raises_litellms_error_for_that(results):
    """Agents shorten their conversation when they get this class. litellm finds it by words in the message."""
    assert all("ContextWindowExceededError" in kinds for kinds in results["too_long"]), results["too_long"]


def test_other_bad_requests_have_other_classes(results):
    assert results["wrong"][0] == "BadRequestError" and results["unknown"][0] == "NotFoundError"
