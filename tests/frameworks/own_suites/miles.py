"""miles: its groups of engines, which are actors of Ray."""

from __future__ import annotations

from frameworks.own_tests import Suite

SUITE = Suite(
    name="miles",
    tests=("tests/fast/ray/rollout/real_ray", "tests/fast/utils/test_utils/test_mock_sglang_engine.py"),
    plugin="miles_served",
    environment={"PYTEST_PLUGINS": "miles_stand_ins"},
)
