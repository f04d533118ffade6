"""vLLM's adapter routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.http_calls import answer

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "policy-v1", "lora_path": "/adapters/1"}


def assert_error(reply, status: int, kind: str, *words: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (status, kind), reply.text
    assert all(word in error["message"] for word in words), reply.text


def test_a_load_answers_with_vllms_text(module_stack):
    """TRL sends exactly this body."""
    answer(module_stack, m.LoadAdapterArgs, {"lora_name": "policy-v1"})
    reply = module_stack.post(LOAD, **BODY, load_inplace=False)
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'policy-v1' added successfully.")
    assert reply.headers["content-type"].startswith("text/plain"), "AReaL reads a JSON reply as JSON"
    args = module_stack.engine.expect(m.LoadAdapterArgs).args
    assert args == m.LoadAdapterArgs("policy-v1", FolderSource("/adapters/1"), path="/adapters/1", replace=False)


def test_load_inplace_replaces_and_our_own_fields_are_passed_on(module_stack):
    answer(module_stack, m.LoadAdapterArgs)
    module_stack.post(LOAD, **BODY, load_inplace=True, version=3, kv="recompute", unheard_of=1)
    args = module_stack.engine.expect(m.LoadAdapterArgs).args
    assert (args.replace, args.version, args.kv) == (True, "3", "recompute")


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "lora_name"), ({"lora_name": "a"}, "lora_path"), ({"lora_name": "", "lora_path": "/p"}, "lora_name"),
     ({"lora_name": "a", "lora_path": ""}, "lora_path"), ({"lora_name": "tiny", "lora_path": "/p"}, "lora_name"),
     (BODY | {"is_3d_lora_weight": True}, "is_3d_lora_weight"), (BODY | {"load_inplace": "perhaps"}, "load_inplace")],
)  # fmt: skip
def test_a_missing_or_wrong_field_is_invalid_user_input(module_stack, body, field):
    reply = module_stack.post(LOAD, **body)
    assert_error(reply, 400, "InvalidUserInput", field)
    assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [("adapter_loaded", 400, "InvalidUserInput"), ("weight_update_refused", 400, "BadRequestError"),
     ("model_not_found", 404, "NotFoundError"), ("update_in_progress", 409, "control_error"),
     ("engine_error", 500, "engine_error")],
)  # fmt: skip
def test_a_refusal_has_the_status_and_the_type_of_vllm(module_stack, code, status, kind):
    answer(module_stack, m.LoadAdapterArgs, failure=m.Failure(code, "told so"))
    assert_error(module_stack.post(LOAD, **BODY), status, kind, "told so")


def test_unload_answers_with_vllms_text(module_stack):
    answer(module_stack, m.UnloadAdapterArgs, {"lora_name": "policy-v1"})
    reply = module_stack.post(UNLOAD, lora_name="policy-v1")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'policy-v1' removed successfully.")
    assert module_stack.engine.expect(m.UnloadAdapterArgs).args == m.UnloadAdapterArgs("policy-v1")
    for body in ({}, {"lora_name": ""}, {"lora_name": None}):
        assert_error(module_stack.post(UNLOAD, **body), 400, "InvalidUserInput", "lora_name")
    answer(module_stack, m.UnloadAdapterArgs, failure=m.Failure("model_not_found", "there is no adapter 'x'"))
    assert_error(module_stack.post(UNLOAD, lora_name="x"), 404, "NotFoundError", "'x'")


def test_server_info_has_the_fields_that_trl_checks_before_it_sends_adapters(stack):
    """TRL publishes merged weights where lora_config is null, or where there is more than one replica. It stops where
    max_lora_rank is below its rank, or where max_loras is below its staleness + 2."""
    answer(stack, m.WeightInfoArgs, {"version": "v1"})
    stack.server.client.model_info |= {"max_lora_rank": 64, "max_waiting": 16384}
    config = stack.http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["lora_config"]["max_lora_rank"] == 64
    assert config["lora_config"]["max_loras"] == 16384
    assert config["parallel_config"]["data_parallel_size"] == 1
