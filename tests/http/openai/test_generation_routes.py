"""/v1/completions and /v1/chat/completions over real HTTP, with and without the openai package."""

from __future__ import annotations

import json
import threading

import httpx
import openai
import pytest
from pydantic import BaseModel

from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.http.body import MAX_BRACKETS, MAX_ENTRIES
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace, reply_with
from support.http_calls import events, in_thread

HELLO = list(b"hey you")


def client(stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.server.url + "/v1", api_key="none", max_retries=0)


def test_completion_by_the_openai_package(stack):
    stack.script(reply_with(HELLO))
    reply = client(stack).completions.create(model="tiny", prompt="hello", max_tokens=7, logprobs=2)
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == ("hey you", "length")
    assert choice.logprobs.tokens == list("hey you")
    assert choice.logprobs.token_logprobs == [-0.5] * 7
    assert choice.logprobs.text_offset == list(range(7))
    assert len(choice.logprobs.top_logprobs) == 7
    assert reply.usage.prompt_tokens == 1 and reply.usage.completion_tokens == 7
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_text_never_ends_a_line_of_a_stream_for_any_reader(stack):
    """Known failure 48, from the other side: httpx and requests split the lines of text as str.splitlines."""
    text = "a\x85\u2028\u2029“é”\x1e"
    stack.script(reply_with(list(text.encode())))
    with stack.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 99, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == text


def test_chat_by_the_openai_package(stack, tokenizer):
    stack.script(reply_with(list("hé".encode())))
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    reply = client(stack).chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=3, logprobs=True, top_logprobs=1
    )
    assert reply.choices[0].message.content == "hé"
    content = reply.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[b] for b in "hé".encode()]
    assert len(content[0].top_logprobs) == 1
    add = stack.engine.expect(AddRequest)
    assert tokenizer.decode(add.prompt_token_ids, skip_special_tokens=False) == "<user>ab<bot>"
    assert add.sampling.max_tokens == 3 and add.sampling.logprobs == 1


def test_streams_by_the_openai_package(stack):
    stack.script(reply_with(HELLO))
    options = {"stream": True, "stream_options": {"include_usage": True}, "model": "tiny"}
    payloads = list(client(stack).completions.create(prompt="hello", n=2, **options))
    texts = ["", ""]
    for payload in payloads[:-1]:
        texts[payload.choices[0].index] += payload.choices[0].text
    assert texts == ["hey you"] * 2
    assert payloads[-1].choices == [] and payloads[-1].usage.completion_tokens == 14
    payloads = list(client(stack).chat.completions.create(messages=[{"role": "user", "content": "a"}], **options))
    assert "".join(c.choices[0].delta.content for c in payloads[:-1]) == "hey you"
    assert [c.choices[0].delta.role for c in payloads[:2]] == ["assistant", None]
    assert [c.choices[0].finish_reason for c in payloads[-2:-1]] == ["length"]


STREAMED = {
    "/v1/completions": {"prompt": [1, 2], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 2},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"n": 2}},
}


@pytest.mark.parametrize("path", STREAMED)
def test_every_event_of_a_stream_has_the_usage_of_its_choice_so_far(stack, path):
    stack.script(reply_with(HELLO, step=3))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**STREAMED[path], "stream": True}
    payloads = events(stack.post(path, **body, stream_options=options))
    assert payloads.pop() == "[DONE]"
    whole, prompt = payloads.pop()["usage"], payloads[0]["usage"]["prompt_tokens"]
    for index in (0, 1):
        usages = [payload["usage"] for payload in payloads if payload["choices"][0]["index"] == index]
        assert [usage["completion_tokens"] for usage in usages] == [3, 6, 7]
        assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in usages)
        assert usages[-1]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert whole["completion_tokens"] == 14 and whole["prompt_tokens"] == prompt
    for without in ({"include_usage": True, "continuous_usage_stats": None}, {"continuous_usage_stats": True}):
        *plain, _ = events(stack.post(path, **body, stream_options=without))
        assert not any(payload.get("usage") for payload in plain if payload["choices"])


