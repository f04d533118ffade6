"""The actors of a fleet on Ray. Ray chooses the hosts, and starts again what died; this module says what to run.

They are detached actors with names, in a namespace for each fleet. So they outlive whoever has made them: the next
gateway of the same fleet finds the replicas, and so does the next command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.entrypoints.ray_actor import ActorStatus, FastDeployActor
from fastdeploy.fleet.launcher import Placement

logger = logging.getLogger(__name__)
CONNECT_S = 5.0
KILL_S = 2.0  # for the answer to a kill, before Ray kills the process itself
FIND_S = 2.0  # between two looks for actors that others have added
EXTRA = "pip install 'fastdeploy-cpu[ray]'"


class RayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a fleet on Ray.

    name: of the fleet; its actors are in the namespace "fastdeploy-NAME". address: HOST:PORT of Ray's head; "auto" =
    the cluster that this host belongs to. replicas: how many there are at least; those that were left behind are
    counted, and with 0 none is made. replica_cpus: cores that Ray reserves for each replica. keep_replicas: they run on
    when the launcher is closed. stop_s: seconds for the orderly end of an actor."""

    name: str
    replicas: int
    address: str = "auto"
    replica_cpus: float = 1.0
    keep_replicas: bool = False
    stop_s: float = 15.0

    def check(self) -> RayConfig:
        """Return self, or raise InvalidField naming the first setting that is out of range."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name):
            raise InvalidField("name", f"expected 1 to 64 letters, digits or . _ -, got {self.name!r}")
        if self.address != "auto" and not (self.host_and_port[0] and 0 < self.host_and_port[1] < 65536):
            raise InvalidField("ray", f"expected HOST:PORT of Ray's head, got {self.address!r}")
        if self.replicas < 0:
            raise InvalidField("replicas", f"expected an integer from 0, got {self.replicas}")
        if not 0 <= self.replica_cpus < float("inf"):
            raise InvalidField("replica_cpus", f"expected a number from 0, got {self.replica_cpus}")
        return self

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The two parts of the address: ("", 0) if the address has another form, such as that of Ray's client."""
        match = re.fullmatch(r"(?:\[([^]]+)]|([^:/]+)):(\d{1,5})", self.address)
        return (match.group(1) or match.group(2), int(match.group(3))) if match else ("", 0)

    @property
    def namespace(self) -> str:
        return f"fastdeploy-{self.name}"


