"""SkyRL's own routes over real HTTP, before a scripted engine. SkyRL's weight sync is in test_vllm_weights."""

from __future__ import annotations

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import answer, refused


def test_load_answers_with_the_number_of_the_adapter_which_a_reload_keeps(module_stack):
    for epoch in (1, 2):
        answer(module_stack, m.LoadAdapterArgs, {"lora_name": "a", "lora_int_id": 7, "adapter_epoch": epoch})
        reply = module_stack.post("/skyrl/v1/load_lora_adapter", lora_name="a", lora_path="/adapters/a")
        assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
        told = {"status": "ok", "lora_name": "a", "lora_int_id": 7, "adapter_epoch": epoch}
        assert reply.json() == told
        args = module_stack.engine.expect(m.LoadAdapterArgs).args
        assert args == m.LoadAdapterArgs("a", FolderSource("/adapters/a"), path="/adapters/a")
        assert args.replace, "SkyRL loads a new policy under the same name"


def test_the_error_of_a_load_is_json(module_stack):
    """SkyRL's client reads the body of an error as JSON."""
    answer(module_stack, m.LoadAdapterArgs, failure=m.Failure("weight_update_refused", "use_dora: not supported"))
    reply = module_stack.post("/skyrl/v1/load_lora_adapter", lora_name="a", lora_path="/adapters/a")
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "use_dora: not supported")
    refused(module_stack.post("/skyrl/v1/load_lora_adapter", lora_name="a"), "lora_path")


def test_an_abort_by_adapter_answers_with_the_ids(module_stack):
    aborted = [{"request_id": "r1", "output_token_count": 3}, {"request_id": "r2", "output_token_count": 0}]
    answer(module_stack, m.AbortArgs, {"aborted": aborted, "not_found": []})
    reply = module_stack.post("/skyrl/v1/abort_lora_requests", lora_name="a").json()
    assert (reply["status"], reply["aborted"], reply["count"]) == ("ok", ["r1", "r2"], 2)
    assert module_stack.engine.expect(m.AbortArgs).args == m.AbortArgs(lora_name="a")


@pytest.mark.parametrize("body", [{}, {"lora_name": ""}, {"lora_name": None}])
def test_an_abort_that_names_no_adapter_is_refused(module_stack, body):
    refused(module_stack.post("/skyrl/v1/abort_lora_requests", **body), "lora_name")


def test_the_model_name_default_means_the_model_that_serves(stack):
    """SkyRL's client sends "default" unless its user configures a name."""
    stack.script(reply_with(list(b"hey")))
    body = {"model": "default", "token_ids": [1], "sampling_params": {"max_tokens": 3}}
    assert stack.post("/inference/v1/generate", **body).json()["choices"][0]["token_ids"] == list(b"hey")
    assert stack.post("/detokenize", model="default", tokens=list(b"hey")).json() == {"prompt": "hey"}
    assert stack.engine.expect(AddRequest).adapter == ""
    assert stack.post("/inference/v1/generate", **body | {"model": "other"}).status_code == 404


def rpc(stack, method: str, **kwargs):
    return stack.post("/collective_rpc", method=method, kwargs=kwargs)


@pytest.mark.parametrize(("offload_kv", "tags"), [(True, ("weight",)), (False, ("weight", "kv_cache"))])
def test_sleep_for_a_weight_sync_keeps_the_kv_that_skyrl_wants_kept(stack, offload_kv, tags):
    answer(stack, m.SleepArgs, {"asleep": sorted(tags)})
    assert rpc(stack, "skyrl_sleep_for_weight_sync", offload_kv=offload_kv).status_code == 200
    args = stack.engine.expect(m.SleepArgs).args
    assert (args.tags, args.mode, args.discard) == (tags, "keep", False), "a sync that fails leaves the old weights"


def test_wake_for_a_weight_sync_skips_tags_that_do_not_sleep(stack):
    for asleep, tags, woken in ((["weight"], ["weights"], ("weight",)), ([], ["kv_cache"], None)):
        answer(stack, m.WeightInfoArgs, {"asleep": asleep})
        answer(stack, m.WakeArgs, {"asleep": []})
        reply = rpc(stack, "skyrl_wake_for_weight_sync", tags=tags)
        assert reply.status_code == 200 and reply.json()["results"][0]["asleep"] == []
        assert stack.engine.expect(m.WeightInfoArgs)
        assert woken is None or stack.engine.expect(m.WakeArgs).args.tags == woken
    assert stack.engine.seen.empty()


@pytest.mark.parametrize(
    ("method", "kwargs", "field"),
    [("skyrl_wake_for_weight_sync", {"tags": ["disk"]}, "tags"), ("skyrl_wake_for_weight_sync", {}, "tags"),
     ("skyrl_sleep_for_weight_sync", {"offload": True}, "offload")],
)  # fmt: skip
def test_memory_calls_are_refused_by_the_name_of_the_wrong_field(module_stack, method, kwargs, field):
    refused(rpc(module_stack, method, **kwargs), field)
