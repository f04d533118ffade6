"""Each dialect's reply becomes the same answers, and an engine that gives no log probabilities is refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from fastdeploy.rl.check_sync.answers import Engine, Question, Unusable

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
def played() -> Iterator[Callable[[Callable[[str, dict[str, Any]], Reply]], Engine]]:
    """Return a function that plays an engine and connects to it."""
    servers, engines = [], []

    def play(engine: Callable[[str, dict[str, Any]], Reply]) -> Engine:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = engine(self.path, body)
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        engines.append(Engine(f"http://127.0.0.1:{server.server_port}", {}, "default"))
        return engines[-1]

    yield play
    for engine in engines:
        engine.close()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("engine", [vllm, sglang, openai], ids=lambda engine: engine.__name__)
def test_every_dialect_gives_the_same_answers(engine, played):
    asked = played(engine)
    [with_prompt] = asked.ask([PROMPT], Question(2, with_prompt=True))
    [alone] = asked.ask([PROMPT], Question(2, temperature=1.0, salt="s"))
    for answer in (with_prompt, alone):
        assert (answer.prompt, answer.token_ids, answer.cached) == (tuple(PROMPT), tuple(TOKENS), 2)
        np.testing.assert_array_equal(answer.logprobs, OF_TOKENS)
    np.testing.assert_array_equal(with_prompt.prompt_logprobs, OF_PROMPT)
    assert alone.prompt_logprobs is None


def test_an_engine_that_gives_no_log_probabilities_is_refused_with_what_each_route_said(played):
    with pytest.raises(Unusable, match="/v1/completions: status 501.*/generate: status 501"):
        played(lambda path, body: (501, {})).ask([PROMPT], Question(2))


def test_an_engine_that_cannot_be_reached_is_an_error_of_the_system():
    with Engine("http://127.0.0.1:9", {}, "default") as engine, pytest.raises(OSError, match="ConnectError"):
        engine.ask([PROMPT], Question(2))
