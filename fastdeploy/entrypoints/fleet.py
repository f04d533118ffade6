"""The parent of a fleet on one host: of N replicas and one gateway. The parent starts them, replaces dead ones, and
ends them all.

Each replica keeps its port when it is started again. With replicas that run elsewhere the parent has a gateway only.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, to_json
from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.listener import bind, url_of
from fastdeploy.core.process import host_id
from fastdeploy.entrypoints.child import REFUSED, Child
from fastdeploy.entrypoints.process_tree import (
    FAILED,
    FIRST_DELAY_S,
    MAX_DELAY_S,
    PIPES,
    BackOff,
    ProcessTree,
    with_ports,
)
from fastdeploy.entrypoints.ray_launcher import RayConfig
from fastdeploy.entrypoints.ray_replica import THREADS, ReplicaSpec
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.entrypoints.roll import Reread, Settings, SettingsBook
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE, ServerConfig
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Action, Answer, Ask, ParentEnd, Placement, Placements, RollPhase
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator.fleet_key import with_fleet_key

logger = logging.getLogger(__name__)
GATEWAY = "gateway"
LOOPBACK = "127.0.0.1"
MAX_GATEWAY_DELAY_S = 2.0  # before a gateway that died is replaced
GATEWAY_STALLS = 3  # a replica's clients notice nothing if it is killed, but those of a gateway lose their connections


class LocalSpec(msgspec.Struct, frozen=True, tag="local"):
    """Replicas that the parent starts. link_fd: inherited end of a socket pair. folder: of the replicas' sockets, which
    the gateway removes if the parent dies."""

    link_fd: int
    folder: str


class StaticSpec(msgspec.Struct, frozen=True, tag="static"):
    """Replicas that somebody else runs."""

    placements: list[Placement]


class RaySpec(msgspec.Struct, frozen=True, tag="ray"):
    """Replicas that Ray starts."""

    ray: RayConfig
    replica: ReplicaSpec


LauncherSpec = LocalSpec | StaticSpec | RaySpec


class GatewayConfig(ServerConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of a gateway. launcher: who starts the replicas."""

    fleet: FleetConfig
    launcher: LauncherSpec