def test_token_ids_and_weight_versions_are_in_replies_and_in_every_event(stack):
    stack.script(reply_with([104, 105, 106], step=2))
    body = {"prompt": [1, 2, 3], "return_token_ids": True, "max_tokens": 3}
    choice = stack.post("/v1/completions", **body).json()["choices"][0]
    assert choice["token_ids"] == [104, 105, 106] and choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["weight_versions"] == [{"version": "v1", "weight_epoch": 1, "start": 0, "end": 3}]
    payloads = events(stack.post("/v1/completions", **body, stream=True))
    assert payloads.pop() == "[DONE]"
    assert [c["choices"][0]["token_ids"] for c in payloads] == [[104, 105], [106]]
    spans = [c["choices"][0]["weight_versions"] for c in payloads]
    assert spans == [[{"version": "v1", "weight_epoch": 1, "start": 0, "end": 2}],
                     [{"version": "v1", "weight_epoch": 1, "start": 2, "end": 3}]]  # fmt: skip
    assert "token_ids" not in stack.post("/v1/completions", prompt=[1]).json()["choices"][0]


def test_several_prompts_number_their_choices_as_openai_does_and_share_one_id(stack):
    stack.script(lambda add: reply_with([add.prompt_token_ids[0]] * 2)(add))
    reply = stack.post("/v1/completions", prompt=[[97], [98]], n=2, request_id="job", max_tokens=2).json()
    assert reply["id"] == "job"
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "aa"), (1, "aa"), (2, "bb"), (3, "bb")]
    assert reply["usage"]["prompt_tokens"] == 2 and reply["usage"]["completion_tokens"] == 8
    assert [a.group for a in stack.engine.requests.values()] == ["job", "job"]


def test_a_request_id_of_the_client_is_kept(stack):
    stack.script(reply_with([97]))
    assert stack.post("/v1/completions", prompt="a", request_id="mine").json()["id"] == "mine"
    assert list(stack.engine.requests) == ["mine"]


ROUTES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 4}},
    "/generate": {"input_ids": [97], "sampling_params": {"max_new_tokens": 4}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_requests_with_the_same_x_request_id_are_separate_and_get_it_back(stack, path):
    headers = {"X-Request-Id": "trace"}
    sent = [in_thread(stack.http.post, path, json=ROUTES[path], headers=headers) for _ in range(3)]
    ids = [stack.engine.expect(AddRequest).request_id for _ in range(3)]
    assert len(set(ids)) == 3 and "trace" not in ids
    for request_id in ids:
        stack.engine.emit(request_id, [97], finish_reason="length", spans=[Span("v1", 1, 0, 1)])
    replies = [future.result(20) for future in sent]
    assert [(r.status_code, r.headers["x-request-id"]) for r in replies] == [(200, "trace")] * 3
    assert "x-request-id" not in stack.http.get("/health").headers


def test_errors_and_streams_carry_the_x_request_id(stack):
    stack.script(reply_with([97]))
    headers = {"X-Request-Id": "trace"}
    for body, status in (({"prompt": "a", "stream": True}, 200), ({"prompt": "a", "n": 0}, 400), ({"bad": 1}, 400)):
        reply = stack.http.post("/v1/completions", json=body, headers=headers)
        assert (reply.status_code, reply.headers.get_list("x-request-id")) == (status, ["trace"])


def test_retain_s_needs_a_request_id_in_the_body(stack):
    reply = stack.http.post("/v1/completions", json={"prompt": "a", "retain_s": 5}, headers={"X-Request-Id": "trace"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "request_id"


def test_an_abort_before_any_token_has_the_full_shape(stack):
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="abort", message="Abort before prefill")])
    reply = stack.post("/v1/completions", prompt="a", logprobs=1, return_token_ids=True)
    choice = reply.json()["choices"][0]
    assert reply.status_code == 200 and choice["finish_reason"] == "abort"
    assert choice["token_ids"] == [] and choice["weight_versions"] == [] and choice["text"] == ""
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    chat = stack.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], logprobs=True).json()
    assert chat["choices"][0]["logprobs"]["content"] == []


