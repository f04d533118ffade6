"""The way of requests to replicas: at once, or in a queue as long as no replica may have them.

A request also waits for an adapter that the fleet does not have, and that it finds in the engines' adapter root. Such a
lookup is a load of the whole fleet, so all members have the same adapter with the same number. One member is asked
first whether the folder is there. A name that nobody has changes nothing, and keeps no replica from joining."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fastdeploy.core.errors import (
    EngineDead,
    EngineError,
    FastDeployError,
    ModelNotFound,
    NotLeader,
    QueueFull,
    UpdateInProgress,
    WrongOrder,
)
from fastdeploy.core.outputs import DEADLINE, QUEUE_TIMEOUT
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.homes import Homes
from fastdeploy.fleet.relay import Relay, RequestPart
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Route, may_have
from fastdeploy.fleet.state import FleetState
from fastdeploy.inter_communicator import messages as m

MAX_REFUSALS = 3  # of one request, by so many replicas. Then the client gets the refusal
RETRY_AFTER_S = 1  # for a client whose request finds the queue full
MAX_LOOKUPS = 64  # at a time. Engines bound the reads, but not the names that wait for one


class Lookups:
    """Looks up adapters in the adapter root, one lookup for each name at a time. state: of the fleet. members: those
    that take part in calls. call: makes a call on them. ended(name, error): called after a lookup. With an error, the
    requests for the name must fail; without one, they can be sent, or must be looked at again."""

    def __init__(
        self,
        state: FleetState,
        members: Callable[[], Sequence[Replica]],
        call: Callable[[m.Args], Awaitable[dict[str, Any]]],
        ended: Callable[[str, FastDeployError | None], None],
    ):
        self._state, self._members, self._call, self._ended = state, members, call, ended
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loads: Counter[str] = Counter()

    def ready(self, name: str) -> bool:
        """Return whether a request for an adapter may be sent now ("" = for the base model). If the adapter must be
        looked up, begin to do so, or wait for a load of the name. Raises UpdateInProgress if too many names are being
        looked up."""
        if not name or name in self._state.adapters:
            return True
        if not any(replica.client.model_info.get("has_adapter_root") for replica in self._members()):
            return True  # an engine refuses it
        if name not in self._running and not self._loads[name]:
            if len(self._running) >= MAX_LOOKUPS:
                raise UpdateInProgress(f"{MAX_LOOKUPS} adapters are being looked up; try again after that")
            self._running[name] = asyncio.get_running_loop().create_task(self._look_up(name), name="fleet-lookup")
        return False

    @contextlib.contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Requests for an unknown name wait for a load that a client makes meanwhile."""
        self._loads[name] += 1
        try:
            yield
        finally:
            self._loads[name] -= 1
            self._loads += Counter()  # forgets what is 0

    async def settled(self, name: str) -> None:
        """Wait until no lookup of this name runs. A load begins after that."""
        while (task := self._running.get(name)) is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """End all lookups."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_up(self, name: str) -> None:
        error: FastDeployError | None = None
        try:
            path = (await self._call(m.LookUpAdapterArgs(name)))["path"]
            await self._call(m.LoadAdapterArgs(name, FolderSource(path), path=path, lookup=True))
        except (EngineDead, NotLeader, WrongOrder):  # members were lost, or a reset has dropped the load
            pass
        except ModelNotFound as missing:
            error = ModelNotFound(missing.message, param="model")
        except FastDeployError as refused:
            error = refused
        finally:
            del self._running[name]
        self._ended(name, error)


class Limit(NamedTuple):
    """A time on the event loop's clock until which a part may wait. stop_reason: of its choices then; "" = the request
    fails."""

    at: float
    stop_reason: str = ""
    why: str = ""


class Dispatcher:
    """The dispatcher of request parts to replicas. Those that must wait are sent in their order. open_replicas: those
    that take requests. max_waiting: returns how many choices that have been at no replica may wait here.
    ready(adapter): see Lookups. least_epoch: returns that of all sessions, see FleetView. Use from one event loop
    only."""

    def __init__(
        self,
        config: FleetConfig,
        homes: Homes,
        open_replicas: Callable[[], Sequence[Replica]],
        max_waiting: Callable[[], int],
        ready: Callable[[str], bool] = lambda adapter: True,
        least_epoch: Callable[[], int] = lambda: 0,
    ):
        self._failover_s = config.failover_s
        self._homes = homes
        self._open_replicas = open_replicas
        self._max_waiting = max_waiting
        self._ready = ready
        self._session_epoch = least_epoch
        # The parts in their order, each with the number of its choices that count for max_waiting; and their sum.
        self._waiting: dict[RequestPart, int] = {}
        self._num_new = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = False  # whether ``send_waiting`` was called since the task began its round
        self.closed = False

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for a replica."""
        return sum(part.num for part in self._waiting)

    async def submit(self, part: RequestPart, holder: Replica | None = None) -> None:
        """Send a new part, behind those that wait. holder: the replica that has its result already. Raises
        DuplicateRequest, and QueueFull for a part that would wait beyond max_waiting."""
        if holder is not None:
            with contextlib.suppress(EngineError):
                await part.relay.send(part, Route(holder, 0))
                return
        if self._waiting or not await self._send(part):
            if self._num_new + part.num > (limit := self._max_waiting()):
                message = f"no replica takes the request now, and at most {limit} choices may wait for one"
                raise QueueFull(f"{message} (--max-waiting of every replica)", retry_after=RETRY_AFTER_S)
            self._wait(part)

    def lost(self, part: RequestPart) -> None:
        """See Placer."""
        if self.closed:
            part.relay.outer.fail(EngineDead("the gateway is shutting down"))
        else:
            self._wait(part)

    def refused(self, part: RequestPart, replica: Replica, error: Exception) -> bool:
        """See Placer."""
        part.refused_by.add(replica.name)
        if len(part.refused_by) >= MAX_REFUSALS or all(r.name in part.refused_by for r in self._open_replicas()):
            return False
        self._wait(part)
        return True

    def forget(self, parts: Iterable[RequestPart]) -> None:
        """Take parts out of the queue."""
        for part in parts:
            self._num_new -= self._waiting.pop(part, 0)
            if part.timer is not None:
                part.timer.cancel()
                part.timer = None

    def send_waiting(self) -> None:
        """Try again to send what waits, since the replicas have changed."""
        self._changed = True
        if self._waiting and self._task is None and not self.closed and self._open_replicas():
            self._task = asyncio.get_running_loop().create_task(self._send_all(), name="fleet-dispatch")

    async def close(self) -> None:
        """End the sending. What waits is not sent any more."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self, part: RequestPart) -> bool:
        """Send a part. Return False if no replica may have it now."""
        if not self._ready(part.relay.request.adapter):
            return False
        relay, lost = part.relay, set(part.refused_by)
        while (route := await self._homes.place(relay.request, self._least_epoch(relay), lost)) is not None:
            if part not in relay.parts:  # it has ended while another gateway was asked,
                return True
            if not self._open_replicas() or not may_have(route.replica, self._least_epoch(relay), lost):
                continue  # or the replica has
            try:
                await relay.send(part, route)
            except EngineError:
                lost.add(route.replica.name)
            else:
                return True
        return False

    def _least_epoch(self, relay: Relay) -> int:
        """Return the oldest weight_epoch that the next token of a request may have."""
        if relay.request.stale_ok:
            return 0
        return max(relay.seen.epoch, self._session_epoch()) if relay.request.session else relay.seen.epoch

    def _wait(self, part: RequestPart) -> None:
        if part not in self._waiting:
            self._waiting[part] = 0 if part.relay.num_losses else part.num
            self._num_new += self._waiting[part]
        part.has_waited = True
        if part.timer is None:
            limit = min(self._limits(part.relay))
            part.timer = asyncio.get_running_loop().call_at(limit.at, self._give_up, part, limit)
        self.send_waiting()

    def _limits(self, relay: Relay) -> Iterator[Limit]:
        """Yield the times until which a request may wait."""
        request = relay.request
        yield Limit(asyncio.get_running_loop().time() + self._failover_s)
        if request.deadline_s is not None:
            yield Limit(relay.began + request.deadline_s, DEADLINE, "its deadline has passed")
        if request.max_queue_s is not None and not any(relay.tokens):
            why = "it waited for its first step for longer than max_queue_s"
            yield Limit(relay.began + request.max_queue_s, QUEUE_TIMEOUT, why)

    def _give_up(self, part: RequestPart, limit: Limit) -> None:
        relay = part.relay
        self.forget([part])
        relay.parts.discard(part)
        if limit.stop_reason:
            relay.end(part.open_choices, limit.why, limit.stop_reason)
        else:
            epoch = self._least_epoch(relay)
            old = f" with weight_epoch {epoch} or later" if epoch else ""
            relay.outer.fail(EngineDead(f"no replica{old} took the request within {self._failover_s:g} s"))

    async def _send_all(self) -> None:
        """Send all that can be sent, in order. Begin again if parts or replicas came meanwhile."""
        try:
            while self._changed:
                self._changed = False
                for part in list(self._waiting):
                    if part in self._waiting:
                        await self._send_one(part)
        finally:
            self._task = None

    async def _send_one(self, part: RequestPart) -> None:
        try:
            if await self._send(part):
                self.forget([part])
        except Exception as error:  # the request cannot be sent to any replica
            part.relay.outer.fail(error)
