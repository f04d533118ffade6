"""The parent of one engine and N API servers. The supervisor starts them, replaces dead ones, and ends them all.

API servers start together with the engine: /health and /ready answer 503 while the model loads.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, to_json
from fastdeploy.core.loading import Loading
from fastdeploy.entrypoints import child as children
from fastdeploy.entrypoints.child import REFUSED, Child
from fastdeploy.entrypoints.loading_progress import LoadingLine
from fastdeploy.entrypoints.ports import Port
from fastdeploy.entrypoints.process_tree import FAILED, FIRST_DELAY_S, ProcessTree
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.fleet_key import with_fleet_key

logger = logging.getLogger(__name__)
ENGINE_MODULE = "fastdeploy.entrypoints.engine_main"
BEATS_PER_STALL = 8  # heartbeats in stall_s, the time after which a silent engine is killed
BEAT_S = 1.0  # between two beats of the supervisor itself
ENGINE = "engine"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a process that serves HTTP, which its parent passes as JSON. name: of the process, in the log."""

    name: str
    serve: ServeConfig


class ApiServerConfig(ServerConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of an API server. endpoint: ZMQ address of the engine."""

    endpoint: str


class Supervisor(ProcessTree):
    """The parent process. engine_module: module that is run as the engine (tests run a scripted engine). keys: passed
    to the API servers only. fleet_key: passed to the engine only. first_delay_s, ports: see ProcessTree. one_group:
    all children stay in this process's group, so that they can be killed at once."""

    def __init__(
        self,
        engine_config: EngineConfig,
        serve_config: ServeConfig,
        engine_module: str = ENGINE_MODULE,
        keys: Keys = NO_KEYS,
        first_delay_s: float = FIRST_DELAY_S,
        fleet_key: str | None = None,
        *,
        ports: Sequence[Port] = (),
        one_group: bool = False,
    ):
        servers = [f"api-{i}" for i in range(serve_config.workers)]
        super().__init__(serve_config, servers, first_delay_s, ports)
        self._engine_module = engine_module
        heartbeat_s = min(engine_config.heartbeat_s, serve_config.stall_s / BEATS_PER_STALL)
        self._engine_config = msgspec.structs.replace(engine_config, heartbeat_s=heartbeat_s)
        self._keys = keys
        self._fleet_key = fleet_key
        self._fleet_endpoint = ""
        self._own_sessions = not one_group
        self._lost_commit = engine_config.lost_commit
        self._served = False
        self._connected: set[str] = set()  # API servers that have connected to an engine
        self._announced = self._shown = False
        self._loading = LoadingLine(moves=not one_group)
        self._dead_since: float | None = None  # time.monotonic() when the main thread of the engine was seen to be dead

    # ------------------------------------------------------------------ life

    def _begin(self) -> None:
        self._start(ENGINE)
        for name in self._servers:
            self._start(name)
        self._beat()

    # ------------------------------------------------------------------ what a replica of a fleet does otherwise

    def _show_serving(self) -> None:
        """Tell the user that the API servers answer and the engine is ready: called at first, and after each restart of
        the engine."""
        if not self._shown:
            self._print_serving("serves")
        self._shown = True

    def _show_refusal(self, why: str) -> None:
        """Tell the user why the model or a setting cannot be served."""
        self._print_refusal(why)

    def _show_alive(self) -> None:
        """Show that this process runs. Called every BEAT_S seconds, or more often if stall_s is short."""

    # ------------------------------------------------------------------ children

    def _make(self, name: str) -> Child:
        return self._make_engine() if name == ENGINE else self._make_server(name)

    def _make_engine(self) -> Child:
        short_lives = self._back_offs[ENGINE].num_short_lives
        config = msgspec.structs.replace(self._engine_config, short_lives=short_lives, faults_dir=self._faults_dir())
        args = ["--config", to_json(config), "--socket-dir", self._folder]
        args += ["--supervisor", str(os.getpid()), "--bound-s", str(self._config.shutdown_s)]
        if self._lost_commit:
            args.append("--lost-commit")
        environment = with_fleet_key(NO_KEYS.environment(os.environ), self._fleet_key)
        return Child(ENGINE, self._engine_module, args, environment=environment, own_session=self._own_sessions)

    def _make_server(self, name: str) -> Child:
        config = ApiServerConfig(name, self._server_config(), ipc_dir.endpoint(self._folder))
        fds = self._sockets(name)
        args = ["--config", to_json(config), "--http-fds", *map(str, fds)]
        return Child(
            name,
            "fastdeploy.entrypoints.api_server",
            args,
            fds,
            signal.SIGKILL,
            environment=with_fleet_key(self._keys.environment(os.environ), None) | self._answer_counts(),
            own_session=self._own_sessions,
        )

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        match event["event"]:
            case "loading":
                self._loading.show(msgspec.convert({**event, "event": None}, Loading))
            case "refused":
                self._on_refused(event["why"])
            case "commit":
                # The next engine must know that it lacks this commit, but for one of the weights that it begins with.
                self._lost_commit = not event["are_first"]
            case "up":  # for BackOff an API server is ready, even if the engine is not
                child.ready_since = time.monotonic()
                self._let_in(child.name)
            case "ready" if child.name == ENGINE:
                child.ready_since, self._served = time.monotonic(), True
                self._loading.end()
                self._fleet_endpoint = event.get("fleet_endpoint", "")
                if self._announced:
                    self._show_serving()
            case "ready":
                self._connected.add(child.name)
                if not self._announced and len(self._connected) >= self._config.workers:
                    self._announced = True
                    self._show_serving()

    def _beat(self) -> None:
        self._show_alive()
        self._check_that_the_engine_can_end()
        self._call_later("beat", min(BEAT_S, self._config.stall_s / BEATS_PER_STALL), self._beat)

    def _check_that_the_engine_can_end(self) -> None:
        """Stop if the engine has died but cannot end, since a thread of it waits for a file system. It keeps its memory
        and its sockets, so no other engine can take its place. Whoever has started this server must decide."""
        engine = self._children.get(ENGINE)
        if engine is None or self._stopping or not engine.main_thread_ended():
            self._dead_since = None
            return
        now = time.monotonic()
        self._dead_since = self._dead_since or now
        if now - self._dead_since >= children.KILLED_S:
            logger.error("the engine has died, but its process cannot end: stopping")
            self._stop(FAILED)
            self._kill_all()

    def _on_refused(self, why: str) -> None:
        """Report once why the model cannot be served, and stop. If nothing was served yet, kill the children, since a
        child that still loads may take long to handle a signal."""
        if self._stopping:
            return
        self._loading.end()
        self._show_refusal(why)
        self._stop(REFUSED)
        if not self._served:
            self._kill_all()

    def _on_end(self, child: Child, status: int) -> None:
        if child.name == ENGINE:
            self._loading.end()
        self._connected.discard(child.name)
        if child.name == ENGINE and not self._served:
            logger.error("the engine could not start (status %d)", status)
            self._stop(FAILED)
        else:
            self._restart_later(child, status)

    # ------------------------------------------------------------------ the end

    def _next_to_stop(self) -> Iterable[Child]:
        """Return the API servers, which end their open requests through the engine, and then the engine."""
        return [child for child in self._children.values() if child.name != ENGINE] or self._children.values()

    def _on_stopped(self, child: Child, status: int) -> None:
        if child.name == ENGINE and status not in (0, -signal.SIGKILL, -signal.SIGTERM):
            self._status = self._status or FAILED
