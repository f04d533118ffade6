"""Numbers and texts beyond any limit: every route answers a 4xx that names the field, and never a 500."""

from __future__ import annotations

import json

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.weight_source import SourcePolicy
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with

COMPLETION = ("n", "max_tokens", "min_tokens", "seed", "top_k", "priority", "logprobs", "first_choice", "prompt",
              "resumed_tokens", "prompt_logprobs", "stop_token_ids", "deadline_s", "retain_s")  # fmt: skip
NUMBERS = {
    "/v1/completions": ({"prompt": [1, 2], "max_tokens": 1}, COMPLETION),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}]}, ("top_logprobs", "seed")),
    "/generate": ({"input_ids": [1], "return_logprob": True}, ("input_ids", "logprob_start_len", "top_logprobs_num")),
    "/inference/v1/generate": ({"token_ids": [1, 2], "sampling_params": {}}, ("token_ids",)),
    "/v1/pause": ({}, ("timeout_s",)),
    "/v1/sleep": ({}, ("timeout_s",)),
    "/v1/update_weights": ({"shared_memory": "s"}, ("nbytes", "timeout_s")),
    "/v1/weights/begin": ({}, ("lease_s", "timeout_s")),
    "/v1/weights/chunk": ({"session_id": "s", "shared_memory": "x"}, ("nbytes",)),
    "/start_weight_update": ({}, ("lease_s",)),
    "/sleep": ({}, ("level",)),
    "/detokenize": ({}, ("tokens",)),
    "/finish_session": ({}, ("session_id",)),
    "/pull_weights": ({"local_checkpoint_dir": "/a", "source_dir": "/b"}, ("target_version",)),
    "/fetch_weights": ({"sync_dir": "/b"}, ("target_version",)),
    "/v1/adapters/load": ({"lora_name": "a", "shared_memory": "s", "config": {}}, ("nbytes", "timeout_s", "lora_name")),
    "/v1/adapters/unload": ({}, ("lora_name",)),
    "/v1/load_lora_adapter": ({"lora_path": "/a"}, ("lora_name",)),
    "/skyrl/v1/load_lora_adapter": ({"lora_path": "/a"}, ("lora_name",)),
    "/skyrl/v1/abort_lora_requests": ({}, ("lora_name",)),
    "/load_lora_adapter": ({"lora_name": "a"}, ("lora_path",)),
    "/load_lora_adapter_from_tensors": ({"lora_name": "a"}, ("config_dict",)),
}
PATHS = {
    "/v1/update_weights": ({}, ("model_path", "shared_memory")),
    "/v1/weights/chunk": ({"session_id": "s"}, ("model_path", "shared_memory")),
    "/update_weights_from_disk": ({}, ("model_path",)),
    "/areal_update_weights": ({}, ("model_path",)),
    "/pull_weights": ({"target_version": 1, "source_dir": "/b"}, ("local_checkpoint_dir",)),
    "/v1/adapters/load": ({"lora_name": "a", "config": {}}, ("shared_memory",)),
    **dict.fromkeys(
        ("/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/load_lora_adapter"),
        ({"lora_name": "a"}, ("lora_path",)),
    ),
}
NAMES = {
    "/v1/pause": "hold_id",
    "/v1/resume": "hold_id",
    "/v1/weights/commit": "session_id",
    "/v1/weights/abort": "session_id",
    "/v1/reset": "version",
    "/v1/completions": "request_id",
    "/set_weight_version": "new_version",
    "/v1/adapters/load": "lora_name",
    "/v1/adapters/unload": "lora_name",
    "/v1/load_lora_adapter": "lora_name",
    "/skyrl/v1/abort_lora_requests": "lora_name",
    "/load_lora_adapter": "lora_name",
    "/generate": "lora_path",
    "/v1/chat/completions": "model",
}
OTHERS = {"prompt": "[1]", "input_ids": "[1]", "lora_path": '"/a"', "messages": '[{"role": "user", "content": "a"}]'}


@pytest.fixture(scope="module")
def server(make_module_stack):
    """A stack whose engine checks sources as a real engine does, and answers other calls at once."""
    stack = make_module_stack(pull_root="/dev/shm", model_roots=("/",))
    stack.script(reply_with([5]))
    stack.engine.replies = dict.fromkeys(CALLS, answer)
    return stack


