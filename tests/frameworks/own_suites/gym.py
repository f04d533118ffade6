"""NeMo-Gym: its model server for vLLM."""

from __future__ import annotations

from frameworks.own_tests import Suite

SUITE = Suite(
    name="gym",
    tests=("responses_api_models/vllm_model/tests",),
    plugin="gym_served",
    flags=("--tool-call-parser", "hermes"),
)
