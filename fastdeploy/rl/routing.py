"""Which replica takes a request: that of its session, else the one with the fewest choices in flight."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.errors import is_busy, may_pass
from fastdeploy.rl.replica import Replica

MAX_SESSIONS = 100_000


class Router:
    """Replicas that failed, reject requests or hold other weights are avoided. A session moves only when its replica
    is gone or failed, not when it merely rejects for a moment."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = list(replicas)
        self._sessions: OrderedDict[Hashable, Replica] = OrderedDict()
        self._changed = asyncio.Event()
        self._anything_published = False

    @asynccontextmanager
    async def lease(self, session: Hashable | None, choices: int) -> AsyncIterator[Replica]:
        """A replica that was well when last heard of, with ``choices`` added to its load. Waits while there is none."""
        replica = await self._acquire(session, choices)
        try:
            yield replica
        finally:
            replica.in_flight -= choices

    async def _acquire(self, session: Hashable | None, choices: int) -> Replica:
        while True:
            replica = self._pick(session)
            if replica is None:
                await self._wait()
                continue
            replica.in_flight += choices
            try:
                if not replica.doubtful or await self._probe(replica):
                    return replica
            except BaseException:
                replica.in_flight -= choices
                raise
            replica.in_flight -= choices

    def _pick(self, session: Hashable | None) -> Replica | None:
        now = _now()
        usable = [r for r in self.replicas if r.stale is None and r.retry_at <= now]
        home = self._sessions.get(session) if session is not None else None
        if home in usable:
            self._sessions.move_to_end(session)
            return home
        best = min(usable, key=lambda r: r.in_flight, default=None)
        if best is not None and session is not None and (home is None or home.stale or home.failures):
            self._sessions[session] = best
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return best

    async def _wait(self) -> None:
        """Until a replica may be tried again, or :meth:`wake`."""
        self._changed.clear()
        due = min((r.retry_at for r in self.replicas if r.stale is None), default=None)
        try:
            async with asyncio.timeout_at(due):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _probe(self, replica: Replica) -> bool:
        """Ask a replica that failed, or was never used, for its identity and whether it takes requests. One probe
        serves all callers. Raises the replica's answer if no later probe can succeed: the key is wrong, or the service
        is another one."""
        async with replica.probing:
            if not replica.doubtful:
                return replica.stale is None
            if replica.retry_at > _now():
                return False
            try:
                self.seen(replica, (await replica.call("GET", "/health")).get("boot_id"))
                replica.well()
                await replica.call("GET", "/ready")
            except FastDeployError as error:
                if not may_pass(error):
                    raise
                self.refused(replica, error)
                return False
            return replica.stale is None

    def refused(self, replica: Replica, error: FastDeployError) -> None:
        """``replica`` failed with ``error``, or says that it takes no requests just now."""
        wait = error.detail.get("retry_after", 0.0)
        if is_busy(error):
            replica.busy(_now(), wait)
        else:
            replica.failed(_now(), wait)

    def seen(self, replica: Replica, boot_id: str | None) -> bool:
        """Note the engine that ``replica`` runs. False if it is another one, without what was published."""
        restarted = boot_id is not None and replica.boot_id is not None and boot_id != replica.boot_id
        if restarted and self._anything_published:
            replica.stale = "its engine restarted without the published weights"
        replica.boot_id = boot_id or replica.boot_id
        return replica.stale is None

    def published(self, replica: Replica, boot_id: str | None) -> None:
        """``replica`` holds what was published last."""
        self._anything_published = True
        replica.boot_id, replica.stale = boot_id or replica.boot_id, None
        replica.well()
        self._changed.set()

    def left_behind(self, replica: Replica, why: str) -> None:
        """``replica`` does not hold what the others do: no requests until it is published to."""
        replica.stale = why

    def wake(self) -> None:
        """Replicas that rejected requests may take them again."""
        for replica in self.replicas:
            if not replica.failures:
                replica.retry_at = 0.0
        self._changed.set()


def _now() -> float:
    return asyncio.get_running_loop().time()
