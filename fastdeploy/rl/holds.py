"""The holds of a client: pauses of the whole engine or of one adapter. Their ttl is renewed while this process lives.
If the process dies, the ttl ends and the server runs again."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fastdeploy.core.errors import FastDeployError, HoldNotFound, ModelNotFound, NotLeader
from fastdeploy.core.loop_thread import LoopThread
from fastdeploy.rl.connection import Connection, repeat, run_shielded
from fastdeploy.rl.errors import HoldLost

log = logging.getLogger("fastdeploy.rl")

RELEASE_S = 30.0  # limit of the release after a pause that failed
TTL_S = 60.0
# Time between two renewals, and time-out of a renewal, as a fraction of the ttl. A hold survives one failed renewal.
PERIOD = 0.25
# Answers to a renewal that say that the hold has ended. A hold of an adapter keeps the adapter's name known.
GONE = (HoldNotFound, ModelNotFound)


class Hold(NamedTuple):
    """Names a hold: its id, and the adapter whose requests it pauses (None: those of the whole engine)."""

    hold_id: str
    lora_name: str | None = None

    def body(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a call that concerns this hold, with ``fields``."""
        scope = {} if self.lora_name is None else {"lora_name": self.lora_name}
        return fields | {"hold_id": self.hold_id} | scope

    def lost(self) -> HoldLost:
        return HoldLost(f"hold {self.hold_id} ended before it was released; the server may have run meanwhile")


def new_hold_id() -> str:
    return f"rollout-client-{uuid.uuid4().hex}"


class Holds:
    """The holds that this client has placed. Every call names its hold, so it may be repeated."""

    def __init__(self, connection: Connection, ttl_s: float | None = TTL_S):
        self._connection = connection
        self._ttl_s = ttl_s
        self._renewer = _HoldRenewer(connection)
        self._ttl_of: dict[Hold, float | None] = {}  # the ttl of each hold that was placed
        self._unreleased: set[Hold] = set()  # holds whose release was tried, and may have failed

    async def pause(self, hold: Hold, options: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Pause, and return the server's report. options: fields of /v1/pause; a hold with ttl_s None does not end by
        itself. If the pause fails or the caller is cancelled, the hold is released before the error is raised. The
        error has a note if the hold could not be released."""
        body = hold.body(**{"ttl_s": self._ttl_s} | options)
        try:
            if body["ttl_s"] is not None:  # started before the pause: draining may take longer than the ttl
                self._renewer.start(hold, body["ttl_s"])
            report = await self._repeat("pause", body, deadline_s)
        except BaseException as error:
            self._renewer.stop(hold)
            self._ttl_of.pop(hold, None)
            with note_cleanup_failure(error, "the hold may stand until its ttl ends"), suppress(NotLeader):
                await run_shielded(self._release(hold, RELEASE_S))  # by NotLeader an engine has refused both calls
            raise
        self._ttl_of[hold] = body["ttl_s"]
        return report

    async def resume_all(self, deadline_s: float, lora_name: str | None = None) -> dict[str, Any]:
        """Release every hold of this client, or of this client on the adapter ``lora_name``. See :meth:`resume`."""
        report: dict[str, Any] = {}
        failures: list[FastDeployError] = []
        holds = [h for h in self._ttl_of.keys() | self._unreleased if lora_name in (None, h.lora_name)]
        for hold in sorted(holds, key=lambda h: (h.lora_name or "", h.hold_id)):
            try:
                report = await self.resume(hold, deadline_s)
            except FastDeployError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return report

    async def resume(self, hold: Hold, deadline_s: float) -> dict[str, Any]:
        """Release a hold. Raises Unreachable if the server does not answer (the hold is no longer renewed), and
        HoldLost if this client's hold had ended before its release."""
        self._renewer.stop(hold)
        return await run_shielded(self._release(hold, deadline_s))

    async def _release(self, hold: Hold, deadline_s: float) -> dict[str, Any]:
        # A release whose answer is lost is repeated, and then finds no hold. So the hold is looked for before.
        is_placed, ttl_s = hold in self._ttl_of, self._ttl_of.pop(hold, None)
        self._unreleased.add(hold)
        lost: FastDeployError | None = None
        if is_placed:
            try:
                await self._repeat("renew", hold.body(ttl_s=ttl_s), deadline_s)
            except GONE as error:
                lost = error
        report: dict[str, Any] = {"released": []}
        with suppress(ModelNotFound):  # a hold of this adapter would keep its name known
            report = await self._repeat("resume", hold.body(), deadline_s)
        self._unreleased.discard(hold)
        if lost is not None:
            raise hold.lost() from lost
        return report

    async def _repeat(self, name: str, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        return await repeat(lambda: self._connection.call("POST", f"/v1/{name}", deadline_s, json=body), deadline_s)

    async def require_standing(self, timeout_s: float, lora_name: str | None = None) -> None:
        """Raise HoldLost if a hold of this client has ended. The holds of adapters count for a load of their adapter
        ``lora_name`` only. A server that does not answer is ignored: the call that follows will say so."""
        for hold, ttl_s in list(self._ttl_of.items()):
            if hold.lora_name in (None, lora_name):
                try:
                    await self._connection.call("POST", "/v1/renew", timeout_s, json=hold.body(ttl_s=ttl_s))
                except GONE as error:
                    raise hold.lost() from error
                except FastDeployError:
                    pass

    async def close(self) -> None:
        """Stop the renewal of all holds. Holds that stand end by their ttl."""
        await self._renewer.close()


class _HoldRenewer:
    """The renewal of holds in a thread of its own, so that a hold stands while training blocks the caller's event loop.

    A renewal never places a hold, so a renewal after the hold's end changes nothing. A failed renewal is only logged
    here. Holds.require_standing checks the holds before a commit.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._thread: LoopThread | None = None
        self._connection_of_thread: Connection | None = None
        self._running: dict[Hold, Future[None]] = {}

    def start(self, hold: Hold, ttl_s: float) -> None:
        """Renew ``hold`` by ``ttl_s`` seconds each time, until :meth:`stop`."""
        self.stop(hold)
        if self._thread is None:
            self._thread = LoopThread("renew-holds")
            self._connection_of_thread = self._connection.copy()
        assert self._connection_of_thread is not None
        self._running[hold] = self._thread.submit(_renew(self._connection_of_thread, hold, ttl_s))

    def stop(self, hold: Hold) -> None:
        """Stop the renewal of ``hold``, if there is one."""
        if (future := self._running.pop(hold, None)) is not None:
            future.cancel()

    async def close(self) -> None:
        """Stop all renewals and end the thread."""
        for hold in list(self._running):
            self.stop(hold)
        thread, self._thread = self._thread, None
        if thread is not None:
            assert self._connection_of_thread is not None
            await asyncio.wrap_future(thread.submit(self._connection_of_thread.close()))
            await asyncio.to_thread(thread.stop)


async def _renew(connection: Connection, hold: Hold, ttl_s: float) -> None:
    period, body = ttl_s * PERIOD, hold.body(ttl_s=ttl_s)
    while True:
        await asyncio.sleep(period)
        try:
            await repeat(lambda: connection.call("POST", "/v1/renew", period, json=body), period)
        except FastDeployError as error:
            log.warning("hold %s was not renewed at %s: %s", hold.hold_id, connection.url, error.message)


@contextmanager
def note_cleanup_failure(error: BaseException, what: str = "afterwards") -> Iterator[None]:
    """Add an error of the block to ``error`` as a note. The block cleans up; the caller then raises ``error``."""
    try:
        yield
    except FastDeployError as other:
        error.add_note(f"{what}: {other.message}")
