"""Renewing the ttl of holds for as long as this process lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.rl.fan_out import fan_out
from fastdeploy.rl.replica import Replica

log = logging.getLogger("fastdeploy.rl")

# Time between two renewals, and time-out of a renewal, as a fraction of the ttl. A hold survives one failed renewal.
PERIOD = 0.25


class Hold(NamedTuple):
    """Names a hold: its id, and the adapter whose requests it pauses (None: those of the whole engine)."""

    hold_id: str
    lora_name: str | None = None

    def body(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a call that concerns this hold, with ``fields``."""
        scope = {} if self.lora_name is None else {"lora_name": self.lora_name}
        return fields | {"hold_id": self.hold_id} | scope


class HoldRenewer:
    """Renews holds in a thread of its own, so that a hold stands while training blocks the caller's event loop.

    A renewal never places a hold, so a renewal after the hold's end changes nothing. A failed renewal is only logged
    here. Holds.require_standing checks the holds before a commit.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self._replicas = replicas
        self._replicas_of_thread: list[Replica] = []
        self._thread: LoopThread | None = None
        self._running: dict[Hold, Future[None]] = {}

    def start(self, hold: Hold, ttl_s: float) -> None:
        """Renew ``hold`` on all replicas by ``ttl_s`` seconds each time, until :meth:`stop`."""
        self.stop(hold)
        if self._thread is None:
            self._thread = LoopThread("renew-holds")
            self._replicas_of_thread = [replica.with_own_connections() for replica in self._replicas]
        self._running[hold] = self._thread.submit(_renew(self._replicas_of_thread, hold, ttl_s))

    def stop(self, hold: Hold) -> None:
        """Stop the renewal of ``hold``, if there is one."""
        if (future := self._running.pop(hold, None)) is not None:
            future.cancel()

    async def close(self) -> None:
        """Stop all renewals and end the thread. Holds that stand end by their ttl."""
        for hold in list(self._running):
            self.stop(hold)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.wrap_future(thread.submit(_close(self._replicas_of_thread)))
            await asyncio.to_thread(thread.stop)


async def _close(replicas: Sequence[Replica]) -> None:
    await asyncio.gather(*(replica.close() for replica in replicas))


async def _renew(replicas: Sequence[Replica], hold: Hold, ttl_s: float) -> None:
    period, body = ttl_s * PERIOD, hold.body(ttl_s=ttl_s)
    while True:
        await asyncio.sleep(period)
        reports = await fan_out(replicas, lambda r: r.call("POST", "/v1/renew", period, json=body), period, retry=True)
        for report in reports:
            if report.error is not None:
                log.warning("hold %s was not renewed on %s: %s", hold.hold_id, report.replica, report.error.message)
