"""FastDeploy's routes, and its chats and completions on a server with --fastdeploy-form."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.http.dialects.fastdeploy.routes import ABSENT, NOT_HERE
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import FakeEngine, reply_with
from support.http_calls import answer, in_thread
from support.http_stack import Server, stacks
from support.tiny_tokenizer import save_tokenizer

USER = {"role": "user", "content": "a"}
THINK, END_THINK = 264, 265
CLEARED = {"is_paused": True, "rejecting_new_requests": True, "holds": [{"id": "fastdeploy-cleared"}]}


@pytest.fixture(scope="module")
def formed(model_dir, tokenizer) -> Iterator[Any]:
    with stacks(model_dir, tokenizer) as make:
        yield make(fastdeploy_form=True)


@pytest.fixture
def thinking(make_stack, tmp_path, monkeypatch) -> Any:
    """Return a stack whose model has tokens around its reasoning."""
    from transformers import PreTrainedTokenizerFast

    save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(tmp_path)
    stack = make_stack(fastdeploy_form=True, reasoning_parser="qwen3", tokenizer=load_tokenizer(str(tmp_path)))
    stack.script(reply_with([97]))
    return stack


def chat(stack, **fields: Any) -> dict[str, Any]:
    reply = stack.post("/v1/chat/completions", **{"messages": [USER]} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def sent(stack, **fields: Any) -> AddRequest:
    """Return the request that a chat makes."""
    chat(stack, **fields)
    return stack.engine.expect(AddRequest)


def events(reply) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# ------------------------------------------------------------------ routes on every server


def test_every_server_has_fastdeploys_routes(module_stack):
    answer(module_stack, m.ModelInfoArgs, {"num_blocks": 7})
    assert module_stack.http.get("/ping").json() == module_stack.http.post("/ping").json()
    routes = module_stack.http.get("/load").json()["routes"]
    assert {"path": "/v1/pause", "methods": ["POST"], "tags": ["Control"]} in routes
    assert all(route["path"].startswith("/v1") for route in routes)
    info = module_stack.http.get("/config-info").json()
    assert info["model_config"]["max_model_len"] == 128 and info["parallel_config"]["tensor_parallel_size"] == 1


def test_no_secret_of_the_environment_is_shown(module_stack, monkeypatch):
    answer(module_stack, m.ModelInfoArgs, {})
    names = ("FD_API_KEY", "FD_HUB_TOKEN", "FD_DB_PASSWORD", "FD_Secret_2", "FD_MAX_TOKENS", "FDX")
    for name in names:
        monkeypatch.setenv(name, f"value of {name}")
    shown = module_stack.http.get("/config-info").json()["env_config"]
    assert set(names) & set(shown) == {"FD_MAX_TOKENS"}


@pytest.mark.parametrize("path", ABSENT | NOT_HERE)
def test_a_route_of_a_missing_feature_is_refused_with_the_alternative(module_stack, path):
    reply = module_stack.post(path, input="a")
    assert reply.status_code == 400 and (ABSENT | NOT_HERE)[path] in reply.json()["error"]["message"]


def test_a_clear_ends_and_refuses_requests_and_keeps_no_weights(stack):
    order: list[Any] = []
    for kind in (m.PauseArgs, m.SleepArgs):
        stack.engine.replies[kind] = lambda call: order.append(call.args) or m.Reply(call.call_id, {"status": "ok"})
    assert stack.http.get("/clear_load_weight").json()["msg"] == "clear model weight successfully"
    pause, sleep = order
    assert (pause.mode, pause.admission, pause.hold_id) == ("abort", "reject", "fastdeploy-cleared")
    assert sleep.discard and sleep.mode == "abort" and sleep.tags == ()
    stack.engine.status = CLEARED
    answer(stack, m.WeightInfoArgs, {"asleep": ["kv_cache", "weight"], "session": None})
    assert stack.http.get("/clear_load_weight").json()["msg"] == "model weight is cleared"


def test_a_clear_beside_one_of_another_api_server_leaves_its_hold(stack):
    """Without the hold, no update would load the weights again."""
    asleep: list[str] = []

    def sleep(call: m.Call) -> m.Reply:
        asleep[:] = ["kv_cache", "weight"]  # the other one was faster
        return m.Reply(call.call_id, {}, m.Failure("wrong_order", "weight sleeps already", {}))

    answer(stack, m.PauseArgs, {"status": "paused"})
    stack.engine.replies[m.WeightInfoArgs] = lambda call: m.Reply(call.call_id, {"asleep": asleep, "session": None})
    stack.engine.replies[m.SleepArgs] = sleep
    released: list[Any] = []
    stack.engine.replies[m.ResumeArgs] = lambda call: released.append(call.args) or m.Reply(call.call_id, {})
    assert stack.http.get("/clear_load_weight").json()["msg"] == "model weight is cleared"
    assert not released


def test_calls_of_all_ranks_at_once_clear_and_load_once(stack):
    """What is engine state here: the names of the holds, and what sleeps."""
    holds: list[str] = []
    asleep: list[str] = []

    def handler(change: Callable[[Any], Any]) -> Callable[[m.Call], m.Reply]:
        def handle(call: m.Call) -> m.Reply:
            change(call.args)
            return m.Reply(call.call_id, {"asleep": asleep[:], "weight_epoch": 1, "session": None})

        return handle

    def status(call: m.Call) -> m.Reply:
        return m.Reply(call.call_id, {"holds": [{"id": name} for name in holds]})

    stack.engine.replies |= {
        m.PauseStatusArgs: status,
        m.PauseArgs: handler(lambda args: holds.append(args.hold_id)),
        m.SleepArgs: handler(lambda args: asleep.extend(["kv_cache", "weight"])),
        m.WeightInfoArgs: handler(lambda args: None),
        m.WakeArgs: handler(lambda args: asleep.clear()),
        m.UpdateWeightsArgs: handler(lambda args: None),
        m.ResumeArgs: handler(lambda args: holds.clear()),
    }
    for path, first, others in (
        ("/clear_load_weight", "clear model weight successfully", "model weight is cleared"),
        ("/update_model_weight", "update model weight successfully", "model weight is updated"),
    ):
        replies = [in_thread(lambda path=path: stack.http.get(path)) for _ in range(4)]
        assert sorted(reply.result().json()["msg"] for reply in replies) == sorted([first] + [others] * 3)
    assert not holds and not asleep


def test_an_engine_that_replaced_a_cleared_one_loads_the_folder(stack):
    """It has read the folder when it started, maybe before the trainer wrote it."""
    answer(stack, m.WeightInfoArgs, {"asleep": [], "weight_epoch": 0})
    for kind in (m.UpdateWeightsArgs, m.ResumeArgs):
        answer(stack, kind, {"weight_epoch": 1})
    assert stack.http.get("/update_model_weight").json()["msg"] == "update model weight successfully"
    answer(stack, m.WeightInfoArgs, {"asleep": [], "weight_epoch": 1})
    assert stack.http.get("/update_model_weight").json()["msg"] == "model weight is updated"


def test_a_clear_in_a_weight_session_ends_no_request(stack):
    answer(stack, m.WeightInfoArgs, {"asleep": [], "weight_epoch": 0, "session": {"session_id": "s"}})
    paused: list[Any] = []
    stack.engine.replies[m.PauseArgs] = lambda call: paused.append(call.args) or m.Reply(call.call_id, {})
    reply = stack.http.get("/clear_load_weight")
    assert reply.status_code == 400 and "session" in reply.json()["msg"] and not paused


def test_a_failed_clear_refuses_no_request_any_more(stack):
    answer(stack, m.PauseArgs, {"status": "paused"})
    answer(stack, m.WeightInfoArgs, {"asleep": [], "session": None})
    answer(stack, m.SleepArgs, failure=m.Failure("wrong_order", "a weight session is open", {}))
    answer(stack, m.ResumeArgs, {})
    reply = stack.http.get("/clear_load_weight")
    assert reply.status_code == 400 and reply.json()["msg"] == "a weight session is open"
    assert stack.engine.expect(m.ResumeArgs).args.hold_id == "fastdeploy-cleared"


def test_an_update_loads_the_folder_of_the_model_and_ends_all_pauses(stack, model_dir):
    stack.engine.status = CLEARED
    answer(stack, m.WeightInfoArgs, {"asleep": ["weight"]})
    for kind in (m.WakeArgs, m.UpdateWeightsArgs, m.ResumeArgs):
        answer(stack, kind, {"asleep": []})
    assert stack.http.get("/update_model_weight").json()["msg"] == "update model weight successfully"
    assert stack.engine.expect(m.UpdateWeightsArgs).args.source.path == model_dir
    assert [stack.engine.expect(m.ResumeArgs).args.hold_id for _ in range(2)] == ["fastdeploy-cleared", None]


# ------------------------------------------------------------------ statuses with --fastdeploy-form


def test_while_the_weights_are_cleared_requests_and_health_get_a_304_without_a_body(make_stack):
    stack = make_stack(fastdeploy_form=True)
    stack.engine.status = CLEARED
    replies = [stack.post(path, messages=[USER]) for path in ("/v1/chat/completions", "/v1/completions")]
    replies += [stack.http.get("/health"), stack.http.post("/ping")]
    assert {(reply.status_code, reply.content) for reply in replies} == {(304, b"")}


def test_requests_wait_for_the_first_engine_and_health_does_not(model_dir, tokenizer):
    """Scripts for FastDeploy send requests as soon as the port is open."""
    path = ipc_dir.create()
    server = Server(ipc_dir.endpoint(path), tokenizer, ServeConfig(model=model_dir, fastdeploy_form=True), NO_KEYS)
    server.client._first_connection_s = 0.0  # for which other requests wait
    reply = in_thread(lambda: server.post("/v1/completions", prompt="a"))
    assert server.http.get("/health").status_code == 503
    time.sleep(0.2)
    engine = FakeEngine(ipc_dir.endpoint(path), script=reply_with([97]))
    try:
        assert reply.result(20).json()["choices"][0]["text"] == "a"
    finally:
        server.stop()
        engine.die()
        ipc_dir.remove(path)


def test_sleep_keeps_no_weights_unless_a_native_field_asks_for_it(make_stack):
    stack = make_stack(fastdeploy_form=True)
    for kind in (m.PauseArgs, m.SleepArgs, m.WakeArgs):
        answer(stack, kind, {})
    for body, discards in (({"tags": "weight"}, True), ({"mode": "keep"}, False)):
        assert stack.post("/v1/sleep", **body).json()["status"] == "success"
        assert stack.engine.expect(m.SleepArgs).args.discard is discards
    assert stack.post("/v1/wakeup").status_code == 200
    assert stack.engine.expect(m.WakeArgs).args.tags == ()


def test_an_update_that_names_no_tensors_loads_the_folder_of_the_model(make_stack, model_dir):
    stack = make_stack(fastdeploy_form=True)
    answer(stack, m.UpdateWeightsArgs, {"version": "step-7"})
    assert stack.post("/v1/update_weights", version="step-7").json()["status"] == "success"
    args = stack.engine.expect(m.UpdateWeightsArgs).args
    assert (args.source.path, args.version) == (model_dir, "step-7")


# ------------------------------------------------------------------ errors with --fastdeploy-form


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"messages": None}, ("messages", "missing_required_parameter", "Field required")),
        ({"messages": "a"}, ("list[any]", "invalid_value", "Input should be a valid list")),
        ({"top_p": 1.5}, ("top_p", "invalid_value", "Input should be less than or equal to 1")),
        ({"max_tokens": 1.5}, ("max_tokens", "invalid_value",
                               "Input should be a valid integer, got a number with a fractional part")),
        ({"max_tokens": 0}, ("max_tokens", "invalid_value", "max_tokens can be defined [1, 128), but now it's 0.")),
        ({"messages": [{"role": "user", "content": "a" * 9999}]},
         ("messages", "context_length_exceeded", "Input text is too long")),
        ({"metadata": {"temperature": "hot"}}, ("temperature", "invalid_value", "Input should be a valid number")),
        ({"stream_options": {}}, ("stream_options", "invalid_value", "Stream options can only be defined")),
        ({"collect_metrics": True}, ("collect_metrics", "invalid_value", "not supported")),
        ({"prompt_token_ids": [5000]}, ("prompt_token_ids", "invalid_value", "prompt_token_ids: token id 5000")),
        ({"messages": [{"role": "user"}]}, ("messages.0.content", "invalid_value", "expected a string")),
        ({"mm_hashes": ["x"]}, ("mm_hashes", "invalid_value", "not supported")),
        ({"structural_tag": "x"}, ("structural_tag", "invalid_value", "guided_grammar")),
        ({"response_max_tokens": 5}, ("response_max_tokens", "invalid_value", "enable_thinking: false")),
        ({"response_max_tokens": 0, "enable_thinking": False}, ("response_max_tokens", "invalid_value", ">= 1")),
        ({"thinking_token_budget": 5}, ("reasoning_max_tokens", "invalid_value", "no known format of reasoning")),
        ({"logprobs": True, "temperature": 0.5, "top_p_normalized_logprobs": True},
         ("top_p_normalized_logprobs", "invalid_value", "temp_scaled_logprobs")),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_errors_have_the_words_that_fastdeploys_clients_read(formed, fields, error):
    body = {name: value for name, value in ({"messages": [USER]} | fields).items() if value is not None}
    reply = formed.post("/v1/chat/completions", **body)
    assert reply.status_code == 400, reply.text
    shown = reply.json()["error"]
    assert (shown["param"], shown["code"], shown["type"]) == (*error[:2], "invalid_request_error")
    assert error[2] in shown["message"]


def test_a_wrong_key_is_a_401_in_fastdeploys_words(make_stack):
    stack = make_stack(fastdeploy_form=True, keys=Keys(data=(b"key",)))
    for headers in ({}, {"Authorization": "Bearer other"}):
        reply = stack.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})


# ------------------------------------------------------------------ fields with --fastdeploy-form


def test_fields_and_models_that_nobody_knows_are_dropped(formed):
    formed.script(reply_with([97]))
    request = sent(formed, model="ernie", unknown=1, max_streaming_response_tokens=3, stop="", request_id="r")
    assert request.adapter == "" and request.request_id == "chatcmpl-r"


def test_metadata_sets_fields_that_the_body_does_not_set(formed):
    formed.script(reply_with([97]))
    metadata = {"min_tokens": 3, "temperature": 0.5, "model": "x", "other": 1}
    sampling = sent(formed, metadata=metadata, temperature=0.25, max_tokens=9).sampling
    assert (sampling.min_tokens, sampling.temperature, sampling.max_tokens) == (3, 0.25, 9)


def test_a_top_p_of_zero_leaves_the_best_token(formed):
    formed.script(reply_with([97]))
    assert sent(formed, top_p=0, temperature=0.8).sampling.top_k == 1
    assert sent(formed, top_p=0, temperature=0).sampling.temperature == 0


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "raw"),
        ({"temp_scaled_logprobs": True, "temperature": 0.5}, "temperature"),
        ({"top_p_normalized_logprobs": True, "temp_scaled_logprobs": True, "temperature": 0.5}, "processed"),
        ({"top_p_normalized_logprobs": True, "top_p": 0, "temperature": 0}, "processed"),
    ],
)
def test_logprobs_are_of_the_distribution_that_is_asked_for(formed, fields, mode):
    formed.script(reply_with([97]))
    sampling = sent(formed, logprobs=True, **fields).sampling
    assert sampling.logprobs_mode == mode
    assert sampling.top_k == (1 if fields.get("top_p") == 0 else 0)


def test_prompts_of_token_ids_and_of_raw_text_are_not_rendered(formed):
    formed.script(reply_with([97]))
    assert sent(formed, messages=[], prompt_token_ids=[5, 6]).prompt_token_ids == [5, 6]
    assert sent(formed, disable_chat_template=True).prompt_token_ids == [97]
    assert sent(formed).prompt_token_ids == [262, 97, 263]
    assert sent(formed, completion_token_ids=[7]).prompt_token_ids == [262, 97, 263, 7]
    formed.post("/v1/completions", prompt="", prompt_token_ids=[[5], [6]])
    assert {tuple(formed.engine.expect(AddRequest).prompt_token_ids) for _ in range(2)} == {(5,), (6,)}


def test_a_message_of_an_earlier_reply_may_be_sent_back_as_it_came(formed):
    formed.script(reply_with([97]))
    message = chat(formed, return_token_ids=True)["choices"][0]["message"]
    formed.engine.expect(AddRequest)
    assert sent(formed, messages=[USER, message, USER]).prompt_token_ids == [262, 97, 263, 97, 262, 97, 263]


def test_a_limit_of_reasoning_has_no_effect_on_a_model_that_does_not_reason(formed):
    formed.script(reply_with([97]))
    assert sent(formed, reasoning_max_tokens=5).sampling.reasoning_max_tokens is None


def test_a_limit_of_reasoning_reaches_the_engine_as_the_tokens_that_end_it(thinking):
    sampling = sent(thinking, reasoning_max_tokens=5).sampling
    assert (sampling.reasoning_max_tokens, sampling.reasoning_ids) == (5, (THINK, END_THINK))
    assert sampling.reasoning_end == (END_THINK,)
    args = {"thinking_budget": 3, "think_stop_sentence": "ab"}
    sampling = sent(thinking, reasoning_max_tokens=5, logits_processors_args=args).sampling
    assert (sampling.reasoning_max_tokens, sampling.reasoning_end) == (3, (97, 98, END_THINK))
    assert sent(thinking, thinking_token_budget=4).sampling.reasoning_max_tokens == 4


# ------------------------------------------------------------------ replies with --fastdeploy-form


def test_a_reply_has_tokens_and_texts_of_prompt_and_answer_if_they_are_asked_for(formed):
    formed.script(reply_with([97, 98]))
    message = chat(formed)["choices"][0]["message"]
    names = ("prompt_token_ids", "completion_token_ids", "prompt_tokens", "completion_tokens", "reasoning_content")
    assert {name: message[name] for name in names} == dict.fromkeys(names)
    message = chat(formed, return_token_ids=True)["choices"][0]["message"]
    assert (message["prompt_token_ids"], message["completion_token_ids"]) == ([262, 97, 263], [97, 98])
    assert (message["prompt_tokens"], message["completion_tokens"]) == ("<user>a<bot>", "ab")
    choice = formed.post("/v1/completions", prompt="a", return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_tokens"], choice["completion_tokens"], choice["reasoning_content"]) == ("a", "ab", None)


def test_the_first_event_has_the_prompt_and_the_others_have_tokens_and_a_time(formed):
    formed.script(reply_with([97, 98]))
    fields = {"stream": True, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    head, *others, usage = events(formed.post("/v1/chat/completions", messages=[USER], **fields))
    assert head["choices"][0]["delta"]["prompt_tokens"] == "<user>a<bot>" and head["usage"]["completion_tokens"] == 0
    deltas = [event["choices"][0]["delta"] for event in others]
    assert [delta["completion_token_ids"] for delta in deltas] == [[97], [98]]
    assert [(d["completion_tokens"], d["prompt_token_ids"], d["reasoning_content"]) for d in deltas] == [
        ("a", None, None), ("b", None, None)]  # fmt: skip
    assert others[0]["choices"][0]["arrival_time"] <= others[1]["choices"][0]["arrival_time"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2
    plain, *_ = events(formed.post("/v1/chat/completions", messages=[USER], stream=True))
    assert plain["choices"][0]["delta"] | {"prompt_token_ids": None} == plain["choices"][0]["delta"]
    head, *others = events(formed.post("/v1/completions", prompt="xy", echo=True, stream=True, return_token_ids=True))
    assert (head["choices"][0]["text"], head["choices"][0]["prompt_tokens"]) == ("", "xy")
    assert others[0]["choices"][0]["text"] == "xya"


@pytest.mark.parametrize(("fields", "counts"), [({}, [1, 1, 1]), ({"max_streaming_response_tokens": 2}, [2, 1])])
def test_an_event_has_one_token_or_as_many_as_are_asked_for(formed, fields, counts):
    """A step of several tokens is several events: clients read the first token of each, and count them."""
    formed.script(reply_with([97, 98, 99], step=3))
    fields |= {"stream": True, "return_token_ids": True, "logprobs": True}
    _, *others = events(formed.post("/v1/chat/completions", messages=[USER], **fields))
    choices = [event["choices"][0] for event in others]
    assert [len(choice["delta"]["completion_token_ids"]) for choice in choices] == counts
    assert [len(choice["logprobs"]["content"]) for choice in choices] == counts
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(counts) - 1) + ["length"]
    assert "".join(choice["delta"]["content"] for choice in choices) == "abc"


def test_usage_counts_the_tokens_of_reasoning(thinking):
    thinking.script(reply_with([THINK, 97, 98, END_THINK, 99]))
    details = chat(thinking)["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 2, "image_tokens": 0}
