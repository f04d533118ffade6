"""Replies with the routing of tokens, on each route as its callers ask and look for it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from fastdeploy.client import generation
from fastdeploy.client.request_stream import joined
from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import one_output, replace
from support.http_calls import events, refused

INFO = ExpertsInfo(layers=(1, 2), num_layers=3, num_experts=4, top_k=2)
EXPERTS = {"experts": msgspec.to_builtins(INFO), "routed_experts": True}
PROMPT, ANSWER = [1, 2, 3], [97, 98, 99]
CHAT = {"messages": [{"role": "user", "content": "a"}]}
LIMIT = {"max_tokens": 3}


def row(position: int) -> list[list[int]]:
    """Return the experts of the token at a position in the three layers. The first one has none."""
    return [[0, 0], [position % 4, (position + 1) % 4], [3, position % 3]]


def rows(start: int, stop: int) -> list:
    return [row(position) for position in range(start, stop)]


def answer(add: AddRequest) -> list[m.Output]:
    """Answer each choice with three tokens, and with the rows that the request asks for."""
    outputs, start = [], add.sampling.routed_experts_start
    for choice in range(add.n):
        for i, token in enumerate(ANSWER):
            first, end = (start if i == 0 else len(add.prompt_token_ids) + i - 1), len(add.prompt_token_ids) + i
            ids = np.array(rows(first, end), np.uint8).reshape(-1, 3, 2)[:, 1:]
            routed = ids.tobytes() if add.sampling.routed_experts else b""
            outputs.append(replace(one_output(add, choice, [token], i), routed=routed))
        outputs[-1] = replace(outputs[-1], finish_reason="length")
    return outputs


@pytest.fixture(scope="module")
def of_format(make_module_stack):
    """Return the stack whose server has a value of --routed-experts-format."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = make_module_stack(routed_experts_format=name, engine={"model_info": EXPERTS, "script": answer})
        return made[name]

    return get


@pytest.fixture
def vllm(of_format):
    return of_format("vllm")


def choice_of(reply: httpx.Response, index: int = 0) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][index]


def npy(value: str) -> list:
    return np.load(io.BytesIO(base64.b64decode(value)), allow_pickle=False).tolist()


def int32(value: str) -> list:
    return np.frombuffer(base64.b64decode(value), np.int32).reshape(-1, 3, 2).tolist()


def of_layers(value: dict[str, Any]) -> list:
    """Return the rows of an object that has a type and a shape."""
    return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"]).tolist()


def generate(stack, sampling: dict[str, Any] = LIMIT, path: str = "/inference/v1/generate", **body) -> httpx.Response:
    return stack.post(path, token_ids=PROMPT, sampling_params=sampling, **body)


def complete(stack, **body) -> httpx.Response:
    return stack.post("/v1/completions", **({"prompt": PROMPT} | LIMIT | body))


# ---------------------------------------------------------------------- vLLM and prime-rl: not asked for


def test_vllms_callers_get_the_routing_without_asking(vllm):
    assert npy(choice_of(complete(vllm))["routed_experts"]) == rows(0, 5)
    assert npy(choice_of(generate(vllm))["routed_experts"]) == rows(0, 5)
    chat = vllm.post("/v1/chat/completions", **CHAT, **LIMIT, return_token_ids=True).json()
    tokens = len(chat["prompt_token_ids"]) + 3
    assert npy(chat["choices"][0]["routed_experts"]) == rows(0, tokens - 1)


def test_each_choice_of_each_prompt_has_its_rows_and_those_of_its_prompt(vllm):
    choices = complete(vllm, prompt=[PROMPT, [7]], n=2).json()["choices"]
    assert [npy(choice["routed_experts"]) for choice in choices] == [rows(0, 5)] * 2 + [rows(0, 3)] * 2


