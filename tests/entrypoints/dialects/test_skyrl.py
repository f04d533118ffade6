"""SkyRL's own routes over real HTTP, before a scripted engine. Its weight sync is in test_vllm_weights."""

from __future__ import annotations

import pytest


def test_no_adapter_runs_so_that_none_of_its_requests_is_aborted(module_stack):
    reply = module_stack.post("/skyrl/v1/abort_lora_requests", lora_name="mine")
    assert reply.json() == {"status": "ok", "aborted": [], "count": 0}
    assert module_stack.engine.seen.empty()


@pytest.mark.parametrize("body", [{}, {"lora_name": ""}, {"lora_name": None}])
def test_an_abort_that_names_no_adapter_is_refused(module_stack, body):
    reply = module_stack.post("/skyrl/v1/abort_lora_requests", **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "lora_name"


def test_routed_experts_are_refused_by_name(module_stack):
    reply = module_stack.post("/skyrl/v1/generate", token_ids=[1], sampling_params={})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("return_routed_experts")
