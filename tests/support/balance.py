"""Distribution of the tests among the processes of `make test`: by file, the longest first."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling

# All of e2e goes to one process, since its tests share servers that take seconds to start.
LONGEST = (
    "tests/e2e/",
    "tests/worker/test_model_runner.py",
    "tests/model_executor/ops/test_cpu_ops_attention.py",
    "tests/acceptance/test_scenarios.py",
    "tests/http/guards/test_connection_limits.py",
    "tests/http/dialects/",
    "tests/benchmarks/test_compare.py",
    "tests/entrypoints/test_supervisor.py",
    "tests/worker/test_sleep.py",
    "tests/engine/updates/test_update_exactness.py",
    "tests/fuzz/",
    "tests/rl/",
    "tests/benchmarks/",
    "tests/acceptance/",
    "tests/test_docs_commands.py",
)


class ByFile(LoadFileScheduling):
    """Gives whole files to processes, and the folder e2e as one."""

    def _split_scope(self, nodeid: str) -> str:
        return LONGEST[0] if nodeid.startswith(LONGEST[0]) else super()._split_scope(nodeid)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by LONGEST. All others follow in their order."""
    items.sort(key=lambda item: next((i for i, at in enumerate(LONGEST) if item.nodeid.startswith(at)), len(LONGEST)))
