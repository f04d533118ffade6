"""Each dialect's reply becomes the same answers, and an engine that gives no log probabilities is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from fastdeploy.rl.check_sync.answers import Completions, Question, Unusable
from fastdeploy.rl.check_sync.serving import Calls
from fastdeploy.rl.connection import Connection
from fastdeploy.rl.errors import Unreachable
from rl.check_sync.played import Played

PROMPT, TOKENS = [5, 6, 7], [8, 9]
OF_PROMPT, OF_TOKENS = [-1.5, -2.5], [-0.5, -0.25]
Reply = tuple[int, Any]


def vllm(path: str, body: dict[str, Any]) -> Reply:
    if path != "/v1/completions" or "echo" in body:
        return 404, {}
    prompt = [
        None,
        *({str(t): {"logprob": v}, "1": {"logprob": -9.0}} for t, v in zip(PROMPT[1:], OF_PROMPT, strict=True)),
    ]
    logprobs = {"tokens": [f"token_id:{token}" for token in TOKENS], "token_logprobs": OF_TOKENS}
    choice = {"index": 0, "token_ids": TOKENS, "logprobs": logprobs}
    if "prompt_logprobs" in body:
        choice["prompt_logprobs"] = prompt
    return 200, {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


def sglang(path: str, body: dict[str, Any]) -> Reply:
    if path == "/v1/completions":  # with the texts of tokens, and without the prompt
        logprobs = {"tokens": [" a", " b"], "token_logprobs": OF_TOKENS}
        return 200, {"choices": [{"index": 0, "logprobs": logprobs}]}
    if path != "/generate" or not body["return_logprob"]:
        return 404, {}
    info = {"output_token_logprobs": [[v, t, None] for v, t in zip(OF_TOKENS, TOKENS, strict=True)], "cached_tokens": 2}
    if body["logprob_start_len"] == 0:
        info["input_token_logprobs"] = [[v, t, None] for v, t in zip([None, *OF_PROMPT], PROMPT, strict=True)]
    return 200, [{"meta_info": info}]


def openai(path: str, body: dict[str, Any]) -> Reply:
    if path != "/v1/completions" or "return_token_ids" in body:
        return 400, {"error": "unknown field return_token_ids"}
    shown, values = (PROMPT, [None, *OF_PROMPT]) if body["echo"] else ([], [])
    names = [f"token:{token}" for token in [*shown, *TOKENS]]
    logprobs = {"tokens": names, "token_logprobs": [*values, *OF_TOKENS]}
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    return 200, {"choices": [{"index": 0, "logprobs": logprobs}], "usage": details}


@pytest.fixture
def played() -> Iterator[Played]:
    with Played() as one:
        yield one


def completions(played: Played, engine: Callable[[str, dict[str, Any]], Reply]) -> Completions:
    played.routes = {("POST", path): partial(engine, path) for path in ("/v1/completions", "/generate")}
    return Completions(Calls(Connection(played.url)), "default")


@pytest.mark.parametrize("engine", [vllm, sglang, openai], ids=lambda engine: engine.__name__)
def test_every_dialect_gives_the_same_answers(engine, played):
    asked = completions(played, engine)
    [with_prompt] = asked.ask([PROMPT], Question(2, with_prompt=True))
    [alone] = asked.ask([PROMPT], Question(2, temperature=1.0, salt="s"))
    for answer in (with_prompt, alone):
        assert (answer.prompt, answer.token_ids, answer.cached) == (tuple(PROMPT), tuple(TOKENS), 2)
        np.testing.assert_array_equal(answer.logprobs, OF_TOKENS)
    np.testing.assert_array_equal(with_prompt.prompt_logprobs, OF_PROMPT)
    assert alone.prompt_logprobs is None


def test_an_engine_that_gives_no_log_probabilities_is_refused_with_what_each_route_said(played):
    with pytest.raises(Unusable, match="/v1/completions: status 501.*/generate: status 501"):
        completions(played, lambda path, body: (501, {})).ask([PROMPT], Question(2))


def test_an_engine_that_cannot_be_reached_is_told_as_such():
    with pytest.raises(Unreachable, match="ConnectError"):
        Completions(Calls(Connection("http://127.0.0.1:9")), "default").ask([PROMPT], Question(2))