CALLS = (m.PauseArgs, m.ResumeArgs, m.SleepArgs, m.UpdateWeightsArgs, m.BeginUpdateArgs, m.UpdatePartArgs,
         m.LoadAdapterArgs, m.UnloadAdapterArgs, m.AbortArgs, m.CommitUpdateArgs, m.AbortUpdateArgs, m.ResetArgs,
         m.SetVersionArgs, m.WeightInfoArgs)  # fmt: skip


def answer(call: m.Call) -> m.Reply:
    if isinstance(call.args, m.WeightInfoArgs):
        return m.Reply(call.call_id, {"session": None, "asleep": []})
    try:
        field = "lora_path" if isinstance(call.args, m.LoadAdapterArgs) else "model_path"
        if (source := getattr(call.args, "source", None)) is not None:
            SourcePolicy(("/",), "").check(source, field)
    except InvalidField as error:
        return m.Reply(call.call_id, {}, m.Failure(error.code, error.message, error.detail))
    return m.Reply(call.call_id, {}, m.Failure("wrong_order", "not now"))


@pytest.mark.parametrize("value", ["1" + "0" * 22, "-1" + "0" * 22, "9" * 5000], ids=lambda v: v[:12])
@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_beyond_64_bits_causes_no_500(server, path, value):
    body, fields = NUMBERS[path]
    for field in fields:
        raw = json.dumps({k: v for k, v in body.items() if k != field})[:-1]
        content = f'{raw}{", " if len(raw) > 1 else ""}"{field}": {value}}}'
        reply = server.http.post(path, content=content)
        assert reply.status_code < 500, (field, reply.text)
        assert len(reply.text) < 3000, field
        if value.startswith("10") and field not in ("session_id", "logprob_start_len"):
            named = reply.json()["error"]["message"].partition(":")[0]
            words = set(named.replace(".", "_").split("_"))
            assert reply.status_code == 400 and words & set(field.split("_")), reply.text
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("value", ["", "a\\u0000b", "/" + "x" * 5000, "\\ud800", "\\udc80x"], ids=lambda v: v[:8])
@pytest.mark.parametrize("path", PATHS)
def test_an_impossible_path_is_a_400_that_names_the_field(server, path, value):
    body, fields = PATHS[path]
    for field in fields:
        raw = json.dumps(body)[:-1]
        reply = server.http.post(path, content=f'{raw}{", " if body else ""}"{field}": "{value}"}}')
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] in (field, "body"), reply.text
        assert len(reply.text) < 3000


@pytest.mark.parametrize("value", ["\\ud800", "x" * 100_000, "a\\u0000b", "\\u2028"], ids=lambda v: v[:8])
@pytest.mark.parametrize("path", NAMES)
def test_an_odd_name_causes_no_500_and_is_not_repeated_at_length(server, path, value):
    fields = ", ".join(f'"{name}": {others}' for name, others in OTHERS.items() if name != NAMES[path])
    reply = server.http.post(path, content=f'{{"{NAMES[path]}": "{value}", {fields}}}'.encode())
    assert reply.status_code < 500 and len(reply.text) < 3000, reply.text[:300]


@pytest.mark.parametrize("path", ["/v1/adapters/load", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter",
                                  "/load_lora_adapter", "/unload_lora_adapter", "/v1/unload_lora_adapter",
                                  "/skyrl/v1/abort_lora_requests"])  # fmt: skip
def test_a_wrong_adapter_name_is_a_400_that_names_the_field(server, path):
    for value in (None, 5, 1.5, True, [], {}, ["a"], "", "x" * 10_000_000):
        reply = server.post(path, lora_name=value, lora_path="/a")
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "lora_name"), reply.text[:300]
        assert len(reply.text) < 3000


@pytest.mark.parametrize("config", [5, "x", [], [[]], "[]", {"r": 10**30}, {"a": "\ud800"}, {"a": ["\udc80"]}])
def test_a_config_that_is_no_object_of_json_is_a_400(server, config):
    for path, body in (
        ("/v1/adapters/load", {"shared_memory": "s", "config": config}),
        ("/load_lora_adapter_from_tensors", {"config_dict": config}),
    ):
        reply = server.http.post(path, content=json.dumps({"lora_name": "a", **body}).encode())
        assert (reply.status_code, reply.json()["error"]["param"]) in (
            (400, "config"), (400, "config_dict"), (400, "body"),
        ), reply.text[:300]  # fmt: skip
