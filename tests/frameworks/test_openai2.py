"""Version 2 of the ``openai`` package on a real server: see openai2_child.py. The suite's own environment has a newer
one (tests/e2e/test_openai_client.py); litellm, verifiers and others still ask for version 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from e2e.server import SMALL, Server, in_background, until
from frameworks.conftest import model_of, run_child

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def full_and_keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server that wants the key "right", and whose only place to wait is taken."""
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text("right")
    with Server(*SMALL, "--max-waiting", "1", "--api-key", str(key)) as server:
        server.http.headers["Authorization"] = "Bearer right"
        server.post("/v1/pause", {"mode": "keep"}).ok()
        held = in_background(server.complete, "1+2=", max_tokens=1)
        until(lambda: server.get("/v1/is_paused").result["counts"]["queued"] == 1, 60, "the place is taken")
        yield server
        server.post("/v1/resume").ok()
        held.result(60)


@pytest.fixture(scope="module")
def results(live: Server, full_and_keyed: Server) -> dict[str, Any]:
    return run_child("openai2_child.py", live.url, model_of(live), full_and_keyed.url)


@pytest.fixture(scope="module")
def answers(live: Server) -> dict[str, str]:
    """Return the server's greedy completions of the two prompts of the child."""
    return {prompt: live.complete(prompt, max_tokens=40)["text"] for prompt in ("12+34=", "7+5=")}


def test_this_is_version_2(results):
    assert results["version"].startswith("2.")


def test_models_are_listed_and_retrieved(results, live):
    model = model_of(live)
    assert results["models"]["listed"][0] == results["models"]["retrieved"] == model and results["models"]["same"]


def test_completions_whole_streamed_and_many(results, answers):
    seen, text = results["completions"], answers["12+34="]
    assert seen["text"] == seen["streamed"] == text
    assert seen["tokens"] == seen["streamed_tokens"] == len(seen["logprobs"])
    assert seen["pieces"].removesuffix("<|end|>") == text and seen["finish"] == "stop"
    assert seen["several"] == {"0": text, "1": text, "2": answers["7+5="], "3": answers["7+5="]}
    first, again = seen["sampled"]
    assert first == again and len(set(first)) > 1, "one seed gives the same choices, which differ from each other"


def test_chats_whole_and_streamed_by_the_events_of_the_package(results):
    seen = results["chat"]
    [text] = {*seen["texts"], seen["final"], seen["raw"], *results["async_chat"]}
    assert text and seen["finish"] == ["stop", "stop"]
    assert seen["logprobs"] == seen["final_logprobs"] and len(seen["logprobs"]) == seen["final_tokens"]
    assert all(3 <= tops <= 4 for tops in seen["tops"]), "the chosen token, if it is not among the likeliest, and these"
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(seen["kinds"])


@pytest.mark.parametrize(
    ("case", "error", "status"),
    [
        ("field", "BadRequestError", 400),
        ("too_long", "BadRequestError", 400),
        ("model", "NotFoundError", 404),
        ("retrieve", "NotFoundError", 404),
        ("twice", "ConflictError", 409),
        ("key", "AuthenticationError", 401),
        ("full", "RateLimitError", 429),
    ],
)
def test_each_error_has_its_class(results, case, error, status):
    assert (results["errors"][case]["kind"], results["errors"][case]["status"]) == (error, status)


def test_errors_name_the_field_and_have_a_code(results):
    errors = results["errors"]
    assert errors["field"]["param"] == "temperature" and errors["too_long"]["param"] == "prompt"
    assert errors["too_long"]["code"] == "context_length_exceeded" and errors["model"]["code"] == "model_not_found"
