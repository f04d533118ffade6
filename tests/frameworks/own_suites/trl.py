"""TRL: its tests of its VLLMClient."""

from __future__ import annotations

from frameworks.own_tests import Suite

NCCL = "sends weights over NCCL; this device has no such group"
PARALLEL = "the same tests against a server of two GPUs; one of them is enough here"
SUITE = Suite(
    name="trl",
    tests=("tests/test_vllm_client_server.py",),
    plugin="trl_served",
    path=(),
    not_applicable={
        "*::test_update_model_params": NCCL,
        "TestVLLMClientServerDeviceParameter::*": NCCL,
        "TestVLLMClientServerVLM::*": "sends images",
        "*::test_chat_with_tools": "compares the prompt with the tools of Qwen's template; the embedded one has none",
    },
    own_mock=False,
)
