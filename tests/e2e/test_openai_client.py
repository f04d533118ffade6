"""The unmodified ``openai`` package with a real server, and with a real fleet."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import openai
import pytest

from e2e.fleet_server import KINDS, FleetServer
from e2e.server import SMALL, Server, until
from examples.embedded_model.arithmetic import problems


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "serve":
        yield request.getfixturevalue("server")
    else:
        with FleetServer(2, *SMALL) as fleet:
            yield fleet


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def complete(client, model):
    """Return ``complete(prompt, **fields)``, which makes a completion with token ids that ignores eos."""

    def call(prompt, extra=None, **fields):
        extra = {"return_token_ids": True, "ignore_eos": True, **(extra or {})}
        return client.completions.create(model=model, prompt=prompt, extra_body=extra, **fields)

    return call


@pytest.fixture(scope="module")
def question():
    return problems(seed=11, n=1)[0].prompt


def test_chat_stream_and_whole_reply_are_the_same(client, model, question):
    messages = [{"role": "user", "content": question}]
    ask = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 200}
    whole = client.chat.completions.create(**ask)
    events = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content and text
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == whole.choices[0].finish_reason
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completion_with_token_ids_in_and_out(complete):
    reply = complete([60, 61, 62], max_tokens=9, temperature=0, logprobs=2)
    choice = reply.choices[0]
    assert len(choice.token_ids) == 9 and choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == 9 and all(lp <= 0 for lp in choice.logprobs.token_logprobs)
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)
    assert reply.usage.completion_tokens == 9 and reply.usage.prompt_tokens == 3
    assert choice.weight_versions[0]["end"] == 9


def test_an_echo_without_tokens_has_the_logprobs_that_the_generation_had(complete):
    """The likelihood of given tokens, as lm-eval asks for it, here with several prompts in one request."""
    made = complete([60, 61, 62], max_tokens=9, temperature=0, logprobs=1).choices[0]
    prompt = [60, 61, 62, *made.token_ids]
    reply = complete([prompt, prompt[:5]], max_tokens=0, temperature=0, logprobs=1, echo=True)
    whole, part = (choice.logprobs for choice in reply.choices)
    assert whole.token_logprobs[3:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-4)
    assert (
        whole.token_logprobs[0] is None and len(whole.token_logprobs) == 12 and whole.tokens[3:] == made.logprobs.tokens
    )
    assert part.token_logprobs[1:] == pytest.approx(whole.token_logprobs[1:5], abs=1e-4)
    assert all(
        max(top.values()) == lp for top, lp in zip(whole.top_logprobs[3:], whole.token_logprobs[3:], strict=True)
    )
    assert [(c.token_ids, c.finish_reason) for c in reply.choices] == [([], "length")] * 2
    assert reply.usage.completion_tokens == 0 and [c.text for c in reply.choices] != ["", ""]


def test_n_choices_differ_and_repeat_with_the_same_seed(client, model, question):
    def ask(seed):
        reply = client.completions.create(model=model, prompt=question, n=4, temperature=1.5, seed=seed, max_tokens=24)
        assert [c.index for c in reply.choices] == [0, 1, 2, 3]
        return [c.text for c in reply.choices]

    assert ask(1) == ask(1)
    assert len(set(ask(1))) > 1 and ask(1) != ask(2)


def test_a_stop_string_cuts_text_ids_and_logprobs_at_the_same_place(complete, question):
    ask = {"temperature": 0, "max_tokens": 60, "logprobs": 0}
    whole = complete(question, **ask).choices[0]
    stop = whole.text[5:8]
    cut = complete(question, **ask, stop=[stop])
    choice = cut.choices[0]
    assert choice.text == whole.text[: whole.text.index(stop)] and choice.finish_reason == "stop"
    assert len(choice.token_ids) == len(choice.logprobs.tokens) == cut.usage.completion_tokens
    assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]


def test_a_stop_token_id_ends_the_request(complete):
    free = complete([60, 61, 62], max_tokens=20, temperature=0).choices[0].token_ids
    stopped = complete([60, 61, 62], {"stop_token_ids": [free[4]]}, max_tokens=20, temperature=0).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free[: free.index(free[4]) + 1]


def test_the_same_request_gets_the_same_tokens_alone_and_in_a_crowd(complete):
    def ask(i):
        return complete(list(range(40, 45 + i)), max_tokens=40, temperature=0.8, seed=i).choices[0].token_ids

    alone = [ask(i) for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 2.0}, "top_p"),
        ({"n": 0}, "n"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type"),
        ({"extra_body": {"return_routed_experts": True}}, "return_routed_experts"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [60] * 5000}, "prompt"),
        ({"model": "another"}, "model"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(client, model, body, field):
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
        client.completions.create(**{"model": model, "prompt": [60, 61], **body})
    assert field in str(error.value)


def test_a_live_request_id_is_refused_a_second_time(complete):
    first = complete([60], {"request_id": "same"}, max_tokens=3000, stream=True)
    next(iter(first))
    with pytest.raises(openai.ConflictError):
        complete([60], {"request_id": "same"}, max_tokens=3)
    first.close()


@pytest.fixture(params=KINDS)
def with_short_queue(request: pytest.FixtureRequest) -> Iterator[tuple[Server, int]]:
    """Return a server, and the number of requests that may wait there."""
    if request.param == "serve":
        yield request.getfixturevalue("strict_server"), 2
    else:
        with FleetServer(2, *SMALL, "--max-waiting", "2") as fleet:
            yield fleet, 4


def test_a_full_queue_is_429(with_short_queue):
    server, room = with_short_queue
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    ask = {"model": client.models.list().data[0].id, "prompt": [60], "max_tokens": 2}
    server.post("/v1/pause", {"mode": "keep"})
    with concurrent.futures.ThreadPoolExecutor(room) as pool:
        held = [pool.submit(client.completions.create, **ask) for _ in range(room)]
        until(lambda: waiting(server) == room, 30, "all places are taken")
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**ask)
        server.post("/v1/resume")
        assert all(f.result().choices[0].finish_reason for f in held)


def waiting(server: Server) -> int:
    """Return the number of waiting requests of all replicas."""
    return server.get("/v1/is_paused").result["counts"]["queued"]
