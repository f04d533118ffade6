"""The parent of a fleet on one host: of its replicas and gateways. The parent starts them, replaces dead ones, and ends
them all.

Each replica keeps its port when it is started again. With replicas that run elsewhere the parent has gateways only.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, to_json
from fastdeploy.core.process import host_id
from fastdeploy.entrypoints.child import REFUSED, Child
from fastdeploy.entrypoints.gateway_config import (
    GATEWAY_MAIN,
    GATEWAY_STALLS,
    GatewayConfig,
    LauncherSpec,
    LocalSpec,
    RaySpec,
    StaticSpec,
)
from fastdeploy.entrypoints.gateway_links import GatewayLinks
from fastdeploy.entrypoints.ports import Port, with_ports
from fastdeploy.entrypoints.process_tree import FAILED, FIRST_DELAY_S, MAX_DELAY_S, BackOff, ProcessTree
from fastdeploy.entrypoints.ray_replica import THREADS
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.entrypoints.roll import Reread, Settings, SettingsBook
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Action, Answer, Ask, Placement, Placements
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator.fleet_key import with_fleet_key

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
MAX_GATEWAY_DELAY_S = 2.0  # before a gateway that died is replaced
QUIET_S = 3.0  # a gateway that is silent for so long gets no new connections until it speaks again


class Fleet(ProcessTree):
    """The parent process. A replica whose main process is silent for stall_s is killed, and started again. So is a
    gateway whose event loop is silent for GATEWAY_STALLS times stall_s.

    num_replicas: started here, each with ``engine_config`` and its share of this host's cores and free memory. spec: of
    replicas that run elsewhere; None = those started here. num_gateways: started here. gateway_endpoint: as
    tcp://HOST:PORT, if there are gateways on other hosts, too; gateway i listens at PORT + i. fleet_key: for the
    gateways. engine_module, first_delay_s: see Supervisor. The gateways get half of shutdown_s to end, then the
    replicas get the other half."""

    def __init__(
        self,
        engine_config: EngineConfig,
        serve_config: ServeConfig,
        fleet_config: FleetConfig,
        num_replicas: int,
        spec: LauncherSpec | None = None,
        keys: Keys = NO_KEYS,
        fleet_key: str | None = None,
        engine_module: str = ENGINE_MODULE,
        first_delay_s: float = FIRST_DELAY_S,
        *,
        reread: Reread | None = None,
        num_gateways: int = 1,
        gateway_endpoint: str = "",
    ):
        super().__init__(serve_config, [f"gateway-{i}" for i in range(num_gateways)], first_delay_s)
        self._back_offs.update({name: BackOff(first_delay_s, MAX_GATEWAY_DELAY_S) for name in self._servers})
        engine = msgspec.structs.replace(engine_config, engines_on_host=max(num_replicas, 1))
        self._config = msgspec.structs.replace(serve_config, shutdown_s=serve_config.shutdown_s / 2)
        self._book = SettingsBook(Settings(engine, self._config, fleet_config), reread)
        self._spec = spec
        self._keys = keys
        self._fleet_key = fleet_key
        self._gateway_endpoint = gateway_endpoint
        self._engine_module = engine_module
        self._threads = max(len(os.sched_getaffinity(0)) // max(num_replicas, 1), 1)
        self._num_replicas = num_replicas
        self._num_named = 0
        self._num_gateways_made = itertools.count(1)
        self._replicas: dict[str, Port] = {}  # those that shall run, with the port of their API servers
        self._links = GatewayLinks(self._selector, self._handle)
        self._missing = set(self._servers)  # not ready since the start of the fleet
        self._announced = False

    # ------------------------------------------------------------------ life

    def run(self) -> int:
        """See ProcessTree.run."""
        try:
            return super().run()
        finally:
            for port in self._replicas.values():
                port.close()

    def _begin(self) -> None:
        for _ in range(self._num_replicas):
            self._missing.add(self._add_replica())
        for name in self._servers:
            self._start(name)

    # ------------------------------------------------------------------ replicas

    def _add_replica(self) -> str:
        """Start one more replica, and return its name. Raises OSError if it gets no port."""
        name = f"replica-{self._num_named}"
        self._replicas[name] = Port.open(LOOPBACK, 0, self._config.workers)
        self._num_named += 1
        self._start(name)
        return name

    def _make(self, name: str) -> Child:
        return self._make_gateway(name) if name in self._servers else self._make_replica(name)

    def _make_replica(self, name: str) -> Child:
        home, port, settings = Path(self._folder, name), self._replicas[name], self._book.of(name)
        shutil.rmtree(home, ignore_errors=True)  # of a replica that was killed
        home.mkdir()
        engine = msgspec.structs.replace(
            settings.engine,
            fleet_endpoint=self._endpoint(name),
            trace=own_file(settings.engine.trace, name),
        )
        serve = msgspec.structs.replace(
            settings.serve,
            host=LOOPBACK,
            control_port=None,
            metrics_port=None,
            session_dir="",
            faults="",
            faults_dir=self._faults_dir(),
        )
        config = ReplicaConfig(engine, with_ports(serve, [port]))
        args = ["--name", name, "--config", to_json(config), "--engine-module", self._engine_module]
        fds = [listener.fileno() for listener in port.sockets]
        args += ["--http-fds", *map(str, fds)]
        environment = {THREADS: str(self._threads)} | self._keys.environment(os.environ)
        return Child(
            name,
            "fastdeploy.entrypoints.replica_main",
            args,
            fds,
            signal.SIGKILL,
            environment=environment | {"FASTDEPLOY_IPC_ROOT": str(home)},
            whole_group=True,
        )

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}.sock"

    def _placements(self) -> Placements:
        return Placements(
            [
                Placement(name, self._endpoint(name), port.url, host_id(), self._book.number(name))
                for name, port in self._replicas.items()
            ],
            self._book.roll,
        )

    # ------------------------------------------------------------------ gateways

    def _make_gateway(self, name: str) -> Child:
        spec, fds, ends = self._spec, self._sockets(name), []
        if spec is None:
            ends = list(socket.socketpair())
            spec = LocalSpec(ends[1].fileno(), self._folder)
        fleet = self._book.of(name).fleet
        config = GatewayConfig(name, self._server_config(), fleet, spec, self._peer_endpoint(name))
        args = ["--config", to_json(config), "--http-fds", *map(str, fds)]
        keep_fds = [*fds, *(end.fileno() for end in ends[1:])]
        # Without a link nothing tells the gateway that the parent has died. A killed one leaves Ray's replicas alone.
        death_signal = None if ends else signal.SIGKILL if isinstance(spec, RaySpec) else signal.SIGTERM
        environment = with_fleet_key(self._keys.environment(os.environ), self._fleet_key) | self._answer_counts()
        child = Child(name, GATEWAY_MAIN, args, keep_fds, death_signal, environment=environment)
        if ends:
            ends[1].close()
            self._links.open(name, ends[0], self._placements())
        return child

    def _peer_endpoint(self, name: str) -> str:
        """Return the address at which a gateway listens for the others."""
        if self._spec is None:
            return self._endpoint(f"{name}-{next(self._num_gateways_made)}")  # its successor listens beside it
        if not self._gateway_endpoint:
            return self._endpoint(name) if len(self._servers) > 1 else ""
        host, _, port = self._gateway_endpoint.rpartition(":")
        return f"{host}:{int(port) + self._servers.index(name) if int(port) else 0}"

    def _send_placements(self) -> None:
        self._links.send_all(self._placements())

    def _handle(self, gateway: str, ask: Ask) -> Answer | None:
        """Do what a gateway asks for. None = the answer follows."""
        if self._stopping:
            return Answer(ask.ask_id, error="the fleet is stopping")
        if ask.action is Action.ADD:
            try:
                name = self._add_replica()
            except OSError as error:
                return Answer(ask.ask_id, error=f"no replica can be started: {error}")
            self._send_placements()
            return Answer(ask.ask_id, name)
        if ask.name not in self._replicas:
            return Answer(ask.ask_id, error=f"name: there is no replica {ask.name!r}")
        if ask.action is Action.RESTART:
            self._restart(ask.name, ask.why)
        else:
            self._remove(ask.name)
        return Answer(ask.ask_id, ask.name)

    def _restart(self, name: str, why: str) -> None:
        """Kill the replica. Its end has it started again; so nothing is done if it has ended already."""
        if child := self._children.get(name):
            logger.warning("killing %s to start it again: %s", name, why)
            child.kill()

    def _remove(self, name: str) -> None:
        self._replicas.pop(name).close()
        self._book.forget(name)
        self._due.pop(name, None)
        self._missing.discard(name)
        self._send_placements()
        if child := self._children.get(name):
            child.signal(signal.SIGTERM)
            self._kill_after(
                child, self._shutdown_s, f"it was removed, and has not ended within {self._shutdown_s:g} s"
            )

    # ------------------------------------------------------------------ events of children

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        match event["event"]:
            case "refused":
                self._on_refused(child, event["why"])
            case "alive" if child.name in self._servers:
                self._expect_life(child, GATEWAY_STALLS)
                self._send_no_clients_after_silence(child)
            case "alive" if child.name in self._replicas:  # a removed one has another timer
                self._expect_life(child)
            case "up":
                child.ready_since = time.monotonic()
                self._let_in(child.name)
            case "ready" | "serving":
                child.ready_since = child.ready_since or time.monotonic()
                self._missing.discard(child.name)
                if not self._missing and not self._announced:
                    self._announce()

    def _expect_life(self, child: Child, stalls: int = 1) -> None:
        """Kill a child that is silent for ``stalls`` times stall_s."""
        stall_s = self._book.of(child.name).serve.stall_s * stalls
        self._kill_after(child, stall_s, f"its process was silent for {stall_s:g} s")

    def _send_no_clients_after_silence(self, gateway: Child) -> None:
        """Let other gateways have the new connections after QUIET_S of silence."""
        if gateway.ready_since is not None:
            self._let_in(gateway.name)
        self._unless_heard(f"{gateway.name} is quiet", gateway, QUIET_S, lambda: self._keep_out(gateway.name))

    def _announce(self) -> None:
        self._announced = True
        match self._spec:
            case StaticSpec(placements):
                number = len(placements)
            case RaySpec(ray):
                number = ray.replicas
            case _:
                number = self._num_replicas
        self._print_serving(f"fleet of {number} serves")

    def _on_refused(self, child: Child, why: str) -> None:
        if self._stopping:
            return
        if self._announced:
            logger.error("%s cannot serve %s: %s", child.name, self._config.model, why)
            return
        self._print_refusal(why)
        self._stop(REFUSED)
        self._kill_all()

    def _on_end(self, child: Child, status: int) -> None:
        name = child.name
        if name in self._servers:
            self._links.close(name)
        elif name not in self._replicas:
            logger.info("%s is removed", name)
            return
        elif not self._announced and status > 0:  # not killed, but ended by itself
            logger.error("%s could not start (status %d)", name, status)
            self._stop(FAILED)
            return
        # Whoever kills gateways before they are ready cannot end the replicas, which have the weights.
        killed = name in self._servers and self._announced and status == -signal.SIGKILL
        self._restart_later(child, status, killed)

    def _on_hopeless(self, name: str) -> None:
        """Go on trying to start a replica or a gateway, since others serve; stop if no gateway does."""
        gateways = [child for child in self._children.values() if child.name in self._servers]
        if not self._announced or not any(gateway.ready_since for gateway in gateways):
            self._stop(FAILED)
        else:
            self._due[name] = time.monotonic() + MAX_DELAY_S

    # ------------------------------------------------------------------ the end

    def _next_to_stop(self) -> Iterable[Child]:
        """Return the gateways, which end their open requests through the engines, and then the replicas."""
        return [child for child in self._children.values() if child.name in self._servers] or self._children.values()

    def _on_stopped(self, child: Child, status: int) -> None:
        if status not in (0, -signal.SIGKILL, -signal.SIGTERM):
            self._status = self._status or FAILED


def own_file(path: str, name: str) -> str:
    """Return ``path`` with ``name`` before its ending, so that each replica writes a file of its own; "" stays ""."""
    root, ending = os.path.splitext(path)
    return f"{root}.{name}{ending}" if path else ""
