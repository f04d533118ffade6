"""A Ray cluster of several nodes on this machine, and the processes of its nodes and actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.process import stat_of
from fastdeploy.testing.process import free_port

TESTS = Path(__file__).resolve().parent.parent
FLEET_KEY = "0123456789abcdef" * 2
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token to the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
    "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
}
AGENT_PORTS = "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port"
TRIES = 5  # to start a node


@contextmanager
def ray_cluster(head_cpus: int) -> Iterator[Any]:
    """Start a cluster whose head has this number of cores, and end it with all of its nodes. Ray's settings are in the
    environment meanwhile. A process that the test starts itself needs SETTINGS, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = _until_started(lambda: Cluster(initialize_head=True, head_node_args=_settings(head_cpus)))
        try:
            yield cluster
        finally:
            cluster.shutdown()


def add_node(cluster: Any, num_cpus: int) -> Any:
    """Start another node of the cluster, and return it."""
    return _until_started(lambda: cluster.add_node(**_settings(num_cpus)))


def _settings(num_cpus: int) -> dict[str, Any]:
    ports = {port: free_port() for port in AGENT_PORTS}  # one choice less for the agent of the node
    return {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": 80_000_000, **ports}


def _until_started(start: Callable[[], Any]) -> Any:
    """Start a node, and return what ``start`` returns. A new node waits 15 s at most for its agent, which may take
    longer on a busy machine. Then the node ends, and another one is tried. What is left of it ends with this process.
    """
    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as error:  # Ray has no class of its own for this
            if "timed out during startup" not in str(error):
                raise
    return start()


def raylet_of(node: Any) -> int:
    """Return the process of a node, which is the parent of its actors."""
    return int(node.all_processes["raylet"][0].process.pid)


def actor_of(pid: int) -> int:
    """Return the process of the actor that has started this process. Raises OSError if this process has ended."""
    return int(stat_of(pid)[1])


def raylet_above(pid: int) -> int:
    """Return the process of the node on which a process of an actor runs. Raises OSError if one of them has ended."""
    return actor_of(actor_of(pid))
