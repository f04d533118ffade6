"""The parent of one engine and N API servers. The supervisor starts them, replaces dead ones, and ends them all.

The supervisor binds the HTTP sockets once, and every API server inherits them. So no waiting connection is lost when an
API server is replaced. API servers start together with the engine: /health and /ready answer 503 while the model loads.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, to_json
from fastdeploy.entrypoints import child as children
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.process_tree import FAILED, FIRST_DELAY_S, ProcessTree
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.event_pipe import REFUSED
from fastdeploy.inter_communicator.fleet_key import with_fleet_key

logger = logging.getLogger(__name__)
BACKLOG = 4096
BEATS_PER_STALL = 8  # heartbeats in stall_s, the time after which a silent engine is killed
BEAT_S = 1.0  # between two beats of the supervisor itself
ENGINE = "engine"


class Report(Protocol):
    """Where a supervisor tells how it fares."""

    def serving(self, urls: Sequence[str], fleet_endpoint: str) -> None:
        """The API servers answer, and the engine is ready: at first, and after each restart of the engine. urls: of the
        data routes, then of the control port if there is one. fleet_endpoint: its real address; "" = none."""
        ...

    def refused(self, why: str) -> None:
        """The model or a setting cannot be served."""
        ...

    def alive(self) -> None:
        """The supervisor runs. Told every BEAT_S seconds, or more often if stall_s is short."""
        ...


class Terminal:
    """Tells the user, once each."""

    def __init__(self, config: ServeConfig):
        self._config = config
        self._told = False

    def serving(self, urls: Sequence[str], fleet_endpoint: str) -> None:
        if self._told:
            return
        self._told = True
        data, *control = urls
        also = f", control at {control[0]}" if control else ""
        print(f"FastDeploy serves {self._config.served_model_name} at {data}{also}", flush=True)

    def refused(self, why: str) -> None:
        print(f"fastdeploy: cannot serve {self._config.model}: {why}", file=sys.stderr, flush=True)

    def alive(self) -> None:
        return


class Supervisor(ProcessTree):
    """The parent process. engine_module: module that is run as the engine (tests run a scripted engine). keys: passed
    to the API servers only. first_delay_s: see BackOff. fleet_key: passed to the engine only. report: None = the
    terminal. listeners: bound already; none = bind those of the config. one_group: all children stay in this process's
    group, so that they can be killed at once."""

    def __init__(
        self,
        engine_config: EngineConfig,
        serve_config: ServeConfig,
        engine_module: str = "fastdeploy.entrypoints.engine_main",
        keys: Keys = NO_KEYS,
        first_delay_s: float = FIRST_DELAY_S,
        fleet_key: str | None = None,
        *,
        report: Report | None = None,
        listeners: Sequence[socket.socket] = (),
        one_group: bool = False,
    ):
        super().__init__(serve_config.shutdown_s, first_delay_s)
        self._engine_module = engine_module
        heartbeat_s = min(engine_config.heartbeat_s, serve_config.stall_s / BEATS_PER_STALL)
        self._engine_config = msgspec.structs.replace(engine_config, heartbeat_s=heartbeat_s)
        self._config = serve_config
        self._keys = keys
        self._fleet_key = fleet_key
        self._fleet_endpoint = ""
        self._report = report or Terminal(serve_config)
        self._listeners = list(listeners)
        self._own_sessions = not one_group
        self._lost_commit = engine_config.lost_commit
        self._served = False
        self._connected: set[str] = set()  # API servers that have connected to an engine
        self._announced = False
        self._dead_since: float | None = None  # time.monotonic() when the main thread of the engine was seen to be dead

    # ------------------------------------------------------------------ life

    def run(self) -> int:
        """Block until everything has ended, and return the exit status: 0 after a stop signal, REFUSED if the model
        cannot be served. Raises OSError if a port cannot be bound."""
        raise_open_files_limit()
        self._listeners = self._listeners or bind_all(self._config)
        self._config = with_ports(self._config, self._listeners)
        self._socket_dir = ipc_dir.create()
        restore = self._catch_signals()
        try:
            self._start(ENGINE)
            for i in range(self._config.workers):
                self._start(f"api-{i}")
            self._beat()
            self._run_until_ended()
        finally:
            self._kill_all()
            restore()
            for listener in self._listeners:
                listener.close()
            self._selector.close()
            ipc_dir.remove(self._socket_dir)
        return self._status

    # ------------------------------------------------------------------ children

    def _make(self, name: str) -> Child:
        return self._make_engine() if name == ENGINE else self._make_server(name)

    def _make_engine(self) -> Child:
        short_lives = self._back_offs[ENGINE].num_short_lives
        config = msgspec.structs.replace(self._engine_config, short_lives=short_lives)
        args = ["--config", to_json(config), "--socket-dir", self._socket_dir]
        args += ["--supervisor", str(os.getpid()), "--bound-s", str(self._config.shutdown_s)]
        if self._lost_commit:
            args.append("--lost-commit")
        environment = with_fleet_key(NO_KEYS.environment(os.environ), self._fleet_key)
        return Child(ENGINE, self._engine_module, args, environment=environment, own_session=self._own_sessions)

    def _make_server(self, name: str) -> Child:
        args = ["--config", to_json(self._config), "--endpoint", ipc_dir.endpoint(self._socket_dir)]
        fds = [listener.fileno() for listener in self._listeners]
        args += ["--http-fds", *map(str, fds)]
        return Child(
            name,
            "fastdeploy.entrypoints.api_server",
            args,
            fds,
            signal.SIGKILL,
            environment=with_fleet_key(self._keys.environment(os.environ), None),
            own_session=self._own_sessions,
        )

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        match event["event"]:
            case "refused":
                self._on_refused(event["why"])
            case "commit":
                self._lost_commit = True  # the next engine must know that it lacks this commit
            case "up":  # for BackOff an API server is ready, even if the engine is not
                child.ready_since = time.monotonic()
            case "ready" if child.name == ENGINE:
                child.ready_since, self._served = time.monotonic(), True
                self._fleet_endpoint = event.get("fleet_endpoint", "")
                if self._announced:
                    self._announce()
            case "ready":
                self._connected.add(child.name)
                if not self._announced and len(self._connected) >= self._config.workers:
                    self._announced = True
                    self._announce()

    def _beat(self) -> None:
        self._report.alive()
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

    def _announce(self) -> None:
        self._report.serving([url_of(listener) for listener in self._listeners], self._fleet_endpoint)

    def _on_refused(self, why: str) -> None:
        """Report once why the model cannot be served, and stop. If nothing was served yet, kill the children, since a
        child that still loads may take long to handle a signal."""
        if self._stopping:
            return
        self._report.refused(why)
        self._stop(REFUSED)
        if not self._served:
            self._kill_all()

    def _on_end(self, child: Child, status: int) -> None:
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


def bind_all(config: ServeConfig) -> list[socket.socket]:
    """Open the listening sockets of ``config``: for all routes, and for the control port. Raises OSError."""
    listeners = [bind(config.host, config.port)]
    if config.control_port is not None:
        listeners.append(bind(config.host, config.control_port))
    return listeners


def with_ports(config: ServeConfig, listeners: Sequence[socket.socket]) -> ServeConfig:
    """Return ``config`` with the real ports of these listeners."""
    names = ("port", "control_port")
    ports = {name: listener.getsockname()[1] for name, listener in zip(names, listeners, strict=False)}
    return msgspec.structs.replace(config, **ports)


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket for all API servers. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a server that listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_open_files_limit() -> None:
    """Raise the limit of open files to the hard limit, since every connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