@pytest.mark.parametrize("name", ["routed_experts_start", "routed_experts_prompt_start", "routed_experts_start_len"])
@pytest.mark.parametrize("asks", [{}, {"routed_experts": True}, {"return_routed_experts": True}])
def test_each_name_of_the_first_row_is_understood_in_each_form(vllm, asks, name):
    vllm.engine.seen.queue.clear()
    complete(vllm, **asks, **{name: 2})
    sampling = vllm.engine.expect(AddRequest).sampling
    assert sampling.routed_experts and sampling.routed_experts_start == 2


@pytest.mark.parametrize("start", [1, 3])
def test_vllms_callers_name_the_first_row(vllm, start):
    asked = {"routed_experts_prompt_start": start}
    assert npy(choice_of(complete(vllm, **asked))["routed_experts"]) == rows(start, 5)
    assert npy(choice_of(generate(vllm, LIMIT | asked))["routed_experts"]) == rows(start, 5)


def test_the_last_event_of_a_choice_has_the_rows_of_the_whole_choice(vllm):
    for reply in (generate(vllm, stream=True), complete(vllm, stream=True, n=2)):
        shown = [event["choices"][0] for event in events(reply)[:-1]]
        ended = [choice for choice in shown if choice["finish_reason"]]
        assert [npy(choice["routed_experts"]) for choice in ended] == [rows(0, 5)] * len(ended) != []
        assert not any("routed_experts" in choice for choice in shown if not choice["finish_reason"])


def test_prime_rl_reads_an_object_with_the_base64_text_first(of_format):
    stack = of_format("prime-rl")
    reply = generate(stack, LIMIT | {"routed_experts_prompt_start": 2})
    assert b'"routed_experts":{"data":"' in reply.content
    value = choice_of(reply)["routed_experts"]
    assert of_layers(value) == rows(2, 5) and (value["start"], value["dtype"]) == (2, "uint8")
    assert of_layers(choice_of(complete(stack))["routed_experts"]) == rows(0, 5)


@pytest.mark.parametrize("field", ["routed_experts", "return_routed_experts"])
def test_a_request_can_do_without(vllm, field):
    vllm.engine.seen.queue.clear()
    assert "routed_experts" not in choice_of(complete(vllm, **{field: False}))
    assert not vllm.engine.expect(AddRequest).sampling.routed_experts


def test_a_server_that_returns_only_what_requests_ask_for(of_format):
    stack = of_format("none")
    assert "routed_experts" not in choice_of(complete(stack)) and "routed_experts" not in choice_of(generate(stack))
    assert of_layers(choice_of(complete(stack, routed_experts=True))["routed_experts"])


# ---------------------------------------------------------------------- SGLang


