"""The joins of a gateway that leads: each is tried until the replica is a member, or is lost or restarted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastdeploy.core.errors import EngineError, NotLeader, ReplicaMisfit
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.join import JoinBlocked, Joiner, RestartNeeded
from fastdeploy.fleet.leader import GatewayLeadership
from fastdeploy.fleet.replica import Replica, ReplicaEvent
from fastdeploy.fleet.state import FleetState

logger = logging.getLogger(__name__)
RETRY_S, MAX_RETRY_S = 0.1, 10.0  # between two tries of a join, or two restarts
JOIN_TRIES = 5  # then the replica is restarted


class Joins:
    """The joins that are under way. joiner: makes one try. fence(replica, why): has a replica restarted.
    blocked(replica): called when a replica turns out to be blocked, for those that wait for its join. spawn: begins a
    task whose error ends this process."""

    def __init__(
        self,
        config: FleetConfig,
        joiner: Joiner,
        state: FleetState,
        leadership: GatewayLeadership,
        fence: Callable[[Replica, str], None],
        blocked: Callable[[Replica], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ):
        self._config = config
        self._joiner = joiner
        self._state = state
        self._leadership = leadership
        self._fence = fence
        self._blocked = blocked
        self._spawn = spawn
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def begin(self, replica: Replica) -> None:
        """Begin to let a replica join, if this gateway leads."""
        if self._leadership.leads and replica not in self._tasks:
            self._tasks[replica] = self._spawn(self._join(replica))

    def end(self, replica: Replica) -> None:
        """Forget the join of a replica that has left the state ``joining``. Unless the replica is a member, the join is
        given up."""
        if (task := self._tasks.pop(replica, None)) is not None and not replica.in_quorum:
            task.cancel()

    def end_all(self) -> None:
        """Give up all joins, since this gateway leads no more."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _join(self, replica: Replica) -> None:
        """Try until the replica is a member, or is restarted. Cancelled when it is lost."""
        state, failures = self._state, 0
        while self._leadership.leads:
            revision = state.revision
            try:
                await self._joiner.bring(replica)
            except EngineError as error:
                if not replica.client.connected.is_set():
                    return  # Replica handles its loss
                replica.why, failures = error.message, failures + 1
            except NotLeader as error:  # the lease of an earlier gateway runs there
                replica.why = error.message
                await asyncio.sleep(error.detail.get("lease_left_s", 0.0) + RETRY_S)
                continue
            except (JoinBlocked, ReplicaMisfit) as error:  # a restart would not help
                was_blocked, replica.why, replica.blocked = replica.blocked, error.message, True
                if not was_blocked:
                    self._blocked(replica)
                await self._wait_for_change(revision)
                continue
            except RestartNeeded as error:
                self._fence(replica, error.message)
                return
            except Exception as error:
                logger.exception("replica %s could not join", replica.name)
                replica.why, failures = str(error), failures + 1
            else:
                # In the same turn of the event loop as the engine's last answer: nobody has changed the fleet since.
                replica.failures, replica.why, replica.blocked = 0, "", False
                replica.advance(ReplicaEvent.JOINED)
                self._leadership.confirm(replica, state.changes)
                if replica.drains:
                    replica.advance(ReplicaEvent.DRAIN)
                return
            if failures >= JOIN_TRIES:
                self._fence(replica, f"it could not join: {replica.why}")
                return
            await asyncio.sleep(retry_s(failures))

    async def _wait_for_change(self, revision: int) -> None:
        try:
            await asyncio.wait_for(self._state.until(lambda: self._state.revision != revision), self._config.rebuild_s)
        except TimeoutError:
            return


def retry_s(failures: int) -> float:
    """Return the seconds until the next try, after so many failures in a row."""
    return min(RETRY_S * 2 ** min(failures, 10), MAX_RETRY_S)