class Fleet(ProcessTree):
    """The parent process. A replica whose main process is silent for stall_s is killed, and started again. So is a
    gateway whose event loop is silent for GATEWAY_STALLS times stall_s.

    num_replicas: started here, each with ``engine_config`` and its share of this host's cores and free memory. spec: of
    replicas that run elsewhere; None = those started here. fleet_key: for the gateway. engine_module, first_delay_s:
    see Supervisor. The gateway gets half of shutdown_s to end, then the replicas get the other half."""

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
        reread: Reread | None = None,
    ):
        super().__init__(serve_config, first_delay_s)
        self._back_offs[GATEWAY] = BackOff(first_delay_s, MAX_GATEWAY_DELAY_S)
        engine = msgspec.structs.replace(engine_config, engines_on_host=max(num_replicas, 1))
        self._config = msgspec.structs.replace(serve_config, shutdown_s=serve_config.shutdown_s / 2)
        self._book = SettingsBook(Settings(engine, self._config, fleet_config), reread)
        self._replacing: dict[str, Ask] = {}  # replicas that end, to be started with other settings
        self._refusals: dict[str, str] = {}  # why a replica ends that cannot serve with its settings
        self._spec = spec
        self._keys = keys
        self._fleet_key = fleet_key
        self._engine_module = engine_module
        self._threads = max(len(os.sched_getaffinity(0)) // max(num_replicas, 1), 1)
        self._num_replicas = num_replicas
        self._num_named = 0
        self._replicas: dict[str, socket.socket] = {}  # those that shall run -> listener of their API servers
        self._link: ParentEnd | None = None
        self._missing: set[str] = {GATEWAY}  # not ready since the start of the fleet
        self._announced = False

    # ------------------------------------------------------------------ life

    def run(self) -> int:
        """See ProcessTree.run."""
        try:
            return super().run()
        finally:
            for listener in self._replicas.values():
                listener.close()

    def _begin(self) -> None:
        for _ in range(self._num_replicas):
            self._missing.add(self._add_replica())
        self._start(GATEWAY)

    # ------------------------------------------------------------------ replicas

    def _add_replica(self) -> str:
        """Start one more replica, and return its name. Raises OSError if it gets no port."""
        name = f"replica-{self._num_named}"
        self._replicas[name] = bind(LOOPBACK, 0)
        self._num_named += 1
        self._start(name)
        return name

    def _make(self, name: str) -> Child:
        return self._make_gateway() if name == GATEWAY else self._make_replica(name)

    def _make_replica(self, name: str) -> Child:
        home, listener, settings = Path(self._folder, name), self._replicas[name], self._book.of(name)
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
        config = ReplicaConfig(engine, with_ports(serve, [listener]))
        args = ["--name", name, "--config", to_json(config), "--engine-module", self._engine_module]
        args += ["--http-fds", str(listener.fileno())]
        environment = {THREADS: str(self._threads)} | self._keys.environment(os.environ)
        return Child(
            name,
            "fastdeploy.entrypoints.replica_main",
            args,
            [listener.fileno()],
            signal.SIGKILL,
            environment=environment | {"FASTDEPLOY_IPC_ROOT": str(home)},
            whole_group=True,
        )

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self._folder}/{name}.sock"

    def _placements(self) -> Placements:
        return Placements(
            [
                Placement(name, self._endpoint(name), url_of(listener), host_id(), self._book.number(name))
                for name, listener in self._replicas.items()
            ],
            self._book.roll,
        )

    # ------------------------------------------------------------------ the gateway

    def _make_gateway(self) -> Child:
        spec, fds, ends = self._spec, [listener.fileno() for listener in self._listeners], []
        if spec is None:
            ends = list(socket.socketpair())
            spec = LocalSpec(ends[1].fileno(), self._folder)
        config = GatewayConfig(self._server_config(), self._book.of(GATEWAY).fleet, spec)
        args = ["--config", to_json(config), "--http-fds", *map(str, fds)]
        keep_fds = [*fds, *(end.fileno() for end in ends[1:])]
        # Without a link nothing tells the gateway that the parent has died. A killed one leaves Ray's replicas alone.
        death_signal = None if ends else signal.SIGKILL if isinstance(spec, RaySpec) else signal.SIGTERM
        environment = with_fleet_key(self._keys.environment(os.environ), self._fleet_key) | self._answer_counts()
        main = "fastdeploy.entrypoints.gateway"
        child = Child(GATEWAY, main, args, keep_fds, death_signal, environment=environment)
        if ends:
            ends[1].close()
            self._connect(ParentEnd(ends[0]))
        return child

    def _connect(self, link: ParentEnd) -> None:
        self._disconnect()
        self._link = link
        self._watch(link, PIPES, self._on_link)
        self._send(self._placements())

    def _disconnect(self) -> None:
        if self._link is not None:
            self._forget_fd(self._link.fileno())
            self._link.close()
            self._link = None

    def _send(self, message: Placements | Answer) -> None:
        if self._link is not None:
            self._link.send(message)
            self._watch_link()

    def _watch_link(self) -> None:
        """Wait for room only while something waits for it."""
        assert self._link is not None
        write = selectors.EVENT_WRITE if self._link.wants_to_write else 0
        self._selector.modify(self._link, selectors.EVENT_READ | write, (PIPES, self._on_link))

    def _on_link(self) -> None:
        assert self._link is not None
        asks = self._link.read()
        if asks is None:
            self._disconnect()
            return
        for ask in asks:
            if (answer := self._handle(ask)) is not None:
                self._send(answer)
        self._link.flush()
        self._watch_link()

    def _handle(self, ask: Ask) -> Answer | None:
        """Do what the gateway asks for. None = the answer follows."""
        if self._stopping:
            return Answer(ask.ask_id, error="the fleet is stopping")
        if ask.action is Action.ADD:
            try:
                name = self._add_replica()
            except OSError as error:
                return Answer(ask.ask_id, error=f"no replica can be started: {error}")
            self._send(self._placements())
            return Answer(ask.ask_id, name)
        if ask.action is Action.ROLL:
            return self._begin_roll(ask)
        if ask.action is Action.REPLICAS_REPLACED:
            self._end_roll()
            return Answer(ask.ask_id)
        if ask.name not in self._replicas:
            return Answer(ask.ask_id, error=f"name: there is no replica {ask.name!r}")
        if ask.action is Action.RESTART:
            self._restart(ask.name, ask.why)
        elif ask.action is Action.REPLACE:
            return self._replace(ask)
        elif ask.action is Action.GO_BACK:
            self._go_back(ask.why)
        else:
            self._remove(ask.name)
        return Answer(ask.ask_id, ask.name)

    # ------------------------------------------------------------------ rolling changes

    def _begin_roll(self, ask: Ask) -> Answer:
        try:
            roll = self._book.begin(ask.given, ask.drain_s)
        except FastDeployError as error:
            return Answer(ask.ask_id, error=error.message)
        logger.info("rolling change to settings %d: %s", roll.settings, roll.given)
        self._send(self._placements())
        return Answer(ask.ask_id, roll=roll)

    def _replace(self, ask: Ask) -> Answer | None:
        """End the replica, and start it with the present settings. The answer follows its end."""
        name = ask.name
        self._book.renew(name)
        self._book.trials.add(name)
        self._send(self._placements())
        if (child := self._children.get(name)) is None:
            self._due[name] = time.monotonic()
            return Answer(ask.ask_id, name)
        self._replacing[name] = ask
        child.signal(signal.SIGTERM)
        why = f"it is being replaced, and has not ended within {self._shutdown_s:g} s"
        self._kill_after(child, self._shutdown_s, why)
        return None

    def _replaced(self, name: str) -> None:
        """Start a replica that has ended with its new settings."""
        self._send(Answer(self._replacing.pop(name).ask_id, name))
        self._due[name] = time.monotonic()

    def _go_back(self, why: str) -> None:
        """Go back to the settings from before, for those replicas too that have the new ones already."""
        logger.error("the rolling change goes back: %s", why)
        self._book.go_back(why)
        self._send(self._placements())

    def _trial_ended(self, child: Child, status: int) -> None:
        """Start a replica with the old settings, since it did not serve with the new ones."""
        name = child.name
        why = self._refusals.pop(name, f"its process ended with status {status}")
        self._go_back(f"{name} cannot be started with the new settings: {why}")
        self._book.renew(name)
        self._book.trials.discard(name)
        self._send(self._placements())
        self._due[name] = time.monotonic()

    def _end_roll(self) -> None:
        """All replicas have the present settings, and are members."""
        if self._book.roll is not None and self._book.roll.phase is RollPhase.REPLICAS:
            self._book.enter(RollPhase.DONE)
            self._send(self._placements())

    def _restart(self, name: str, why: str) -> None:
        """Kill the replica. Its end has it started again; so nothing is done if it has ended already."""
        if child := self._children.get(name):
            logger.warning("killing %s to start it again: %s", name, why)
            child.kill()

    def _remove(self, name: str) -> None:
        self._replicas.pop(name).close()
        self._book.forget(name)
        if name in self._replacing:
            self._send(Answer(self._replacing.pop(name).ask_id, name))
        self._due.pop(name, None)
        self._missing.discard(name)
        self._send(self._placements())
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
            case "alive" if self._is_watched(child.name):
                stall_s = self._book.of(child.name).serve.stall_s * (GATEWAY_STALLS if child.name == GATEWAY else 1)
                self._kill_after(child, stall_s, f"its process was silent for {stall_s:g} s")
            case "up":
                child.ready_since = time.monotonic()
            case "ready" | "serving":
                child.ready_since = child.ready_since or time.monotonic()
                self._book.trials.discard(child.name)
                self._missing.discard(child.name)
                if not self._missing and not self._announced:
                    self._announce()

    def _is_watched(self, name: str) -> bool:
        """Return whether silence kills a child. One that shall end has another timer."""
        return name == GATEWAY or (name in self._replicas and name not in self._replacing)

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
            self._refusals[child.name] = why
            logger.error("%s cannot serve %s: %s", child.name, self._config.model, why)
            return
        self._print_refusal(why)
        self._stop(REFUSED)
        self._kill_all()

    def _on_end(self, child: Child, status: int) -> None:
        name = child.name
        if name == GATEWAY:
            self._disconnect()
        elif name not in self._replicas:
            logger.info("%s is removed", name)
            return
        elif name in self._replacing:
            self._replaced(name)
            return
        elif name in self._book.trials:
            self._trial_ended(child, status)
            return
        elif not self._announced and status > 0:  # not killed, but ended by itself
            logger.error("%s could not start (status %d)", name, status)
            self._stop(FAILED)
            return
        # Whoever kills gateways before they are ready cannot end the replicas, which have the weights.
        killed = name == GATEWAY and self._announced and status == -signal.SIGKILL
        self._restart_later(child, status, killed)

    def _on_hopeless(self, name: str) -> None:
        """Go on trying to start a replica, since the others serve; without them, stop all."""
        if name == GATEWAY or not self._announced:
            self._stop(FAILED)
        else:
            self._due[name] = time.monotonic() + MAX_DELAY_S

    # ------------------------------------------------------------------ the end

    def _next_to_stop(self) -> Iterable[Child]:
        """Return the gateway, which ends its open requests through the engines, and then the replicas."""
        return [child for child in self._children.values() if child.name == GATEWAY] or self._children.values()

    def _on_stopped(self, child: Child, status: int) -> None:
        if status not in (0, -signal.SIGKILL, -signal.SIGTERM):
            self._status = self._status or FAILED


def own_file(path: str, name: str) -> str:
    """Return ``path`` with ``name`` before its ending, so that each replica writes a file of its own; "" stays ""."""
    root, ending = os.path.splitext(path)
    return f"{root}.{name}{ending}" if path else ""
