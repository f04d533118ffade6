"""The tests of `make test-quick`: no Paddle, torch, process or server. A test that asks for one of them fails."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
FOLDERS = ("cache_manager", "client", "core", "engine", "http", "inter_communicator", "metrics", "rl", "scheduler")
# Files and folders that import Paddle, or whose tests all start servers. These files are not imported.
LEFT_OUT = (
    "engine/adapters/test_adapter_exactness.py",
    "engine/test_speculation_machine.py",
    "engine/updates/test_update_exactness.py",
    "engine/updates/test_weight_memory.py",
    "http/guards/test_route_access_processes.py",
    "rl/check_sync",
    "rl/frameworks/test_skyrl_worker.py",
    "rl/frameworks/test_trl.py",
    "rl/frameworks/test_trl_sync.py",
    "rl/scoring",
    "rl/test_client_e2e.py",
    "rl/test_publish_e2e.py",
    "rl/test_rollout_model.py",
    "rl/test_schedules.py",
    "rl/test_state_encoding.py",
)
FIXTURES = ("make_stack", "make_module_stack", "process")  # that start a server or a process
REFUSED_IMPORTS = ("paddle", "torch")
REFUSED_EVENTS = ("os.fork", "os.posix_spawn", "subprocess.Popen")


def left_out(path: Path) -> bool:
    """Whether a file or folder of tests is not collected."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    return bool(parts) and (parts[0] not in FOLDERS or "/".join(parts) in LEFT_OUT)


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that are marked or that use one of FIXTURES."""
    out = [
        item
        for item in items
        if any(item.get_closest_marker(name) for name in ("processes", "slow"))
        or not set(FIXTURES).isdisjoint(getattr(item, "fixturenames", ()))
    ]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def forbid() -> None:
    """Make each later import of Paddle or torch, and each start of a process, raise an error."""

    def check(event: str, args: tuple[Any, ...]) -> None:
        if event in REFUSED_EVENTS or (event == "import" and args[0] in REFUSED_IMPORTS):
            raise RuntimeError(f"a quick test asks for {event} {args[0]}: mark it with processes, or see LEFT_OUT")

    sys.addaudithook(check)
