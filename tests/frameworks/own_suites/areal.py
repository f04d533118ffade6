"""AReaL: its engines of inference, which the tests start as SGLang or vLLM."""

from __future__ import annotations

from frameworks.own_tests import Suite

SUITE = Suite(
    name="areal",
    tests=("tests/test_inference_engines.py",),
    plugin="areal_served",
    own_mock=False,
    not_applicable={
        "*::test_disk_update_weights_from_fsdp_engine*": "its trainer asks for FlashAttention 2, which needs CUDA",
    },
)
