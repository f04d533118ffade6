"""Renewing the ttl of holds for as long as this process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future

from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.rl.fleet import fan_out
from fastdeploy.rl.replica import Replica

log = logging.getLogger("fastdeploy.rl")

# Of a ttl, between two renewals, and again for each to succeed. So a hold lives through one that fails.
PERIOD = 0.25


class Renewer:
    """Renews holds in a thread of its own, so that a hold stands while the caller's event loop is blocked by training.

    A renewal never places a hold: a late renewal changes nothing. A hold that has ended is only logged here; Holds
    finds it when the hold is needed.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self._replicas = replicas
        self._twins: list[Replica] = []
        self._thread: LoopThread | None = None
        self._running: dict[str, Future[None]] = {}

    def start(self, hold_id: str, ttl_s: float) -> None:
        """Renew ``hold_id`` on all replicas by ``ttl_s`` seconds each time, until :meth:`stop`."""
        self.stop(hold_id)
        if self._thread is None:
            self._thread = LoopThread("renew-holds")
            self._twins = [replica.twin() for replica in self._replicas]
        self._running[hold_id] = self._thread.submit(_renew(self._twins, hold_id, ttl_s))

    def stop(self, hold_id: str) -> None:
        """Renew it no longer."""
        if (future := self._running.pop(hold_id, None)) is not None:
            future.cancel()

    async def close(self) -> None:
        """Renew nothing any longer, and end the thread. What stands ends by its ttl."""
        for hold_id in list(self._running):
            self.stop(hold_id)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.wrap_future(thread.submit(_close(self._twins)))
            await asyncio.to_thread(thread.stop)


async def _close(replicas: Sequence[Replica]) -> None:
    await asyncio.gather(*(replica.close() for replica in replicas))


async def _renew(replicas: Sequence[Replica], hold_id: str, ttl_s: float) -> None:
    period = ttl_s * PERIOD

    async def renew(replica: Replica) -> dict:
        return await replica.call("POST", "/v1/renew", period, json={"hold_id": hold_id, "ttl_s": ttl_s})

    while True:
        await asyncio.sleep(period)
        for report in await fan_out(replicas, renew, period, retry=True):
            if report.error is not None:
                log.warning("hold %s was not renewed on %s: %s", hold_id, report.replica, report.error.message)