def sglang(stack, **body) -> httpx.Response:
    return stack.post("/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 3}, **body)


@pytest.mark.parametrize("start", [0, 2, 3])
def test_sglangs_callers_find_the_rows_in_meta_info(vllm, start):
    """slime and miles count (tokens - 1 - start) x layers of the model x top_k."""
    meta = sglang(vllm, return_routed_experts=True, routed_experts_start_len=start).json()["meta_info"]
    assert int32(meta["routed_experts"]) == rows(start, 5) and meta["routed_experts_start_len"] == start
    assert "routed_experts" not in sglang(vllm).json()["meta_info"], "slime would take rows that it did not ask for"


def test_the_last_event_of_sglangs_stream_has_them(vllm):
    metas = [event["meta_info"] for event in events(sglang(vllm, return_routed_experts=True, stream=True))[:-1]]
    assert [int32(meta["routed_experts"]) for meta in metas if "routed_experts" in meta] == [rows(0, 5)]
    assert "routed_experts" in metas[-1]


def test_each_prompt_of_a_batch_has_its_rows(vllm):
    body = {"input_ids": [PROMPT, [7]], "sampling_params": {"max_new_tokens": 3}, "return_routed_experts": True}
    metas = [output["meta_info"] for output in vllm.post("/generate", **body).json()]
    assert [int32(meta["routed_experts"]) for meta in metas] == [rows(0, 5), rows(0, 3)]


def test_openai_routes_have_them_in_sgl_ext_if_the_request_asks_as_sglangs_callers_do(vllm):
    asked = {"return_routed_experts": True, "routed_experts_start_len": 1}
    choice = choice_of(complete(vllm, **asked))
    assert int32(choice["sgl_ext"]["routed_experts"]) == rows(1, 5) and "routed_experts" not in choice
    choice = choice_of(vllm.post("/v1/chat/completions", **CHAT, **LIMIT, **asked, return_meta_info=True))
    meta = choice["meta_info"]
    tokens = meta["prompt_tokens"] + meta["completion_tokens"]
    assert int32(meta["routed_experts"]) == rows(1, tokens - 1) and meta["routed_experts_start_len"] == 1
    assert "sgl_ext" not in choice and "routed_experts" not in choice


def test_server_info_tells_slime_whether_there_is_routing(vllm, module_stack):
    for stack, expected in ((vllm, True), (module_stack, False)):
        stack.engine.replies[m.WeightInfoArgs] = lambda call: m.Reply(call.call_id, {"version": "v"})
        assert stack.http.get("/server_info").json()["enable_return_routed_experts"] is expected


# ---------------------------------------------------------------------- SkyRL, NeMo-RL, our own


@pytest.mark.parametrize("name", ["vllm", "none"])
def test_skyrl_reads_its_form_whatever_the_form_of_the_server(of_format, name):
    value = choice_of(generate(of_format(name), path="/skyrl/v1/generate"))["routed_experts"]
    assert list(value) == ["data", "shape", "dtype"] and of_layers(value) == rows(0, 5)


@pytest.mark.parametrize("start", [0, 2, 3])
def test_skyrl_names_the_first_row_as_vllms_callers_do(vllm, start):
    named = LIMIT | {"routed_experts_prompt_start": start}
    value = choice_of(generate(vllm, named, path="/skyrl/v1/generate"))["routed_experts"]
    assert of_layers(value) == rows(start, 5)
    assert of_layers(choice_of(complete(vllm, routed_experts=True, **named))["routed_experts"]) == [
        layers[1:] for layers in rows(start, 5)
    ]


def test_nemo_rl_reads_an_envelope_in_the_message_of_a_chat(of_format):
    chat = of_format("nemo-rl").post("/v1/chat/completions", **CHAT, **LIMIT, return_token_ids=True).json()
    tokens = len(chat["prompt_token_ids"]) + 3
    [choice] = chat["choices"]
    magic, dtype, shape, data = choice["message"]["routed_experts"].split(":", 3)
    assert (magic, dtype, shape) == ("nrlre1", "int8", f"{tokens}x3x2") and "routed_experts" not in choice
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(tokens, 3, 2)
    assert array.tolist() == [*rows(0, tokens - 1), [[0, 1]] * 3], "NeMo Gym wants a row for each token"


def test_our_own_form_has_the_layers_with_experts(vllm):
    value = choice_of(complete(vllm, routed_experts=True, routed_experts_start=2))["routed_experts"]
    assert of_layers(value) == [r[1:] for r in rows(2, 5)] and value["start"] == 2
    assert (value["layers"], value["num_layers"], value["num_experts"]) == ([1, 2], 3, 4)


def test_each_event_in_our_own_form_has_the_rows_that_are_new(vllm):
    """A stream that breaks off has lost no row of the tokens that came."""
    reply = complete(vllm, routed_experts=True, routed_experts_start=1, stream=True)
    seen, end = [], 1
    for event in events(reply)[:-1]:
        [choice] = event["choices"]
        value = choice["routed_experts"]
        assert value["start"] == end
        seen, end = seen + of_layers(value), end + value["shape"][0]
    assert seen == [r[1:] for r in rows(1, 5)]


# ---------------------------------------------------------------------- refusals, and answers without rows


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/v1/completions", {"prompt": PROMPT, "routed_experts": True}, "routed_experts"),
    ("/v1/chat/completions", CHAT | {"return_routed_experts": True}, "return_routed_experts"),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"routed_experts": True}}, "routed_experts"),
    ("/generate", {"input_ids": PROMPT, "return_routed_experts": True}, "return_routed_experts"),
])  # fmt: skip
def test_a_server_without_the_flag_refuses_and_names_it(module_stack, path, body, field):
    refused(module_stack.post(path, **body), field, "--enable-return-routed-experts")


