"""Pausing many replicas as one: either all are paused, or none is left paused."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastdeploy.errors import FastDeployError
from fastdeploy.rl.errors import FleetError, Report
from fastdeploy.rl.fleet import fan_out, require_all, to_the_end
from fastdeploy.rl.replica import Replica

RELEASE_S = 30.0  # given to the release of a pause that failed


class Holds:
    """The holds that this client has placed. A hold has one id on all replicas, so that every call may be repeated."""

    def __init__(self, replicas: Sequence[Replica]):
        self._replicas = replicas
        self.placed: set[str] = set()

    async def pause(self, options: dict[str, Any], hold_id: str | None, deadline_s: float) -> tuple[str, list[Report]]:
        """Pause all replicas; the hold's id, and what each answered. If one fails, or the caller is cancelled, the
        hold is released everywhere before FleetError (or the cancellation) is raised."""
        hold_id = hold_id or f"rollout-client-{uuid.uuid4().hex}"
        body = options | {"hold_id": hold_id}

        async def pause(replica: Replica) -> dict[str, Any]:
            return await replica.call("POST", "/v1/pause", deadline_s, json=body)

        try:
            reports = await fan_out(self._replicas, pause, deadline_s, retry=True)
            require_all("the pause failed, and its hold was released everywhere", reports)
        except BaseException as error:
            released = await to_the_end(self._release(hold_id, RELEASE_S))
            if isinstance(error, FleetError) and not all(report.ok for report in released):
                raise FleetError("the pause failed, and its hold could not be released everywhere", [
                    _both(paused, gone) for paused, gone in zip(error.reports, released, strict=True)
                ]) from error  # fmt: skip
            raise
        self.placed.add(hold_id)
        return hold_id, reports

    async def resume(self, hold_id: str | None, deadline_s: float) -> list[Report]:
        """Release a hold everywhere; None = every hold of this client. FleetError if a replica does not answer."""
        reports: list[Report] = []
        for hold in [hold_id] if hold_id is not None else sorted(self.placed):
            reports = require_all("the resume failed", await to_the_end(self._release(hold, deadline_s)))
            self.placed.discard(hold)
        return reports

    async def _release(self, hold_id: str, deadline_s: float) -> list[Report]:
        async def resume(replica: Replica) -> dict[str, Any]:
            return await replica.call("POST", "/v1/resume", deadline_s, json={"hold_id": hold_id})

        return await fan_out(self._replicas, resume, deadline_s, retry=True)


def _both(paused: Report, released: Report) -> Report:
    """One report of a pause and the release after it, told by what is worse."""
    if released.error is None:
        return paused
    why = f"the hold may stand: {released.error.message}"
    return Report(paused.replica, error=FastDeployError(f"{paused.error.message}; {why}" if paused.error else why))
