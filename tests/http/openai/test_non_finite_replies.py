"""A choice that ended with an error is answered with its tokens, and the other choices are answered as usual."""

from __future__ import annotations

import json

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace

MESSAGE = "the logits for the token at position 5 are not finite"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ROUTES = [
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/v1/chat/completions", CHAT),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {}}),
]


def failing(*bad: int):
    """Return a script: choices in ``bad``, and all choices of a prompt that begins with 9, make two tokens and end with
    an error. Other choices make three tokens."""

    def script(add: AddRequest) -> list[m.Output]:
        outputs = []
        for choice in range(add.n):
            fails = choice in bad or add.prompt_token_ids[0] == 9
            outputs += [one_output(add, choice, [97 + i], i) for i in range(2 if fails else 3)]
            if fails:
                end = {"finish_reason": "error", "stop_reason": "non_finite_logits", "message": MESSAGE}
                outputs.append(m.Output(add.request_id, choice, **end))
            else:
                outputs[-1] = replace(outputs[-1], finish_reason="length")
        return outputs

    return script


def ending(choice: dict) -> tuple:
    return choice["index"], choice["finish_reason"], choice.get("error", {}).get("code")


def asked(path: str, body: dict, **fields) -> dict:
    if path == "/inference/v1/generate":
        stream = {"stream": True} if fields.pop("stream", False) else {}
        return body | {"sampling_params": fields} | stream
    return body | fields | {"return_token_ids": True}


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_choices_beside_a_choice_with_an_error_are_complete(stack, path, body):
    stack.script(failing(1))
    reply = stack.post(path, **asked(path, body, n=3))
    assert reply.status_code == 200
    choices = reply.json()["choices"]
    assert [ending(c) for c in choices] == [(0, "length", None), (1, "error", "non_finite_logits"), (2, "length", None)]
    assert choices[1]["error"]["message"] == MESSAGE
    assert [c["token_ids"] for c in choices] == [[97, 98, 99], [97, 98], [97, 98, 99]]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_reply_whose_choices_all_failed_is_a_500_with_their_tokens(stack, path, body):
    stack.script(failing(0, 1))
    reply = stack.post(path, **asked(path, body, n=2))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["message"]) == (500, "non_finite_logits", MESSAGE)
    assert [c["token_ids"] for c in reply.json()["choices"]] == [[97, 98], [97, 98]]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_a_stream_has_the_error_in_the_last_event_of_the_choice(stack, path, body, bad):
    stack.script(failing(*bad))
    reply = stack.post(path, **asked(path, body, n=2, stream=True))
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    if len(bad) == 2:
        assert json.loads(events.pop())["error"]["code"] == "non_finite_logits" and "[DONE]" not in events
    else:
        assert events.pop() == "[DONE]"
    ends = [c for e in events for c in json.loads(e)["choices"] if c["finish_reason"] is not None]
    expected = {(i, "error", "non_finite_logits") if i in bad else (i, "length", None) for i in (0, 1)}
    assert {ending(c) for c in ends} == expected


def test_other_prompts_of_the_body_are_complete(stack):
    stack.script(failing())
    choices = stack.post("/v1/completions", prompt=[[1, 2], [9, 2], [3]], return_token_ids=True).json()["choices"]
    assert [c["finish_reason"] for c in choices] == ["length", "error", "length"]
    assert [len(c["token_ids"]) for c in choices] == [3, 2, 3]


def test_sglang_answers_a_failed_choice_as_an_abort_with_status_500(stack):
    stack.script(failing())
    sampling = {"max_new_tokens": 8}
    good, bad = stack.post("/generate", input_ids=[[1], [9]], sampling_params=sampling).json()
    assert good["meta_info"]["finish_reason"]["type"] == "length" and len(good["output_ids"]) == 3
    reason = bad["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["message"]) == ("abort", 500, MESSAGE)
    assert bad["output_ids"] == [97, 98]
    alone = stack.post("/generate", input_ids=[9], sampling_params=sampling)
    assert alone.status_code == 500 and alone.json()["error"]["code"] == "non_finite_logits"


def test_a_failure_of_the_engine_is_an_error_of_the_whole_request(stack):
    def script(add: AddRequest) -> list[m.Output]:
        ends = [m.Output(add.request_id, k, finish_reason="error", message="the engine failed") for k in (0, 1)]
        return [one_output(add, 0, [97], 0), *ends]

    stack.script(script)
    reply = stack.post("/v1/completions", prompt=[1], n=2)
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "engine_error"
