"""Pausing many replicas as one, whole or one adapter: either all are paused, or none stays paused.

The ttl of a hold is renewed while this process lives. If the process dies, the ttl ends and the servers run again.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastdeploy.core.errors import FastDeployError, HoldNotFound, ModelNotFound, NotLeader
from fastdeploy.rl.errors import FleetError, HoldLost, Report
from fastdeploy.rl.fan_out import fan_out, require_all, run_shielded
from fastdeploy.rl.hold_renewal import Hold, HoldRenewer
from fastdeploy.rl.replica import Replica

RELEASE_S = 30.0  # limit of the release after a pause that failed
TTL_S = 60.0
# Answers to a renewal that say that the hold has ended. A hold of an adapter keeps the adapter's name known.
GONE = (HoldNotFound, ModelNotFound)


def new_hold_id() -> str:
    return f"rollout-client-{uuid.uuid4().hex}"


class Holds:
    """The holds that this client has placed. A hold has the same id on all replicas, so every call may be repeated."""

    def __init__(self, replicas: Sequence[Replica], ttl_s: float | None = TTL_S):
        self._replicas = replicas
        self._ttl_s = ttl_s
        self._renewer = HoldRenewer(replicas)
        self._ttl_of: dict[Hold, float | None] = {}  # the ttl of each hold that was placed
        self._unreleased: set[Hold] = set()  # holds whose release was tried, and may have failed

    async def pause(self, hold: Hold, options: dict[str, Any], deadline_s: float) -> list[Report]:
        """Pause all replicas and return their reports. options: fields of /v1/pause; a hold with ttl_s None does not
        end by itself. If a replica fails or the caller is cancelled, the hold is released everywhere before FleetError
        (or the cancellation) is raised."""
        body = hold.body(**{"ttl_s": self._ttl_s} | options)
        try:
            if body["ttl_s"] is not None:  # started before the pause: draining may take longer than the ttl
                self._renewer.start(hold, body["ttl_s"])
            reports = await fan_out(
                self._replicas, lambda r: r.call("POST", "/v1/pause", deadline_s, json=body), deadline_s, retry=True
            )
            require_all("the pause failed, and its hold was released everywhere", reports)
        except BaseException as error:
            self._renewer.stop(hold)
            self._ttl_of.pop(hold, None)
            released = await run_shielded(self._release(hold, RELEASE_S, {}))
            if isinstance(error, FleetError) and not all(report.ok for report in released):
                raise FleetError("the pause failed, and its hold could not be released everywhere", [
                    _joined(paused, gone) for paused, gone in zip(error.reports, released, strict=True)
                ]) from error  # fmt: skip
            raise
        self._ttl_of[hold] = body["ttl_s"]
        return reports

    async def resume_all(self, deadline_s: float, lora_name: str | None = None) -> list[Report]:
        """Release every hold of this client, or of this client on the adapter ``lora_name``. See :meth:`resume`."""
        reports: list[Report] = []
        failures: list[FleetError] = []
        holds = [h for h in self._ttl_of.keys() | self._unreleased if lora_name in (None, h.lora_name)]
        for hold in sorted(holds, key=lambda h: (h.lora_name or "", h.hold_id)):
            try:
                reports = await self.resume(hold, deadline_s)
            except FleetError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return reports

    async def resume(self, hold: Hold, deadline_s: float) -> list[Report]:
        """Release a hold everywhere. Raises FleetError if a replica does not answer (its hold is no longer renewed),
        and HoldLost if this client's hold had ended before its release."""
        self._renewer.stop(hold)
        lost: dict[str, FastDeployError] = {}
        reports = await run_shielded(self._release(hold, deadline_s, lost))
        require_all("the resume failed; a hold that still stands ends by its ttl", reports)
        self._require_none_lost(hold, lost)
        return reports

    async def require_standing(self, deadline_s: float, lora_name: str | None = None) -> None:
        """Raise HoldLost if a hold of this client has ended on a replica. The holds of adapters count for a load of
        their adapter ``lora_name`` only. Replicas that do not answer are ignored."""
        for hold, ttl_s in list(self._ttl_of.items()):
            if hold.lora_name not in (None, lora_name):
                continue

            body = hold.body(ttl_s=ttl_s)

            def renew(replica: Replica, body: dict[str, Any] = body) -> Awaitable[dict[str, Any]]:
                return replica.call("POST", "/v1/renew", deadline_s, json=body)

            reports = await fan_out(self._replicas, renew, deadline_s)
            self._require_none_lost(hold, {r.replica: r.error for r in reports if isinstance(r.error, GONE)})

    async def close(self) -> None:
        """Stop the renewal of all holds."""
        await self._renewer.close()

    async def _release(self, hold: Hold, deadline_s: float, lost: dict[str, FastDeployError]) -> list[Report]:
        """Release a hold everywhere. Adds to ``lost`` the replicas on which a hold of this client had ended before."""
        # A release is repeated if its answer is lost, and then finds no hold. So each replica is checked only once.
        unchecked = set(self._replicas) if hold in self._ttl_of else set()
        renewal = hold.body(ttl_s=self._ttl_of.pop(hold, None))
        self._unreleased.add(hold)

        async def resume(replica: Replica) -> dict[str, Any]:
            if replica in unchecked:
                try:
                    await replica.call("POST", "/v1/renew", deadline_s, json=renewal)
                except GONE as error:
                    lost[replica.url] = error
                unchecked.discard(replica)
            try:
                return await replica.call("POST", "/v1/resume", deadline_s, json=hold.body())
            except ModelNotFound:
                return {"released": []}  # a hold of this adapter would keep its name known

        reports = await fan_out(self._replicas, resume, deadline_s, retry=True)
        if all(report.ok for report in reports):
            self._unreleased.discard(hold)
        return reports

    def _require_none_lost(self, hold: Hold, lost: dict[str, FastDeployError]) -> None:
        if lost:
            message = f"hold {hold.hold_id} ended before it was released; the servers may have run meanwhile"
            raise HoldLost(message, [Report(r.url, error=lost.get(r.url)) for r in self._replicas])


@contextmanager
def note_cleanup_failure(error: BaseException) -> Iterator[None]:
    """Add a FleetError of the block to ``error`` as a note. The block cleans up; the caller then raises ``error``."""
    try:
        yield
    except FleetError as other:
        error.add_note(f"afterwards: {other.message}")


def _joined(paused: Report, released: Report) -> Report:
    """Join a replica's reports of a failed pause and of the release after it. An engine that belongs to a fleet has
    refused both, and has no hold."""
    if released.error is None or isinstance(paused.error, NotLeader):
        return paused
    why = f"the hold may stand: {released.error.message}"
    return Report(paused.replica, error=FastDeployError(f"{paused.error.message}; {why}" if paused.error else why))
