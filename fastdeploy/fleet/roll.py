"""A rolling change: every replica is replaced by one with other settings or another version of this package, one at a
time, while the fleet serves.

The launcher's parent keeps the settings, and how far the change is; each placement has the number of its settings. The
gateway that leads looks at them, and replaces the next replica that has other ones once all replicas are members. So
nothing is lost with this gateway: the next one looks again, and goes on.

A replica gets no new request, and may finish what it has for a while. What is not finished then goes on elsewhere, with
the same tokens. Its next process joins as any other one does: with the weights, adapters and holds of the fleet.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fastdeploy.core.errors import FastDeployError
from fastdeploy.fleet.launcher import Launcher, Roll, RollPhase
from fastdeploy.fleet.replica import Replica, ReplicaEvent, ReplicaState

if TYPE_CHECKING:
    from fastdeploy.fleet.membership import Membership

logger = logging.getLogger(__name__)
LOOK_S = 0.2  # between two looks
BLOCKED_S = 5.0  # a replica with the new settings that cannot join for so long will not
MAX_RESTARTS = 2  # of a replica with the new settings that does not become a member


class RollingChange:
    """Carries the rolling change of ``launcher`` on, while this gateway leads. membership: of this gateway."""

    def __init__(self, membership: Membership, launcher: Launcher):
        self._membership = membership
        self._launcher = launcher
        self._blocked_since: dict[str, float] = {}  # on the event loop's clock

    async def run(self) -> None:
        """Look again and again, until this is cancelled."""
        while True:
            roll = self._launcher.roll
            if roll is not None and roll.phase is RollPhase.REPLICAS and self._membership.leadership.leads:
                try:
                    await self._go_on(roll)
                except FastDeployError as error:
                    logger.warning("the rolling change waits: %s", error.message)
            await asyncio.sleep(LOOK_S)

    async def _go_on(self, roll: Roll) -> None:
        replicas = list(self._membership.replicas.values())
        old = [replica for replica in replicas if replica.placement.settings != roll.settings]
        missing = [replica for replica in replicas if not replica.in_quorum]
        for replica in missing:
            if replica not in old and (why := self._hopeless(replica)):
                logger.error("the rolling change goes back: %s", why)
                await self._launcher.go_back(replica.name, why)
                return
        if not all(replica in old for replica in missing):
            return
        if not old:
            await self._launcher.replicas_replaced()
        elif self._may_join():
            # One that is no member serves nothing, so it is replaced first.
            await self._replace(next(iter(missing), old[0]), roll)

    def _may_join(self) -> bool:
        """Return whether a new process could join now: nobody does during a weight session, nor without the weights,
        which sleeping members cannot give."""
        state = self._membership.state
        return not state.asleep and not any(session.open for session in state.weight_sessions.values())

    def _hopeless(self, replica: Replica) -> str:
        """Return why a replica with the settings of the change will not become a member; "" as long as it may."""
        if replica.failures > MAX_RESTARTS:
            return f"{replica.name}: {replica.why}"
        if replica.state is not ReplicaState.JOINING or not replica.blocked:
            self._blocked_since.pop(replica.name, None)
            return ""
        now = asyncio.get_running_loop().time()
        blocked = now - self._blocked_since.setdefault(replica.name, now) >= BLOCKED_S
        return replica.why if blocked else ""

    async def _replace(self, replica: Replica, roll: Roll) -> None:
        logger.info("rolling change: replacing %s", replica.name)
        if replica.state is ReplicaState.MEMBER:
            replica.advance(ReplicaEvent.DRAIN)
        try:
            async with asyncio.timeout(roll.drain_s):
                await replica.idle.wait()
        except TimeoutError:
            logger.info("%d choices of %s go on elsewhere", replica.in_flight, replica.name)
        if self._membership.replicas.get(replica.name) is replica and self._membership.leadership.leads:
            await self._membership.replace(replica)
