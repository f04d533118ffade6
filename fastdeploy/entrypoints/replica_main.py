"""One replica of a fleet: ``python -m fastdeploy.entrypoints.replica_main``. A supervisor with an engine and API
servers, as "fastdeploy serve" is, whose parent is a program.

Events to the parent: "serving" {url, endpoint, host} when the API servers answer and the engine is ready, again after
each restart of the engine; "refused" {why}; "alive" about each second, so that the parent sees whether this process is
stopped. The system kills the replica when its parent dies.

All processes are in the process group of the replica, which has its number. So the parent kills them with one SIGKILL,
even if they are stopped. SIGTERM ends them in order.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, from_json
from fastdeploy.core.process import host_id, setup_logging
from fastdeploy.entrypoints.child import EventPipe
from fastdeploy.entrypoints.ports import Port
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE, Supervisor
from fastdeploy.http.guards.keys import pop_keys
from fastdeploy.inter_communicator.fleet_key import pop_fleet_key

logger = logging.getLogger(__name__)


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one replica. engine.fleet_endpoint is the address for the gateway; a port 0 becomes a free one."""

    engine: EngineConfig
    serve: ServeConfig


class ReplicaSupervisor(Supervisor):
    """A supervisor that sends events to its parent. settings: see Supervisor."""

    def __init__(self, events: EventPipe, config: ReplicaConfig, **settings: Any):
        super().__init__(config.engine, config.serve, one_group=True, **settings)
        self._events = events

    def _show_serving(self) -> None:
        self._events.send("serving", url=self._ports[0].url, endpoint=self._fleet_endpoint, host=host_id())

    def _show_refusal(self, why: str) -> None:
        self._events.send("refused", why=why)

    def _show_alive(self) -> None:
        self._events.beat()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True, help="of the replica, unique in the fleet")
    parser.add_argument("--config", required=True, help="ReplicaConfig as JSON")
    parser.add_argument(
        "--http-fds",
        type=int,
        nargs="*",
        default=(),
        help="inherited sockets that listen at one port, for each API server one; none = of the config",
    )
    parser.add_argument("--engine-module", default=ENGINE_MODULE, help="see Supervisor")
    parser.add_argument("--event-fd", type=int, required=True, help="inherited pipe for events to the parent")
    args = parser.parse_args()
    os.environ["FASTDEPLOY_LOG_NAME"] = args.name
    setup_logging("supervisor")
    config, keys, events = from_json(args.config, ReplicaConfig), pop_keys(os.environ), EventPipe(args.event_fd)
    supervisor = ReplicaSupervisor(
        events,
        config,
        engine_module=args.engine_module,
        keys=keys,
        fleet_key=pop_fleet_key(os.environ),
        ports=[Port([socket.socket(fileno=fd) for fd in args.http_fds])] if args.http_fds else (),
    )
    try:
        return supervisor.run()
    except OSError as error:  # the address is taken
        return events.refuse(error)


if __name__ == "__main__":
    sys.exit(main())
