"""Structured output through HTTP: the ``openai`` package, pauses that end requests, and speculation."""

from __future__ import annotations

import json
import re

import openai
import pydantic
import pytest

from e2e.server import PROMPT, LiveStream

REGEX = "[a-z]{40}-[0-9]{40}(!|\\?){40}"


class Step(pydantic.BaseModel):
    value: int = pydantic.Field(ge=0, le=99)
    correct: bool


class Answer(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(min_length=1, max_length=3)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_the_openai_package_parses_into_a_class(client, live):
    [model] = client.models.list().data
    for seed in range(3):
        reply = client.chat.completions.parse(
            model=model.id,
            messages=[{"role": "user", "content": "1+2"}],
            response_format=Answer,
            seed=seed,
            temperature=2.0,
            max_tokens=900,
        )
        assert isinstance(reply.choices[0].message.parsed, Answer)


def test_a_stream_has_the_text_of_the_whole_reply(client, live):
    ask = {"model": "default", "prompt": "a", "max_tokens": 200, "seed": 5, "extra_body": {"guided_regex": REGEX}}
    whole = client.completions.create(**ask).choices[0].text
    assert re.fullmatch(REGEX, whole)
    assert "".join(event.choices[0].text for event in client.completions.create(**ask, stream=True)) == whole


def test_a_request_that_was_aborted_continues_its_grammar(live):
    body = {"prompt": PROMPT, "max_tokens": 200, "seed": 3, "structured_outputs": {"regex": REGEX},
            "return_token_ids": True}  # fmt: skip
    whole = live.post("/v1/completions", body).ok()["choices"][0]["token_ids"]
    prompt = list(PROMPT)
    for known in (1, 50, 100, len(whole) - 1):
        again = body | {"prompt": prompt + whole[:known], "resumed_tokens": known}
        assert live.post("/v1/completions", again).ok()["choices"][0]["token_ids"] == whole[known:]
    wrong = live.http.post("/v1/completions", json=body | {"prompt": [*prompt, 10], "resumed_tokens": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["code"] == "no_token_allowed"


def test_a_pause_and_a_sleep_leave_the_grammar_as_it_was(live):
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 300, "maxItems": 300}
    fields = {"guided_json": schema, "guided_whitespace_pattern": " ", "ignore_eos": False, "seed": 1}
    stream = LiveStream(live, [*PROMPT], temperature=1.0, **fields)
    for _ in range(3):
        stream.wait_for_tokens(len(stream.tokens) + 1)
        live.post("/v1/pause", {"mode": "keep"}).ok()
        assert live.get("/v1/is_paused").result["counts"]["frozen"] == 1
        live.post("/v1/sleep", {"tags": ["kv_cache"]}).ok()
        live.post("/v1/wakeup", {}).ok()
        live.post("/v1/resume").ok()
    assert stream.wait_end().finals == ["stop"]
    text = live.post("/detokenize", {"tokens": stream.tokens[:-1]}).ok()["prompt"]  # the last one is EOS
    assert len(json.loads(text)) == 300
