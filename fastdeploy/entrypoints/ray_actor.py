"""A Ray actor that runs one process of a fleet. Ray finds it a host, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from fastdeploy.entrypoints.child import REFUSED, Child
from fastdeploy.entrypoints.process_tree import FAILED, LATE_TIMER_S
from fastdeploy.fleet.launcher import Placement

logger = logging.getLogger(__name__)
RETRY_S = 5.0  # wait before the next try, if the process ended before it served
Spec = TypeVar("Spec", bound=msgspec.Struct)


class ActorStatus(msgspec.Struct, Generic[Spec], frozen=True):
    """State of one actor. change: counts the changes of this process. placement: None = does not serve yet, or no
    more. refusal: why this actor can never serve here, with the host; "" = it can."""

    change: int
    spec: Spec
    placement: Placement | None = None
    refusal: str = ""


class FastDeployActor(ABC, Generic[Spec]):
    """A process below this actor. The dashboard shows the name of the class.

    The actor dies with its process, and the process with its actor. So Ray sees every death, and starts the actor
    again, on another host if need be. A process that is silent for ``stall_s`` is killed. One that refuses its model or
    its settings is not started again.

    Secrets come by :meth:`start`. Ray's dashboard shows neither arguments of constructors nor those of methods, but
    shows a runtime environment; arguments of constructors are stored by Ray's head. address: IP address of this host.
    """

    def __init__(self, name: str, spec: Spec, address: str | None = None):
        self._name = name
        self._address = address or _address_of_this_host()
        self._spec = spec
        self._status = ActorStatus(1, spec)
        self._changed = asyncio.Event()
        self._child: Child | None = None
        self._life: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._stopping = False

    def __repr__(self) -> str:
        """Return the name that Ray writes before each line of this actor's log."""
        return self._name

    # ------------------------------------------------------------------ what an actor defines

    @property
    @abstractmethod
    def _model(self) -> str:
        """The folder of the model, which must be on this host."""

    @property
    @abstractmethod
    def _stall_s(self) -> float: ...

    @abstractmethod
    def _start_process(self, secrets: Mapping[str, str]) -> Child:
        """Start the process, as the leader of a group that is killed with this one. Raises OSError."""

    @abstractmethod
    def _placement_of(self, event: Mapping[str, Any]) -> Placement | None:
        """Return where the process serves, if the event says that it does."""

    # ------------------------------------------------------------------ calls of gateways and of the command

    async def start(self, secrets: Mapping[str, str]) -> None:
        """Start the process, if this actor has not done so yet. secrets: variables of its environment."""
        if self._life is None:
            self._life = asyncio.get_running_loop().create_task(self._run(secrets))

    async def status(self, seen: int) -> ActorStatus[Spec]:
        """Wait until the status has another number than ``seen``, and return it. Numbers begin at 1."""
        while self._status.change == seen:
            await self._changed.wait()
        return self._status

    async def stop(self) -> None:
        """End the process in an orderly way. Returns when it has ended."""
        self._stopping = True
        if self._child is not None and self._life is not None:
            self._child.signal(signal.SIGTERM)
            await self._life

    async def kill(self) -> None:
        """End the process and this actor at once."""
        if self._child is not None:
            self._child.kill()
        os._exit(FAILED)

    # ------------------------------------------------------------------ the process

    async def _run(self, secrets: Mapping[str, str]) -> None:
        missing = self._missing_model()
        if missing:
            self._set(refusal=missing)
            return
        try:
            # The process dies with this one: the thread of the event loop lives as long as this process.
            child = self._child = self._start_process(secrets)
        except OSError as error:  # its port is taken here, but perhaps not on another host
            await self._try_again(f"{self._name} on host {self._address}: {error}")
            return
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
            await self._try_again(f"{self._name} ended with status {exit_status} before it served")
        os._exit(FAILED)

    async def _try_again(self, why: str) -> None:
        """Let Ray start this actor again, after a while."""
        logger.error("%s: trying again in %g s", why, RETRY_S)
        await asyncio.sleep(RETRY_S)
        os._exit(FAILED)

    def _missing_model(self) -> str:
        if os.path.isfile(os.path.join(self._model, "config.json")):
            return ""
        text = f"host {self._address} has no {self._model}/config.json; every host needs the model at the same path"
        return f"model: {text}"

    def _read_events(self) -> None:
        assert self._child is not None
        events = self._child.events.read()
        if not events:  # the pipe is closed
            asyncio.get_running_loop().remove_reader(self._child.events.fd)
        for event in events:
            self._on_event(event)

    def _on_event(self, event: dict[str, Any]) -> None:
        if (placement := self._placement_of(event)) is not None:
            self._set(placement=placement)
        elif event["event"] == "refused":
            self._set(refusal=f"on host {self._address}: {event['why']}")
        elif event["event"] == "alive":
            self._expect_life()

    def _expect_life(self) -> None:
        """Kill the process after its time of silence, unless this is called again before."""
        if self._silence is not None:
            self._silence.cancel()
        loop = asyncio.get_running_loop()
        due = loop.time() + self._stall_s
        self._silence = loop.call_at(due, self._silent, due)

    def _silent(self, due: float) -> None:
        """Kill the process, unless an event waits unread. A timer that fires late waits once more, since the process
        may have been as slow as this one."""
        assert self._child is not None
        timer, late = self._silence, asyncio.get_running_loop().time() - due > LATE_TIMER_S
        for event in self._child.events.read():
            self._on_event(event)
        if self._silence is not timer:
            return
        if late:
            self._expect_life()
        else:
            logger.error("killing %s: its process was silent for %g s", self._name, self._stall_s)
            self._child.kill()

    def _set(self, placement: Placement | None = None, refusal: str = "") -> None:
        self._status = ActorStatus(self._status.change + 1, self._spec, placement, refusal)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _address_of_this_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def bracketed(address: str) -> str:
    """Return an IP address as it stands in a URL."""
    return f"[{address}]" if ":" in address else address