def test_sampling_parameters_reach_the_engine(stack):
    stack.script(reply_with([97]))
    asked = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "min_tokens": 1, "ignore_eos": True}
    asked |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "max_tokens": 5}
    stack.post("/v1/completions", prompt="a", top_k=-1, stop_token_ids=[3], priority=2, cache_salt="s", **asked)
    add = stack.engine.expect(AddRequest)
    assert {name: getattr(add.sampling, name) for name in asked} == asked
    assert (add.sampling.top_k, add.sampling.stop_token_ids) == (0, (3,))
    assert (add.priority, add.cache_salt) == (2, "s")


def test_max_tokens_of_a_completion_is_16_by_default_and_is_cut_to_the_context(stack):
    stack.script(reply_with([97]))
    stack.post("/v1/completions", prompt=[1])
    assert stack.engine.expect(AddRequest).sampling.max_tokens == 16
    for length, max_tokens, expected in ((3, None, 16), (120, None, 8), (3, 10**6, 125), (3, 4, 4)):
        stack.post("/v1/completions", prompt=[1] * length, max_tokens=max_tokens)
        assert stack.engine.expect(AddRequest).sampling.max_tokens == expected


def test_max_tokens_of_a_chat_is_the_rest_of_the_context_by_default(stack):
    stack.script(reply_with([97]))
    stack.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    add = stack.engine.expect(AddRequest)
    assert add.sampling.max_tokens == 128 - len(add.prompt_token_ids)


def test_tokens_can_be_named_by_id_in_logprobs(stack):
    stack.script(reply_with([97]))
    reply = stack.post("/v1/completions", prompt="a", logprobs=0, return_tokens_as_token_ids=True).json()
    assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]


