"""A parent process and its children: each is started, watched, started again when it ends, and stopped in order.

One thread waits on the event pipes of the children, on their pidfds, and on the wake-up pipe of signals.

The parent opens the HTTP ports once, and each child that serves HTTP inherits a socket of each port (see ports.py).
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
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.process import ANSWER_COUNTS_FOLDER
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.ports import Port, open_ports, ports_of, with_ports
from fastdeploy.inter_communicator import ipc_dir

logger = logging.getLogger(__name__)
MAX_FAILED_STARTS = 5
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0
LATE_TIMER_S = 0.5  # a timer that fires later than this shows that this process was stopped, or its host is slow
HEALTHY_S = 60.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILED = 1
# Pipes come before pidfds, since a child may have sent events before it died.
PIPES, ENDS, SIGNALS = range(3)


class BackOff:
    """The delays before a child process that ended is started again.

    The first restart is immediate. The second waits ``first_delay_s``, and each further one twice as long as the one
    before, up to ``max_delay_s``. The count starts again after a child that was ready for HEALTHY_S. The parent gives
    up only after MAX_FAILED_STARTS children in a row that were never ready. So a client that can kill a child cannot
    use up the restarts.
    """

    def __init__(self, first_delay_s: float, max_delay_s: float = MAX_DELAY_S):
        self._first_delay_s = first_delay_s
        self._max_delay_s = max_delay_s
        self._num_short_lives = 0
        self._num_failed_starts = 0

    @property
    def num_short_lives(self) -> int:
        """Number of ends in a row, without HEALTHY_S of service between them."""
        return self._num_short_lives

    def delay(self, ready_for_s: float | None, killed: bool = False) -> float | None:
        """Return the seconds to wait, or None to give up. ready_for_s: how long the child was ready; None = never.
        killed: the child was killed, so this start is not counted as failed."""
        if ready_for_s is not None:
            self._num_failed_starts = 0
        elif not killed:
            self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        if ready_for_s is not None and ready_for_s >= HEALTHY_S:
            self._num_short_lives = 0
        self._num_short_lives += 1
        if self._num_short_lives == 1:
            return 0.0
        return min(self._first_delay_s * 2.0 ** min(self._num_short_lives - 2, 30), self._max_delay_s)


class ProcessTree(ABC):
    """The children of this process, by name. config: of the HTTP servers among them; its shutdown_s is the time for an
    orderly end, after which children are killed. servers: names of these HTTP servers. first_delay_s: see BackOff; with
    faults, the longest delay, too. ports: open already, with a socket for each server; none = open those of the
    config."""

    def __init__(self, config: ServeConfig, servers: Sequence[str], first_delay_s: float, ports: Sequence[Port] = ()):
        self._config = config
        self._servers = list(servers)
        self._serving: set[str] = set()  # servers that get new connections
        self._ports = list(ports)
        self._shutdown_s = config.shutdown_s
        max_delay_s = first_delay_s if config.faults or config.faults_dir else MAX_DELAY_S
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._back_offs: defaultdict[str, BackOff] = defaultdict(lambda: BackOff(first_delay_s, max_delay_s))
        self._due: dict[str, float] = {}  # child that waits for its restart -> time of the restart (time.monotonic())
        self._timers: dict[str, tuple[float, Callable[[], object]]] = {}  # time (time.monotonic()) and action, by key
        self._status = 0
        self._stopping = False
        self._stop_deadline = 0.0
        self._asked_to_stop: set[int] = set()

    # ------------------------------------------------------------------ what a tree defines

    @abstractmethod
    def _begin(self) -> None:
        """Start the first children. The private folder of the sockets, ``_folder``, is there."""

    @abstractmethod
    def _make(self, name: str) -> Child:
        """Start the process of the child ``name``."""

    @abstractmethod
    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        """Handle an event of a child. "refused" has ``why``: the child cannot serve its model or its settings."""

    @abstractmethod
    def _next_to_stop(self) -> Iterable[Child]:
        """Return the children that may end now. Called when the shutdown begins, and after each end of a child from
        then on."""

    @abstractmethod
    def _on_stopped(self, child: Child, status: int) -> None:
        """Handle the end of a child during the shutdown."""

    def _on_end(self, child: Child, status: int) -> None:
        """Handle the end of a child that is not stopped: start it again."""
        self._restart_later(child, status)

    def _on_hopeless(self, name: str) -> None:
        """Handle a child that was not ready in any of its last starts: stop all."""
        self._stop(FAILED)

    # ------------------------------------------------------------------ life

    def run(self) -> int:
        """Block until everything has ended, and return the exit status: 0 after a stop signal, REFUSED if the model
        cannot be served. Raises OSError if a port cannot be bound."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # every connection needs an open file
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._ports = self._ports or open_ports(self._config, len(self._servers))
        self._config = with_ports(self._config, self._ports)
        self._folder = ipc_dir.create()
        restore = self._catch_signals()
        try:
            self._begin()
            self._run_until_ended()
        finally:
            self._kill_all()
            restore()
            for port in self._ports:
                port.close()
            self._selector.close()
            ipc_dir.remove(self._folder)
        return self._status

    # ------------------------------------------------------------------ HTTP servers

    def _sockets(self, name: str) -> list[int]:
        """Return the file descriptors of a server's sockets, one of each port."""
        return [port.sockets[self._servers.index(name)].fileno() for port in self._ports]

    def _let_in(self, name: str) -> None:
        """Let a server have new connections, since it accepts them."""
        if name not in self._serving:
            self._serving.add(name)
            self._share_connections()

    def _keep_out(self, name: str) -> None:
        """Let the other servers have the new connections. If there is no other one, they wait."""
        if name in self._serving:
            self._serving.remove(name)
            self._share_connections()

    def _share_connections(self) -> None:
        if self._serving:
            for port in self._ports:
                port.give_to([self._servers.index(name) for name in self._serving])

    def _server_config(self) -> ServeConfig:
        """Return the settings of the processes that serve HTTP. They share the sessions of agents."""
        session_dir = self._config.session_dir or self._folder
        return msgspec.structs.replace(self._config, session_dir=session_dir, faults_dir=self._faults_dir())

    def _faults_dir(self) -> str:
        """Return the folder in which all processes find what is armed; "" without --faults."""
        if not self._config.faults:
            return self._config.faults_dir  # a replica has the folder of its fleet
        folder = os.path.join(self._folder, "faults")
        os.makedirs(folder, exist_ok=True)
        return folder

    def _answer_counts(self) -> dict[str, str]:
        """Return the environment variable with the folder in which the processes that serve HTTP count together."""
        folder = os.path.join(self._folder, "answers")
        os.makedirs(folder, exist_ok=True)
        return {ANSWER_COUNTS_FOLDER: folder}

    def _print_serving(self, what: str) -> None:
        """Tell the user where ``what`` serves."""
        at = [
            port.url if name == "port" else f"{name.removesuffix('_port')} at {port.url}"
            for name, port in zip(ports_of(self._config), self._ports, strict=False)
        ]
        print(f"FastDeploy {what} {self._config.served_model_name} at {', '.join(at)}", flush=True)

    def _print_refusal(self, why: str) -> None:
        print(f"fastdeploy: cannot serve {self._config.model}: {why}", file=sys.stderr, flush=True)

    def _start(self, name: str) -> None:
        child = self._children[name] = self._make(name)

        def read() -> None:
            events = child.events.read()
            for event in events:
                self._on_event(child, event)
            if not events:  # the child has closed the pipe
                self._forget_fd(child.events.fd)

        def end() -> None:
            read()
            status = self._reap(child)
            del self._children[child.name]
            self._timers.pop(child.name, None)
            self._keep_out(child.name)
            if not self._stopping:
                self._on_end(child, status)
            else:
                self._on_stopped(child, status)
                self._stop_next()

        self._watch(child.events.fd, PIPES, read)
        self._watch(child.pidfd, ENDS, end)

    def _watch(self, fd: Any, rank: int, handle: Callable[[], object], mask: int = selectors.EVENT_READ) -> None:
        self._selector.register(fd, mask, (rank, handle))

    def _forget_fd(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _reap(self, child: Child) -> int:
        self._forget_fd(child.events.fd)
        self._forget_fd(child.pidfd)
        return child.reap()

    def _run_until_ended(self) -> None:
        """Handle what happens until no child is left and none is due."""
        while self._children or (self._due and not self._stopping):
            ready = self._selector.select(self._seconds_to_deadline())
            for key, _ in sorted(ready, key=lambda item: item[0].data[0]):
                if key.fd in self._selector.get_map():  # an earlier event may have killed the child
                    key.data[1]()
            if self._stopping and time.monotonic() >= self._stop_deadline:
                logger.error("some processes did not end within %g s: killing them", self._shutdown_s)
                self._status = self._status or FAILED
                self._kill_all()
            self._run_timers()
            if not self._stopping:
                self._restart_what_is_due()

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds to the next restart or timer or to the end of shutdown_s, or None if there is none."""
        due = [self._stop_deadline] if self._stopping else list(self._due.values())
        due += [due for due, _ in self._timers.values()]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _call_later(self, key: str, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` after ``seconds``, in place of the earlier action of ``key``."""
        self._timers[key] = (time.monotonic() + seconds, action)

    def _run_timers(self) -> None:
        now = time.monotonic()
        for key, (due, action) in list(self._timers.items()):
            if due <= now and key in self._timers:  # an earlier action may have removed it
                del self._timers[key]
                action()

    def _kill_after(self, child: Child, seconds: float, why: str) -> None:
        """Kill ``child`` after ``seconds``, see _unless_heard."""

        def kill() -> None:
            logger.error("killing %s: %s", child.name, why)
            child.kill()

        self._unless_heard(child.name, child, seconds, kill)

    def _unless_heard(self, key: str, child: Child, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` after ``seconds``, unless the child has ended, or this is called with ``key`` again before:
        perhaps for an event that waits unread. A timer that fires late waits once more, since the child may have been
        as slow as this process."""
        due = time.monotonic() + seconds

        def fire() -> None:
            late = time.monotonic() - due > LATE_TIMER_S
            if self._children.get(child.name) is not child:
                return
            for event in child.events.read():
                self._on_event(child, event)
            if key in self._timers:
                return
            if late:
                self._unless_heard(key, child, seconds, action)
            else:
                action()

        self._call_later(key, seconds, fire)

    def _restart_later(self, child: Child, status: int, killed: bool = False) -> None:
        """Start the child again after the delay of its BackOff. killed: see BackOff.delay."""
        now, name = time.monotonic(), child.name
        delay = self._back_offs[name].delay(None if child.ready_since is None else now - child.ready_since, killed)
        if delay is None:
            text = "%s ended with status %d; it was not ready in any of the last %d starts"
            logger.error(text, name, status, MAX_FAILED_STARTS)
            self._on_hopeless(name)
            return
        logger.error("%s ended with status %d: restarting it in %g s", name, status, delay)
        self._warn_of_short_lives(name, status)
        self._due[name] = now + delay

    def _warn_of_short_lives(self, name: str, status: int) -> None:
        """Warn the operator of a child that ends again and again soon after it was ready. Such a child is always
        started again, so the server looks healthy."""
        if (number := self._back_offs[name].num_short_lives) >= MAX_FAILED_STARTS:
            why = signal.Signals(-status).name if status < 0 else f"status {status}"
            text = "%s has ended %d times in a row without %g s of service between, now by %s: look into its log"
            logger.critical(text, name, number, HEALTHY_S, why)

    def _restart_what_is_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._start(name)

    # ------------------------------------------------------------------ signals

    def _catch_signals(self) -> Callable[[], None]:
        """Make signals readable from a pipe. Return a function that restores the old handlers."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        old = {number: signal.signal(number, lambda *_: None) for number in _stop_signals()}
        self._watch(reader, SIGNALS, lambda: self._on_signals(reader.recv(64)))

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

    # ------------------------------------------------------------------ the end

    def _stop_next(self) -> None:
        for child in self._next_to_stop():
            if child.pid not in self._asked_to_stop:  # a second signal would mean: at once
                self._asked_to_stop.add(child.pid)
                child.signal(signal.SIGTERM)

    def _stop(self, status: int) -> None:
        """Begin the shutdown."""
        self._status = self._status or status
        self._stopping = True
        self._stop_deadline = time.monotonic() + self._shutdown_s
        self._stop_next()

    def _kill_all(self) -> None:
        """Kill all children, and return when they have ended, or cannot end."""
        self._stopping = True
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            self._reap(child)
        self._children.clear()
        self._timers.clear()


def _stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the server: STOP_SIGNALS, without SIGHUP if it is ignored, as under nohup."""
    return [n for n in STOP_SIGNALS if n is not signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