def test_a_server_without_the_flag_takes_what_vllms_callers_always_send(module_stack):
    module_stack.script(answer)
    choice = choice_of(generate(module_stack, LIMIT | {"routed_experts_prompt_start": 99}))
    assert choice["token_ids"] == ANSWER and "routed_experts" not in choice
    assert choice_of(generate(module_stack, path="/skyrl/v1/generate"))["routed_experts"] is None


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/v1/completions", {"prompt": PROMPT, "routed_experts_prompt_start": 4}, "routed_experts_prompt_start"),
    ("/v1/completions", {"prompt": PROMPT, "routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
    ("/v1/completions", {"prompt": PROMPT, "routed_experts": True, "routed_experts_start": 4}, "routed_experts_start"),
    ("/v1/completions", {"prompt": PROMPT, "routed_experts": 3}, "routed_experts"),
    ("/skyrl/v1/generate", {"token_ids": PROMPT, "sampling_params": {"routed_experts_prompt_start": 4}},
     "routed_experts_prompt_start"),
    ("/v1/completions", {"prompt": PROMPT, "return_routed_experts": True, "routed_experts_start_len": 4},
     "routed_experts_start_len"),
    ("/generate", {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": 4},
     "routed_experts_start_len"),
    ("/generate", {"input_ids": PROMPT, "return_routed_experts": [True]}, "return_routed_experts"),
    ("/generate", {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": "a"},
     "routed_experts_start_len"),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_name(vllm, path, body, field):
    refused(vllm.post(path, **body), field)


def test_a_request_ends_when_it_has_too_many_rows(vllm, monkeypatch):
    size = 2 * 5 * INFO.row_bytes
    monkeypatch.setattr(generation, "MAX_ROUTED_BYTES", size)
    assert choice_of(complete(vllm, n=2), 1)["routed_experts"]
    monkeypatch.setattr(generation, "MAX_ROUTED_BYTES", size - 1)
    refused(complete(vllm, n=2), "routed_experts")
    assert choice_of(complete(vllm, n=2, routed_experts=False))["finish_reason"] == "length"


def test_an_abort_before_the_first_token_leaves_no_rows(vllm):
    """AReaL takes an answer without them, and counts the rows of any other."""
    vllm.script(lambda add: [m.Output(request_id=add.request_id, choice=0, token_ids=[], finish_reason="abort")])
    try:
        meta = sglang(vllm, return_routed_experts=True).json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and "routed_experts" not in meta
        assert "routed_experts" not in choice_of(complete(vllm))
        assert choice_of(generate(vllm, path="/skyrl/v1/generate"))["routed_experts"] is None
    finally:
        vllm.script(answer)


def test_a_stop_string_cuts_the_rows_with_the_tokens(vllm):
    """Also if the tokens behind it come in the same output."""
    vllm.script(lambda add: [replace(joined(answer(add))[0], finish_reason="length")])
    try:
        choice = choice_of(complete(vllm, stop=["b"], return_token_ids=True))
    finally:
        vllm.script(answer)
    assert choice["token_ids"] == [97, 98] and npy(choice["routed_experts"]) == rows(0, 4)


def test_agents_get_the_routing_only_if_they_ask(vllm):
    path = "/sessions/routing/v1/chat/completions"
    assert "routed_experts" not in choice_of(vllm.post(path, **CHAT, **LIMIT))
    assert choice_of(vllm.post(path, **CHAT, **LIMIT, routed_experts=True))["routed_experts"]["layers"] == [1, 2]
    turns = vllm.http.get("/sessions/routing").json()
    assert "routed_experts" not in json.dumps(turns)
