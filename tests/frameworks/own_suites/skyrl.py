"""SkyRL: its client of inference servers, and its router tests."""

from __future__ import annotations

from frameworks.own_tests import Suite

SUITE = Suite(
    name="skyrl",
    tests=("tests/backends/skyrl_train/inference_servers/test_remote_inference_client.py",),
    plugin="skyrl_served",
    path=("", "skyrl-gym"),
)
