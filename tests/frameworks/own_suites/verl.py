"""verl: its tests of agent loops and of the client of rollout servers that run without a GPU."""

from __future__ import annotations

from frameworks.own_tests import Suite

AGENT_LOOP, ROLLOUT = "tests/experimental/agent_loop/", "tests/workers/rollout/"
SUITE = Suite(
    name="verl",
    tests=(
        AGENT_LOOP + "test_agent_loop_extra_fields_schema_on_cpu.py",
        AGENT_LOOP + "test_call_tool_on_cpu.py",
        AGENT_LOOP + "test_tool_call_id_on_cpu.py",
        ROLLOUT + "test_llm_server_response_length_cap_on_cpu.py",
        ROLLOUT + "test_llm_server_routed_experts_on_cpu.py",
    ),
    plugin="verl_served",
)
