"""The parent of one engine and N API servers. The supervisor starts them, replaces dead ones, and ends them all.

The supervisor binds the HTTP sockets once, and every API server inherits them. So no waiting connection is lost when an
API server is replaced. API servers start together with the engine: /health and /ready answer 503 while the model loads.

The loop blocks in one selector, on the pidfd and the event pipe of each child and on the wake-up pipe of signals.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, to_json
from fastdeploy.entrypoints.child import Child
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.event_pipe import REFUSED
from fastdeploy.inter_communicator.fleet_key import with_fleet_key

logger = logging.getLogger(__name__)
BACKLOG = 4096
MAX_FAILED_STARTS = 5
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0
HEALTHY_S = 60.0
BEATS_PER_STALL = 8  # heartbeats in stall_s, the time after which a silent engine is killed
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILED = 1
ENGINE = "engine"


class BackOff:
    """Delays before a child process that ended is started again.

    The first restart is immediate. The second waits ``first_delay_s``, and each further one twice as long as the one
    before, up to MAX_DELAY_S. The count starts again after a child that was ready for HEALTHY_S. The supervisor gives
    up only after MAX_FAILED_STARTS children in a row that were never ready. So a client that can kill a child cannot
    use up the restarts.
    """

    def __init__(self, first_delay_s: float):
        self._first_delay_s = first_delay_s
        self._num_short_lives = 0
        self._num_failed_starts = 0

    def delay(self, ready_for_s: float | None) -> float | None:
        """Return the seconds to wait, or None to give up. ready_for_s: how long the child was ready; None = never."""
        self._num_failed_starts = self._num_failed_starts + 1 if ready_for_s is None else 0
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        if ready_for_s is not None and ready_for_s >= HEALTHY_S:
            self._num_short_lives = 0
        self._num_short_lives += 1
        if self._num_short_lives == 1:
            return 0.0
        return min(self._first_delay_s * 2.0 ** min(self._num_short_lives - 2, 30), MAX_DELAY_S)


class Supervisor:
    """The parent process. engine_module: module that is run as the engine (tests run a scripted engine). keys: passed
    to the API servers only. first_delay_s: see BackOff. fleet_key: passed to the engine only.
    on_engine_ready(fleet_endpoint): called at each start of an engine, with the real address of its fleet endpoint."""

    def __init__(
        self,
        engine_config: EngineConfig,
        serve_config: ServeConfig,
        engine_module: str = "fastdeploy.entrypoints.engine_main",
        keys: Keys = NO_KEYS,
        first_delay_s: float = FIRST_DELAY_S,
        fleet_key: str | None = None,
        on_engine_ready: Callable[[str], None] = lambda fleet_endpoint: None,
    ):
        self._engine_module = engine_module
        heartbeat_s = min(engine_config.heartbeat_s, serve_config.stall_s / BEATS_PER_STALL)
        self._engine_config = msgspec.structs.replace(engine_config, heartbeat_s=heartbeat_s)
        self._config = serve_config
        self._keys = keys
        self._fleet_key = fleet_key
        self._on_engine_ready = on_engine_ready
        self._selector = selectors.DefaultSelector()
        self._engine: Child | None = None
        self._servers: dict[str, Child] = {}
        self._back_offs: defaultdict[str, BackOff] = defaultdict(lambda: BackOff(first_delay_s))
        self._due: dict[str, float] = {}  # child that waits for its restart -> time of the restart (time.monotonic())
        self._lost_commit = engine_config.lost_commit
        self._served = False
        self._connected: set[str] = set()  # API servers that are connected to an engine
        self._announced = False
        self._status = 0
        self._stopping = False
        self._stop_deadline = 0.0

    # ------------------------------------------------------------------ life

    def run(self) -> int:
        """Block until everything has ended, and return the exit status: 0 after a stop signal, REFUSED if the model
        cannot be served. Raises OSError if a port cannot be bound."""
        raise_open_files_limit()
        self._bind()
        self._socket_dir = ipc_dir.create()
        restore = self._catch_signals()
        try:
            self._start_engine()
            for i in range(self._config.workers):
                self._start_server(f"api-{i}")
            while self._children() or (self._due and not self._stopping):
                self._wait_and_handle()
        finally:
            self._kill_all()
            restore()
            for listener in self._listeners:
                listener.close()
            self._selector.close()
            ipc_dir.remove(self._socket_dir)
        return self._status

    def _bind(self) -> None:
        """Open the listeners, and put their real ports into the config. Raises OSError."""
        config = self._config
        self._listeners = [bind(config.host, config.port)]
        if config.control_port is not None:
            self._listeners.append(bind(config.host, config.control_port))
        names = ("port", "control_port")
        ports = {name: listener.getsockname()[1] for name, listener in zip(names, self._listeners, strict=False)}
        self._config = msgspec.structs.replace(config, **ports)

    def _wait_and_handle(self) -> None:
        ready = self._selector.select(self._seconds_to_deadline())
        # Pipes come before pidfds, since a child may have sent events before it died.
        for key, _ in sorted(ready, key=lambda item: item[0].data[0]):
            if key.fd in self._selector.get_map():  # an earlier event may have killed the child
                key.data[1]()
        if self._stopping and time.monotonic() >= self._stop_deadline:
            logger.error("some processes did not end within %g s: killing them", self._config.shutdown_s)
            self._status = self._status or FAILED
            self._kill_all()
        if not self._stopping:
            self._restart_what_is_due()

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds to the next restart or to the end of shutdown_s, or None if there is neither."""
        due = [self._stop_deadline] if self._stopping else list(self._due.values())
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _children(self) -> list[Child]:
        return [*self._servers.values(), *([self._engine] if self._engine else [])]

    # ------------------------------------------------------------------ signals

    def _catch_signals(self) -> Callable[[], None]:
        """Make signals readable from a pipe. Return a function that restores the old handlers."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        old = {number: signal.signal(number, lambda *_: None) for number in _stop_signals()}
        self._selector.register(reader, selectors.EVENT_READ, (2, lambda: self._on_signals(reader.recv(64))))

        def restore() -> None:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

        return restore

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in STOP_SIGNALS:
                continue
            if self._stopping:
                logger.warning("second stop signal: killing all processes")
                self._status = FAILED
                self._kill_all()
            else:
                logger.info("%s: stopping", signal.Signals(number).name)
                self._stop(0)

    # ------------------------------------------------------------------ children

    def _watch(
        self, child: Child, on_event: Callable[[Child, dict], None], on_end: Callable[[Child, int], None]
    ) -> None:
        def read() -> None:
            events = child.events.read()
            for event in events:
                if event["event"] == "refused":
                    self._on_refused(event["why"])
                else:
                    on_event(child, event)
            if not events:  # the child has closed the pipe
                self._forget_fd(child.events.fd)

        def end() -> None:
            read()
            on_end(child, self._reap(child))

        self._selector.register(child.events.fd, selectors.EVENT_READ, (0, read))
        self._selector.register(child.pidfd, selectors.EVENT_READ, (1, end))

    def _reap(self, child: Child) -> int:
        self._forget_fd(child.events.fd)
        self._forget_fd(child.pidfd)
        return child.reap()

    def _forget_fd(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _start_engine(self) -> None:
        args = ["--config", to_json(self._engine_config), "--socket-dir", self._socket_dir]
        args += ["--supervisor", str(os.getpid()), "--bound-s", str(self._config.shutdown_s)]
        if self._lost_commit:
            args.append("--lost-commit")
        environment = with_fleet_key(NO_KEYS.environment(os.environ), self._fleet_key)
        child = self._engine = Child(ENGINE, self._engine_module, args, environment=environment)
        self._watch(child, self._on_engine_event, self._on_engine_end)

    def _on_engine_event(self, child: Child, event: dict) -> None:
        if event["event"] == "ready":
            child.ready_since, self._served = time.monotonic(), True
            self._on_engine_ready(event.get("fleet_endpoint", ""))
        elif event["event"] == "commit":
            self._lost_commit = True  # the next engine must know that it lacks this commit

    def _on_engine_end(self, child: Child, status: int) -> None:
        self._engine = None
        if self._stopping:
            self._status = self._status or (FAILED if status not in (0, -signal.SIGKILL, -signal.SIGTERM) else 0)
        elif not self._served:
            logger.error("the engine could not start (status %d)", status)
            self._stop(FAILED)
        else:
            self._restart_later(child, status)

    def _start_server(self, name: str) -> None:
        args = ["--config", to_json(self._config), "--endpoint", ipc_dir.endpoint(self._socket_dir)]
        fds = [listener.fileno() for listener in self._listeners]
        args += ["--http-fds", *map(str, fds)]
        module, environment = (
            "fastdeploy.entrypoints.api_server",
            self._keys.environment(with_fleet_key(os.environ, None)),
        )
        child = self._servers[name] = Child(name, module, args, fds, signal.SIGKILL, environment=environment)
        self._watch(child, self._on_server_event, self._on_server_end)

    def _on_server_event(self, child: Child, event: dict) -> None:
        if event["event"] == "up":  # for BackOff the API server is ready, even if the engine is not
            child.ready_since = time.monotonic()
            return
        self._connected.add(child.name)
        if not self._announced and self._connected >= self._servers.keys():
            self._announced = True
            data, *control = [_url(listener) for listener in self._listeners]
            also = f", control at {control[0]}" if control else ""
            print(f"FastDeploy serves {self._config.served_model_name} at {data}{also}", flush=True)

    def _on_server_end(self, child: Child, status: int) -> None:
        del self._servers[child.name]
        self._connected.discard(child.name)
        if not self._stopping:
            self._restart_later(child, status)
        elif not self._servers and self._engine:
            self._engine.signal(signal.SIGTERM)

    def _on_refused(self, why: str) -> None:
        """Print once why the model cannot be served, and stop. If nothing was served yet, kill the children, since a
        child that still loads may take long to handle a signal."""
        if self._stopping:
            return
        print(f"fastdeploy: cannot serve {self._config.model}: {why}", file=sys.stderr, flush=True)
        self._stop(REFUSED)
        if not self._served:
            self._kill_all()

    def _restart_later(self, child: Child, status: int) -> None:
        now, name = time.monotonic(), child.name
        delay = self._back_offs[name].delay(None if child.ready_since is None else now - child.ready_since)
        if delay is None:
            text = "%s ended with status %d; it was not ready in any of the last %d starts: giving up"
            logger.error(text, name, status, MAX_FAILED_STARTS)
            self._stop(FAILED)
            return
        logger.error("%s ended with status %d: restarting it in %g s", name, status, delay)
        self._due[name] = now + delay

    def _restart_what_is_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            if name == ENGINE:
                self._start_engine()
            else:
                self._start_server(name)

    # ------------------------------------------------------------------ the end

    def _stop(self, status: int) -> None:
        """Begin the shutdown. The API servers stop first, since they end their open requests through the engine."""
        self._status = self._status or status
        self._stopping = True
        self._stop_deadline = time.monotonic() + self._config.shutdown_s
        for server in self._servers.values():
            server.signal(signal.SIGTERM)
        if not self._servers and self._engine:
            self._engine.signal(signal.SIGTERM)

    def _kill_all(self) -> None:
        """Kill all children, and return when they have ended."""
        self._stopping = True
        for child in self._children():
            child.signal(signal.SIGKILL)
        for child in self._children():
            self._reap(child)
        self._servers.clear()
        self._engine = None


def _stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the server: STOP_SIGNALS, without SIGHUP if it is ignored, as under nohup."""
    return [n for n in STOP_SIGNALS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


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


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_open_files_limit() -> None:
    """Raise the limit of open files to the hard limit, since every connection needs one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
