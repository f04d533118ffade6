"""langchain-openai on a real server: see langchain_child.py."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.server import Server
from frameworks.conftest import model_of, run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(live: Server) -> dict[str, Any]:
    return run_child("langchain_child.py", live.url, model_of(live))


def test_invoke_stream_and_batch_give_the_text_of_the_server(results, live):
    def answer(question):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
        return live.post("/v1/chat/completions", body).ok()["choices"][0]["message"]["content"]

    assert results["text"] == results["streamed"] == answer("12+34=") and results["finish"] == "stop"
    assert results["batch"] == [answer("12+34="), answer("12+34="), answer("7+5=")]


def test_each_token_is_counted_and_has_its_logprob(results):
    assert len(results["logprobs"]) == results["usage"] == results["streamed_usage"] > 0
    assert all(logprob <= 0 for logprob in results["logprobs"])


def test_completions_of_text(results, live):
    text = live.complete("12+34=", max_tokens=60)["text"]
    assert results["completion"] == results["completion_streamed"] == text


def test_a_request_that_is_too_long_raises_langchains_error_for_that(results):
    assert "ContextOverflowError" in results["too_long"], results["too_long"]
    assert "BadRequestError" in results["wrong"] and "ContextOverflowError" not in results["wrong"]