def import_ray() -> Any:
    """Return the module ray. Raises InvalidField if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports its use to its makers otherwise
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of two replicas are two lines
    try:
        import ray
    except ImportError:
        raise InvalidField("ray", f"expected Ray to be installed: {EXTRA}") from None
    return ray


class ActorKind(NamedTuple):
    """One kind of actors. prefix: of their names, before a number. cpus: cores that Ray reserves for each."""

    prefix: str
    actor: type[FastDeployActor[Any]]
    cpus: float

    def name(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def number(self, name: str) -> int:
        """Return the number in the name of an actor, or -1 if the actor is of another kind."""
        match = re.fullmatch(rf"{self.prefix}-(\d+)", name)
        return int(match.group(1)) if match else -1


class RayActors:
    """All actors of one kind. Use from one event loop. number: of those that there are at least. spec: settings of all.
    secrets: variables of the environment of their processes, such as the key of the fleet; they are never in what Ray
    shows or stores. failed: called if none can serve, with the reason, once those that were created are removed. keep:
    they run on when this is closed."""

    def __init__(
        self,
        config: RayConfig,
        kind: ActorKind,
        number: int,
        spec: msgspec.Struct,
        secrets: Mapping[str, str],
        failed: Callable[[FastDeployError], object] = lambda error: None,
        keep: bool = False,
    ):
        self._config = config.check()
        self._kind = kind
        self._number = number
        self._spec = spec
        self._keep = keep
        self._secrets = dict(secrets)
        self._failed = failed
        self._ray = import_ray()
        self._actors: dict[str, Any] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._placements: dict[str, Placement] = {}  # the last of each actor, also while it is started again
        self._finding: asyncio.Task[None] | None = None
        self._leaving: set[str] = set()
        self._closing = asyncio.Event()
        self._serving: set[str] = set()
        self._refusals: dict[str, str] = {}
        self._failure: FastDeployError | None = None
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Connect to Ray, find the actors that are there, and create those that are missing. Returns without waiting
        for them. Raises InvalidField if there is no Ray at the address."""
        handler = signal.getsignal(signal.SIGTERM)
        found = await asyncio.to_thread(self._connect)
        if handler is not None and threading.current_thread() is threading.main_thread():
            # Ray's own handler writes a stack, and aborts this process 3 s later, in the middle of an orderly end.
            signal.signal(signal.SIGTERM, handler)
        for name, actor in found.items():
            self._follow(name, actor)
        self._finding = asyncio.get_running_loop().create_task(self._find())

    async def placements(self) -> AsyncIterator[Sequence[Placement]]:
        """Yield where all of them serve, now and after each change. A lost one stays in the list, and gets its new
        address there. Raises InvalidField if none can serve, for instance if no host has the model."""
        try:
            if self._finding is None:
                await self.open()
        except InvalidField as error:
            self._failed(error)
            raise
        while True:
            if self._failure is not None:
                await self.remove_all()
                self._failed(self._failure)
                raise self._failure
            self._changed.clear()
            yield list(self._placements.values())
            await self._changed.wait()

    async def remove(self, name: str) -> None:
        """End an actor for good. One that does not end within stop_s is killed."""
        actor = self._actors.get(name)
        if actor is None:
            return
        self._forget(name).cancel()
        self._leaving.add(name)
        try:
            await asyncio.wait_for(future_of(actor.stop.remote()), self._config.stop_s)
        except (self._ray.exceptions.RayActorError, TimeoutError):
            logger.warning("%s did not end in order", name)
        await asyncio.to_thread(self._ray.kill, actor, no_restart=True)
        self._leaving.discard(name)

    async def close(self) -> None:
        """Remove all, unless they are kept, and disconnect from Ray."""
        await self.remove_all()
        await self.detach()

    async def remove_all(self) -> None:
        """Remove all, unless they are kept."""
        if not self._keep:
            await asyncio.gather(*map(self.remove, list(self._actors)))

    async def detach(self) -> None:
        """Disconnect from Ray. The actors run on."""
        await self.unfollow()
        await asyncio.to_thread(self._ray.shutdown)

    async def unfollow(self) -> None:
        """Ask Ray for nothing from here on: a thread that calls Ray while it shuts down would end this process."""
        self._closing.set()
        if self._finding is not None:
            await asyncio.gather(self._finding, return_exceptions=True)
        followers = [self._forget(name) for name in list(self._actors)]
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)

    # ------------------------------------------------------------------ Ray's blocking calls, in threads

    def _connect(self) -> dict[str, Any]:
        ray, config = self._ray, self._config
        try:
            if config.address != "auto":  # Ray itself waits for minutes
                with socket.create_connection(config.host_and_port, CONNECT_S):
                    pass
            settings = {"namespace": config.namespace, "logging_level": logging.ERROR, "ignore_reinit_error": True}
            ray.init(address=config.address, **settings)
        except (OSError, ValueError) as error:
            where = "on this host" if config.address == "auto" else f"at {config.address}"
            text = f"expected a Ray cluster {where} (ray start --head): {' '.join(str(error).split())}"
            raise InvalidField("ray", text) from None
        found = self._named()
        if found:
            names = ", ".join(sorted(found, key=self._kind.number))
            logger.info("found %s, which were there before", names)
        wanted = map(self._kind.name, range(len(found) + self._number))
        missing = [name for name in wanted if name not in found][: max(self._number - len(found), 0)]
        return found | {name: self._create(name) for name in missing}

    def _named(self) -> dict[str, Any]:
        """Return the actors that there are, by name."""
        ray, found = self._ray, {}
        for name in ray.util.list_named_actors():
            if self._kind.number(name) >= 0:
                try:
                    found[name] = ray.get_actor(name)
                except ValueError:  # removed since
                    continue
        return found

    def _create(self, name: str) -> Any:
        actor_class = self._ray.remote(self._kind.actor).options(
            name=name,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            scheduling_strategy="SPREAD",
            num_cpus=self._kind.cpus,
        )
        return actor_class.remote(name, self._spec)

    async def _find(self) -> None:
        """Follow the actors that others add."""
        while not await self._closes_within(FIND_S):
            for name, actor in (await asyncio.to_thread(self._named)).items():
                if name not in self._actors and name not in self._leaving:
                    logger.info("found %s, which somebody else has added", name)
                    self._follow(name, actor)

    async def _closes_within(self, seconds: float) -> bool:
        """Wait for the time, or until this is closed. Return whether it is closed."""
        try:
            return await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False

    # ------------------------------------------------------------------ one task for each actor

    def _follow(self, name: str, actor: Any) -> None:
        if name in self._actors:  # found just after it was added
            return
        self._actors[name] = actor
        self._followers[name] = asyncio.get_running_loop().create_task(self._watch(name, actor), name=name)

    def _forget(self, name: str) -> asyncio.Task[None]:
        del self._actors[name]
        self._serving.discard(name)
        self._refusals.pop(name, None)
        if self._placements.pop(name, None) is not None:
            self._changed.set()
        return self._followers.pop(name)

    async def _watch(self, name: str, actor: Any) -> None:
        """Follow an actor through all its restarts. Each call waits at the actor until there is something new."""
        exceptions = self._ray.exceptions
        while True:
            try:
                # Retried by Ray until the actor has a host and runs.
                await future_of(actor.start.options(max_task_retries=-1).remote(self._secrets))
                seen = 0
                while True:
                    status = await future_of(actor.status.remote(seen))
                    seen = status.change
                    self._on_status(name, status)
            except exceptions.ActorUnavailableError:
                logger.warning("%s has died, or its host has; Ray starts it again", name)
                self._serving.discard(name)
            except exceptions.ActorDiedError:
                logger.warning("%s was removed by somebody else", name)
                self._forget(name)
                return

    def _on_status(self, name: str, status: ActorStatus[Any]) -> None:
        if status.spec != self._spec:
            text = f"expected the name of a new fleet: {name} of fleet {self._config.name!r} runs with other settings"
            self._fail(InvalidField("name", text), keep=True)
        elif status.placement is not None:
            self._serving.add(name)
            self._refusals.pop(name, None)
            if status.placement != self._placements.get(name):
                self._placements[name] = status.placement
                self._changed.set()
            logger.info("%s serves at %s", name, status.placement.url)
        elif status.refusal:
            self._refusals[name] = status.refusal
            logger.error("%s cannot serve: %s", name, status.refusal)
            if self._refusals.keys() >= self._actors.keys():
                text = f"expected a model that the {self._kind.prefix}s can serve: {status.refusal}"
                self._fail(InvalidField("model", text))

    def _fail(self, error: FastDeployError, keep: bool = False) -> None:
        """Give up. keep: the actors belong to somebody else."""
        self._keep = self._keep or keep
        self._failure = self._failure or error
        self._changed.set()


async def future_of(ref: Any) -> Any:
    """Wait for a result of Ray. If this is cancelled, the call goes on at the actor."""
    return await asyncio.wrap_future(ref.future())
