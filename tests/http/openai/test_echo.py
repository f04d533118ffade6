"""``echo``: the prompt is the beginning of each choice, with its log probabilities, for the likelihood of a text."""

from __future__ import annotations

import pytest

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import events

ABC = list(b"abc")  # one token each
SPAN = Span("41", 1, 0, 1)


def entry(logprob: float, *top: tuple[int, float]) -> Logprob:
    return Logprob.of(logprob, top)


PROMPT_ENTRIES = [entry(-1.5, (ord("b"), -1.5)), entry(-2.5, (ord("x"), -0.5))]


def scored(add: AddRequest, *, choices: int = 1) -> list[m.Output]:
    """Answer with the entries of a prompt of three tokens, and one token."""
    first = m.Output(
        add.request_id, 0, [ord("!")], [entry(-0.25, (ord("!"), -0.25))], [SPAN],
        prompt_logprobs=PROMPT_ENTRIES, finish_reason="stop",
    )  # fmt: skip
    return [first, *(m.Output(add.request_id, k, [ord("?")], [entry(-1.0)], [SPAN], finish_reason="length")
                     for k in range(1, choices))]  # fmt: skip


def ask(stack, **body):
    return stack.post("/v1/completions", **{"echo": True, "logprobs": 1, "temperature": 0} | body)


OF_PROMPT = {
    "tokens": ["a", "b", "c"],
    "token_logprobs": [None, -1.5, -2.5],
    "top_logprobs": [None, {"b": -1.5}, {"c": -2.5, "x": -0.5}],
    "text_offset": [0, 1, 2],
}


@pytest.mark.parametrize("prompt", ["abc", ABC], ids=["text", "token ids"])
def test_the_prompt_and_its_logprobs_come_before_the_answer(stack, prompt):
    stack.script(scored)
    choice = ask(stack, prompt=prompt, max_tokens=1).json()["choices"][0]
    add = stack.engine.expect(AddRequest)
    assert (add.sampling.max_tokens, add.sampling.logprobs, add.sampling.prompt_logprobs) == (1, 1, 1)
    assert choice["text"] == "abc" and choice["finish_reason"] == "stop", "the stop token has no text"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "!"],
        "token_logprobs": [None, -1.5, -2.5, -0.25],
        "top_logprobs": [*OF_PROMPT["top_logprobs"], {"!": -0.25}],
        "text_offset": [0, 1, 2, 3],
    }
    assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == [(0, 1)], "labels of the answer"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_scores_the_prompt_and_returns_no_token(stack, stream):
    stack.script(scored)
    body = {"prompt": ABC, "max_tokens": 0, "return_token_ids": True, "stream": stream}
    reply = ask(stack, **body, stream_options={"include_usage": True} if stream else None)
    whole, choice = reply, None
    if stream:
        first, whole, done = events(reply)
        choice = first["choices"][0]
        assert done == "[DONE]"
    else:
        whole = reply.json()
        choice = whole["choices"][0]
    assert stack.engine.expect(AddRequest).sampling.max_tokens == 1, "the engine samples at least one token"
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("abc", "length", OF_PROMPT)
    assert (choice["token_ids"], choice["weight_versions"], choice["stop_reason"]) == ([], [], None)
    assert (choice["min_weight_version"], choice["max_weight_version"]) == ("41", "41"), "that computed the prompt"
    assert (whole if "weight_version" in whole else first)["weight_version"] == 41
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["prompt_tokens"] == 3


def test_every_choice_of_every_prompt_begins_with_its_prompt(stack):
    stack.script(lambda add: scored(add, choices=2))
    choices = ask(stack, prompt=[ABC, list(b"you")], n=2, max_tokens=2).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abc", "abc?", "you", "you?"]
    assert all(choice["logprobs"]["token_logprobs"][:3] == [None, -1.5, -2.5] for choice in choices)


def test_only_the_first_event_of_a_stream_has_the_prompt(stack):
    def script(add: AddRequest) -> list[m.Output]:
        first, second = reply_with(ABC[:2])(add)
        return [m.Output(first.request_id, 0, first.token_ids, first.logprobs, first.spans,
                         prompt_logprobs=PROMPT_ENTRIES), second]  # fmt: skip

    stack.script(script)
    first, second, _ = events(ask(stack, prompt=ABC, max_tokens=2, stream=True))
    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("abca", "b")
    assert first["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert second["choices"][0]["logprobs"]["text_offset"] == [4]


def test_an_echo_without_logprobs_computes_none(stack):
    stack.script(reply_with([ord("!")]))
    choice = ask(stack, prompt="abc", logprobs=None).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("abc!", None)
    assert stack.engine.expect(AddRequest).sampling.prompt_logprobs is None


def test_an_abort_within_the_prompt_has_nulls_for_all_its_tokens(stack):
    """A client that adds up the logprobs must not get a sum of a part of them."""
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="abort", prompt_logprobs=PROMPT_ENTRIES[:1])])
    for max_tokens in (0, 1):
        choice = ask(stack, prompt=ABC, max_tokens=max_tokens).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "abort")
        assert choice["logprobs"]["token_logprobs"] == [None, None, None]
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"] and choice["weight_versions"] == []


def test_a_model_without_a_tokenizer_echoes_the_logprobs_of_token_ids(make_stack):
    stack = make_stack(with_tokenizer=False)
    stack.script(scored)
    choice = ask(stack, prompt=ABC, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "" and choice["logprobs"]["token_logprobs"] == [None, -1.5, -2.5]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ABC]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"resumed_tokens": 1}, "echo"),
        ({"stream": True, "n": 2}, "n"),
        ({"logprobs": 1025}, "logprobs"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"prompt": [[1] * 120] * 69, "logprobs": 256, "max_tokens": 1}, "logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_an_echo_that_cannot_be_answered_is_refused_by_name(module_stack, body, field):
    reply = ask(module_stack, **{"prompt": ABC} | body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo"),
        ("/inference/v1/generate", {"token_ids": [1], "echo": True}, "echo"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"echo": True}}, "sampling_params.echo"),
    ],
)
def test_other_routes_have_no_echo(module_stack, path, body, field):
    reply = module_stack.post(path, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
