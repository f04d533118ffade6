"""SkyRL: the tests of its client of inference servers."""

from __future__ import annotations

from frameworks.own_tests import Suite

WORDS = "compares the reply with tokens, numbers or words that the mock makes up"
IMAGES = "sends images or their features"
NCCL = "sends weights over NCCL; this device has no such group"
FOLDER = "names a folder of an adapter that does not exist"
SUITE = Suite(
    name="skyrl",
    tests=("tests/backends/skyrl_train/inference_servers/test_remote_inference_client.py",),
    plugin="skyrl_served",
    path=("", "skyrl-gym"),
    not_applicable={
        "TestDataPlane::test_generate": "expects the end by itself within 100 tokens, of prompts that mean nothing",
        "TestDataPlane::test_generate_decodes_packed_routed_experts": WORDS,
        "TestDataPlane::test_tokenize": WORDS,
        "TestDataPlane::test_detokenize": WORDS,
        "TestControlPlane::test_reset_prefix_cache": WORDS,
        "TestRenderChatCompletion::test_render_chat_completion_basic": WORDS,
        "TestExplicitModelRequired::test_render_chat_completion_[ud]*": "expects a made-up name of a model back",
        "TestServerInfo::test_get_world_size": WORDS,
        "TestSample::test_sample": WORDS,
        "TestSample::test_sample_n2": WORDS,
        "TestSample::test_sample_topk_*": WORDS,
        "TestSample::test_sample_with_image*": IMAGES,
        "TestRenderChatCompletion::test_render_chat_completion_multimodal": IMAGES,
        "TestMultiModalGeneration::*": IMAGES,
        "TestLoRAControlPlane::test_load_lora_adapter_*": FOLDER,
        "TestLoRAControlPlane::test_unload_lora_adapter_*": FOLDER,
        "TestWeightSync::test_init_weight_update_communicator": NCCL,
        "TestWeightSync::test_update_named_weights": NCCL,
        "TestWeightSync::test_fetch_weights": "names a cloud address; a server with --pull-root takes folders",
    },
)