def test_a_stop_string_cancels_its_choice_and_cuts_tokens_logprobs_and_spans_after_it(stack):
    body = {"prompt": "a", "stop": ["YZ"], "logprobs": 0, "return_token_ids": True, "n": 2, "request_id": "s"}
    future = in_thread(stack.post, "/v1/completions", **body)
    add = stack.engine.expect(AddRequest)
    with_stop, behind = one_output(add, 0, list(b"abYZq"), 0), one_output(add, 0, list(b"behind"), 5)
    stack.engine.send(m.Outputs([with_stop, behind]))
    assert stack.engine.expect(m.CancelRequest) == m.CancelRequest("s", 0, "stop")
    stack.engine.emit("s", list(b"late"), **_fields(add, 4))
    stack.engine.emit("s", list(b"cd"), choice=1, finish_reason="length", **_fields(add, 2))
    reply = future.result(30).json()
    first, second = reply["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("ab", "stop", "YZ")
    assert first["token_ids"] == list(b"abYZ") and len(first["logprobs"]["tokens"]) == 4
    assert first["weight_versions"][-1]["end"] == 4
    assert second["text"] == "cd"
    assert reply["usage"]["completion_tokens"] == 6


def _fields(add: AddRequest, count: int) -> dict:
    output = one_output(add, 0, [0] * count, 0)
    return {"logprobs": output.logprobs, "spans": output.spans}


def body_with_logprobs(path: str, tokens: int) -> dict:
    """A body that asks for 8 choices with two of the best logprobs for each token."""
    if path == "/generate":
        sampling = {"n": 4, "max_new_tokens": tokens}
        return {"input_ids": [[97]] * 2, "return_logprob": True, "top_logprobs_num": 2, "sampling_params": sampling}
    if path == "/inference/v1/generate":
        return {"token_ids": [97], "sampling_params": {"n": 8, "max_tokens": tokens, "logprobs": 2}}
    if path == "/v1/completions":
        return {"prompt": [[97], [97]], "n": 4, "max_tokens": tokens, "logprobs": 2}
    return ROUTES[path] | {"n": 8, "max_tokens": tokens, "logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize("path", ROUTES)
def test_a_reply_that_might_hold_too_many_logprobs_is_refused(make_stack, path):
    """Five tokens for each choice are 120 log probabilities."""
    stack = make_stack(max_reply_logprobs=119)
    error = stack.post(path, **body_with_logprobs(path, 5)).json()["error"]
    assert error["param"] == "logprobs" and "--max-reply-logprobs" in error["message"]
    stack.script(reply_with([97]))
    assert stack.post(path, **body_with_logprobs(path, 4)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_stop_strings_beyond_their_limits_are_refused(module_stack, path):
    for stop in (["a"] * 65, ["a" * 257], [""], [chr(97 + i) * 256 for i in range(17)]):
        body = {"sampling_params": {"stop": stop}} if path == "/generate" else {"stop": stop}
        error = module_stack.post(path, **ROUTES[path] | body).json()["error"]
        assert error["param"].endswith("stop"), error


def test_an_abort_sends_the_text_that_was_kept_back_for_a_stop_string(stack):
    stack.script(reply_with(list(b"abY"), finish_reason="abort"))
    assert stack.post("/v1/completions", prompt="a", stop="YZ").json()["choices"][0]["text"] == "abY"
    payloads = events(stack.post("/v1/completions", prompt="a", stop="YZ", stream=True))
    assert [c["choices"][0]["text"] for c in payloads[:-1]] == ["a", "b", "Y"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_before_any_token_cancels_its_request(stack, stream):
    body = {"prompt": "a", "stream": stream, "request_id": "gone"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(stack.server.url + "/v1/completions", json=body, timeout=httpx.Timeout(20, read=0.3))
    assert stack.engine.expect(m.CancelRequest) == m.CancelRequest("gone", None, "abort")


def test_a_client_that_disconnects_during_a_stream_cancels_its_request(stack):
    stack.script(lambda add: [one_output(add, 0, [97], 0)])
    body = {"prompt": "a", "stream": True, "request_id": "gone"}
    with httpx.stream("POST", stack.server.url + "/v1/completions", json=body, timeout=30) as response:
        assert "data:" in next(response.iter_lines())
    assert stack.engine.expect(m.CancelRequest) == m.CancelRequest("gone", None, "abort")


def test_an_idle_stream_gets_comments_and_then_its_tokens(make_stack):
    stack = make_stack(keepalive_s=0.05)
    body = {"prompt": "a", "stream": True, "request_id": "frozen"}
    with httpx.stream("POST", stack.server.url + "/v1/completions", json=body, timeout=20) as response:
        stack.engine.expect(AddRequest)
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        stack.engine.emit("frozen", list(b"hi"), finish_reason="length")
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[0][6:])["choices"][0]["text"] == "hi" and rest[-1] == "data: [DONE]"


def test_the_death_of_the_engine_ends_a_stream_with_one_error_event(stack):
    stack.script(lambda add: [one_output(add, 0, [97], 0)])
    body = {"prompt": "a", "stream": True, "request_id": "r"}
    with httpx.stream("POST", stack.server.url + "/v1/completions", json=body, timeout=20) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        stack.engine.die()
        last = list(lines)
    assert len(last) == 1 and json.loads(last[0][6:])["error"]["code"] == "engine_dead"
    stack.restart_engine()


def test_the_death_of_the_engine_is_answered_with_the_tokens_so_far(stack):
    future = in_thread(stack.post, "/v1/completions", prompt="a", return_token_ids=True, request_id="r")
    stack.engine.expect(AddRequest)
    stack.engine.emit("r", list(b"hi"))
    stack.engine.die()
    reply = future.result(30)
    assert reply.status_code == 503 and "retry-after" in reply.headers
    assert reply.json()["error"]["code"] == "engine_dead"
    assert reply.json()["choices"][0]["token_ids"] == list(b"hi")
    assert reply.json()["choices"][0]["finish_reason"] is None
    refused = stack.post("/v1/completions", prompt="a")
    assert refused.status_code == 503 and "retry-after" in refused.headers
    stack.restart_engine()


def test_a_request_that_fails_in_the_engine_is_a_500_with_its_message(stack):
    stack.script(lambda add: [m.Output(add.request_id, 0, finish_reason="error", message="the step failed")])
    reply = stack.post("/v1/completions", prompt="a")
    assert reply.status_code == 500 and reply.json()["error"]["message"] == "the step failed"
    payloads = events(stack.post("/v1/completions", prompt="a", stream=True))
    assert "[DONE]" not in payloads


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_of_the_engine_has_its_status_and_retry_after(stack, stream):
    def refuse(add: AddRequest) -> list:
        failure = m.Failure("queue_full", "the queue is full", {"retry_after": 3})
        stack.engine._transport.send(stack.engine.clients[-1], m.Rejected(add.request_id, failure))
        return []

    stack.script(refuse)
    reply = stack.post("/v1/completions", prompt="a", stream=stream)
    assert reply.status_code == 429 and reply.headers["retry-after"] == "3"
    assert reply.json()["error"]["type"] == "rate_limit_error"


def test_a_shutdown_answers_open_requests_with_their_tokens_so_far(stack):

    def abort(call: m.Call) -> m.Reply:
        for request_id in call.args.request_ids:
            last = replace(one_output(stack.engine.requests[request_id], 0, [98], 1), finish_reason="abort")
            stack.engine._transport.send(stack.engine.clients[-1], m.Outputs([last]))
        return m.Reply(call.call_id, {})

    stack.engine.replies[m.AbortArgs] = abort
    future = in_thread(stack.post, "/v1/completions", prompt="a", request_id="open")
    stack.engine.expect(AddRequest)
    stack.engine.emit("open", [97])
    sent = threading.Event()
    stack.engine.do(sent.set)
    assert sent.wait(30), "the first token is not sent before the last one"
    stack.server._server.should_exit = True
    choice = future.result(30).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")


def test_many_streams_at_once(stack):
    stack.script(reply_with(HELLO))
    futures = [in_thread(stack.post, "/v1/completions", prompt="a", stream=True) for _ in range(100)]
    streams = [events(future.result(30))[:-1] for future in futures]
    assert {"".join(event["choices"][0]["text"] for event in stream) for stream in streams} == {"hey you"}


def test_a_body_with_too_many_lists_is_refused_before_it_is_parsed(module_stack):
    body = b'{"prompt": [97], "x": [' + b"[]," * MAX_BRACKETS + b"[]]}"
    reply = module_stack.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and str(MAX_BRACKETS) in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("/v1/completions", {"prompt": "a", "stop": [1] * 70_000}, "stop: expected at most"),
        ("/generate", {"text": "a", "sampling_params": {"stop": [1] * 70_000}}, "stop: expected at most"),
        ("/v1/abort_requests", {"req_ids": [1] * 70_000}, "req_ids: expected at most"),
        ("/v1/completions", {"prompt": "a", "stream_options": {str(i): 1 for i in range(70_000)}}, "stream_options: "),
        ("/v1/completions", {f"x{i}": 1 for i in range(70_000)}, "x0: unknown field"),
    ],
)
def test_too_many_entries_are_refused_before_pydantic_checks_them(module_stack, monkeypatch, path, body, said):
    """Each wrong entry costs pydantic microseconds on the event loop: 14 million entries took minutes."""
    validate = BaseModel.model_validate.__func__

    def of_few_entries(cls, data):
        assert all(len(v) < MAX_ENTRIES for v in (data, *data.values()) if isinstance(v, list | dict))
        return validate(cls, data)

    monkeypatch.setattr(BaseModel, "model_validate", classmethod(of_few_entries))
    reply = module_stack.http.post(path, json=body)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


@pytest.mark.parametrize("ids", [[], "a", ["a"], [[1]], [1.5], None, [1, "a"]])
def test_token_ids_other_than_one_prompt_are_refused(module_stack, ids):
    reply = module_stack.http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": {}})
    assert reply.status_code == 400
