"""prime-rl: its orchestrator, and the client by which it asks an engine."""

from __future__ import annotations

from frameworks.own_tests import Suite

SUITE = Suite(
    name="prime_rl",
    tests=("tests/unit/orchestrator", "tests/unit/utils"),
    plugin="prime_rl_served",
    path=("", "src", "packages/prime-rl-configs/src"),
    environment={"PYTEST_PLUGINS": "prime_rl_stand_ins"},
)
