"""TRL: the tests of its client of a server of vLLM."""

from __future__ import annotations

from frameworks.own_tests import Suite

TESTS = "tests/test_vllm_client_server.py"
SUITE = Suite(
    name="trl",
    tests=(f"{TESTS}::TestVLLMClientServer", f"{TESTS}::TestVLLMClientServerBaseURL"),
    plugin="trl_served",
    own_mock=False,
    path=(),
    environment={"PYTHONSAFEPATH": "1"},
    not_applicable={
        "*::test_update_model_params": "sends weights over NCCL; this device has no such group",
        "*::test_chat_with_tools": "expects the tools in the prompt; the chat template that serves has none",
    },
)
