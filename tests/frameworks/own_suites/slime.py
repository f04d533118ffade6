"""slime: its rollouts of agents, whose tokens come from SGLang's /generate."""

from __future__ import annotations

from frameworks.own_tests import Suite

SUITE = Suite(name="slime", tests=("-p", "no:schemathesis", "tests/test_agent"), plugin="slime_served")
