"""The Ray actor that runs one replica of a fleet. Ray finds it a host, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

import msgspec

from fastdeploy.core.config import to_json
from fastdeploy.entrypoints.child import REFUSED, Child
from fastdeploy.entrypoints.process_tree import FAILED, LATE_TIMER_S
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.fleet.launcher import Placement

logger = logging.getLogger(__name__)
THREADS = "FASTDEPLOY_CPU_THREADS"
REPLICA_MAIN = "fastdeploy.entrypoints.replica_main"
RETRY_S = 5.0  # wait before the next try, if a replica ended before it served


class ReplicaSpec(msgspec.Struct, frozen=True):
    """Settings that all replicas of a fleet share. The actor sets the addresses in config, since only the actor knows
    its host. threads: of each replica, for computing. module: run as the replica."""

    config: ReplicaConfig
    threads: int = 1
    module: str = REPLICA_MAIN


class ReplicaStatus(msgspec.Struct, frozen=True):
    """State of one replica. change: counts the changes of this process. placement: None = does not serve yet, or no
    more. refusal: why this replica can never serve here, with the host; "" = it can."""

    change: int
    spec: ReplicaSpec
    placement: Placement | None = None
    refusal: str = ""


class FastDeployReplica:
    """One replica: a process of its own below this actor. The dashboard shows the name of this class.

    The actor dies with its replica, and the replica with its actor. So Ray sees every death, and starts the actor
    again, on another host if need be. A replica whose main process is silent for stall_s is killed. One that refuses
    its model or its settings is not started again.

    Secrets come by :meth:`start`. Ray's dashboard shows neither arguments of constructors nor those of methods, but
    shows a runtime environment; arguments of constructors are stored by Ray's head. address: IP address of this host.
    """

    def __init__(self, name: str, spec: ReplicaSpec, address: str | None = None):
        self._name = name
        self._address = address or _address_of_this_host()
        self._status = ReplicaStatus(1, spec)
        self._changed = asyncio.Event()
        self._child: Child | None = None
        self._life: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._stopping = False

    def __repr__(self) -> str:
        """Return the name that Ray writes before each line of this replica's log."""
        return self._name

    async def start(self, secrets: Mapping[str, str]) -> None:
        """Start the replica, if this actor has not done so yet. secrets: variables of its environment."""
        if self._life is None:
            self._life = asyncio.get_running_loop().create_task(self._run(secrets))

    async def status(self, seen: int) -> ReplicaStatus:
        """Wait until the status has another number than ``seen``, and return it. Numbers begin at 1."""
        while self._status.change == seen:
            await self._changed.wait()
        return self._status

    async def stop(self) -> None:
        """End the replica in an orderly way. Returns when it has ended."""
        self._stopping = True
        if self._child is not None and self._life is not None:
            self._child.signal(signal.SIGTERM)
            await self._life

    async def kill(self) -> None:
        """End the replica and this actor at once."""
        if self._child is not None:
            self._child.kill()
        os._exit(FAILED)

    async def _run(self, secrets: Mapping[str, str]) -> None:
        missing = self._missing_model()
        if missing:
            self._set(refusal=missing)
            return
        # The replica dies with this process: the thread of the event loop lives as long as the process.
        child = self._child = Child(
            self._name,
            self._status.spec.module,
            ["--name", self._name, "--config", self._config()],
            death_signal=signal.SIGKILL,
            whole_group=True,
            environment={**os.environ, THREADS: str(self._status.spec.threads), **secrets},
        )
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(child.pidfd, ended.set)
        loop.add_reader(child.events.fd, self._read_events)
        await ended.wait()
        self._read_events()
        loop.remove_reader(child.events.fd)
        loop.remove_reader(child.pidfd)
        if self._silence is not None:
            self._silence.cancel()
        self._child = None
        exit_status = child.reap()
        served = self._status.placement is not None
        if exit_status == REFUSED and not self._stopping:
            self._set(refusal=self._status.refusal or f"host {self._address} refuses the settings; its log says why")
            return
        self._set()
        if self._stopping:
            return
        if not served:
            await asyncio.sleep(RETRY_S)
        os._exit(FAILED)

    def _config(self) -> str:
        """Return the settings of the replica's process as JSON."""
        config = self._status.spec.config
        engine = msgspec.structs.replace(config.engine, fleet_endpoint=f"tcp://{_bracketed(self._address)}:0")
        return to_json(ReplicaConfig(engine, msgspec.structs.replace(config.serve, host=self._address, port=0)))

    def _missing_model(self) -> str:
        model = self._status.spec.config.engine.model
        if os.path.isfile(os.path.join(model, "config.json")):
            return ""
        return f"model: host {self._address} has no {model}/config.json; every host needs the model at the same path"

    def _read_events(self) -> None:
        assert self._child is not None
        events = self._child.events.read()
        if not events:  # the pipe is closed
            asyncio.get_running_loop().remove_reader(self._child.events.fd)
        for event in events:
            self._on_event(event)

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "serving":
            self._set(placement=Placement(self._name, event["endpoint"], event["url"], event["host"]))
        elif event["event"] == "refused":
            self._set(refusal=f"on host {self._address}: {event['why']}")
        elif event["event"] == "alive":
            self._expect_life()

    def _expect_life(self) -> None:
        """Kill the replica after stall_s, unless this is called again before."""
        if self._silence is not None:
            self._silence.cancel()
        loop = asyncio.get_running_loop()
        due = loop.time() + self._status.spec.config.serve.stall_s
        self._silence = loop.call_at(due, self._silent, due)

    def _silent(self, due: float) -> None:
        """Kill the replica, unless an event waits unread. A timer that fires late waits once more, since the replica
        may have been as slow as this process."""
        assert self._child is not None
        timer, late = self._silence, asyncio.get_running_loop().time() - due > LATE_TIMER_S
        for event in self._child.events.read():
            self._on_event(event)
        if self._silence is not timer:
            return
        if late:
            self._expect_life()
        else:
            logger.error(
                "killing %s: its process was silent for %g s", self._name, self._status.spec.config.serve.stall_s
            )
            self._child.kill()

    def _set(self, placement: Placement | None = None, refusal: str = "") -> None:
        self._status = ReplicaStatus(self._status.change + 1, self._status.spec, placement, refusal)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _address_of_this_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
