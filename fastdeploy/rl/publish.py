"""Publishing weights to many replicas in two phases: first stage the tensors on all, then commit on all.

If a replica refuses a tensor or cannot be reached, the sessions are aborted everywhere and no replica commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastdeploy.rl.errors import FleetError, Report, Unreachable
from fastdeploy.rl.fan_out import fan_out, require_all, run_shielded
from fastdeploy.rl.holds import Holds
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.routing import Router
from fastdeploy.rl.staleness import PublicationLedger

CONFIRM_S = 30.0  # limit of each call that begins or aborts a session, or asks what a replica serves
NOT_COMMITTED = "no replica has committed"
PartCalls = AsyncGenerator[dict[str, Any], None]  # keyword arguments of Replica.call for each /v1/weights/chunk
Sessions = dict[str, dict[str, Any]]  # by url of the replica: the answer of /v1/weights/begin


@dataclass(frozen=True)
class Publication:
    """Weights that all replicas have committed.

    number: counts this client's publications from 1. version: the label on the first replica (without a given version,
    each replica makes a label of its weight_epoch). reports: of the commits. tensors, nbytes: sent to each."""

    number: int
    version: str
    reports: list[Report]
    tensors: int = 0
    nbytes: int = 0


class Publisher:
    """Publishes weights, one publication at a time: callers of :meth:`publish` hold ``lock``."""

    def __init__(self, replicas: Sequence[Replica], router: Router, ledger: PublicationLedger, holds: Holds):
        self._replicas = replicas
        self._router = router
        self._ledger = ledger
        self._holds = holds
        self.lock = asyncio.Lock()
        # By replica: (boot id, weight_epoch) of this client's last commit.
        self._last_commits: dict[str, tuple[str, int]] = {}

    async def serves_last_publication(self) -> bool:
        """Return whether every replica still serves this client's last publication."""
        reports = await fan_out(self._replicas, lambda r: r.call("GET", "/v1/weights"), CONFIRM_S)
        return all(r.ok and self._last_commits.get(r.replica) == _identity(r.unwrap()) for r in reports)

    async def publish(
        self, options: dict[str, Any], part_calls: Callable[[], PartCalls], deadline_s: float
    ) -> Publication:
        """Stage all parts on all replicas, then commit. options: the body of /v1/weights/begin. Raises FleetError with
        a report per replica: if staging failed, no replica has committed; if some commits failed, those replicas get no
        requests until the next publication. Raises HoldLost if a hold of this client has ended on a replica;
        then no replica has committed."""
        sessions: Sessions = {}
        tensors = nbytes = 0
        try:
            async with asyncio.timeout(deadline_s):
                await self._begin(options, sessions)
                async with aclosing(part_calls()) as calls:
                    async for call in calls:
                        staged = await self._stage(sessions, call, deadline_s)
                        tensors, nbytes = tensors + staged["tensors"], nbytes + staged["nbytes"]
                await self._holds.require_standing(CONFIRM_S)
        except BaseException as error:
            await run_shielded(self._abort(sessions))
            if isinstance(error, TimeoutError):
                late = Unreachable(f"not staged within {deadline_s} s")
                raise FleetError(NOT_COMMITTED, [Report(r.url, error=late) for r in self._replicas]) from error
            raise
        number = self._ledger.begin_publication()
        reports = await run_shielded(self._commit(sessions, number))
        require_all("the commit failed on some replicas, which are left out until they are published to", reports)
        return Publication(number, str(reports[0].unwrap()["version"]), reports, tensors, nbytes)

    async def _begin(self, options: dict[str, Any], sessions: Sessions) -> None:
        async def begin(replica: Replica) -> dict[str, Any]:
            sessions[replica.url] = await replica.call("POST", "/v1/weights/begin", json=options)
            return sessions[replica.url]

        require_all(NOT_COMMITTED, await fan_out(self._replicas, begin, CONFIRM_S))

    async def _stage(self, sessions: Sessions, part_call: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        place = "json" if "json" in part_call else "params"

        def stage(replica: Replica) -> Awaitable[dict[str, Any]]:
            arguments = part_call | {place: part_call.get(place, {}) | _session_id(sessions, replica)}
            return replica.call("POST", "/v1/weights/chunk", deadline_s, **arguments)

        reports = require_all(NOT_COMMITTED, await fan_out(self._replicas, stage, deadline_s))
        return reports[0].unwrap()

    async def _abort(self, sessions: Sessions) -> None:
        def abort(replica: Replica) -> Awaitable[dict[str, Any]]:
            return replica.call("POST", "/v1/weights/abort", json=_session_id(sessions, replica))

        # A replica that cannot be reached drops its session when the lease ends.
        await fan_out([r for r in self._replicas if r.url in sessions], abort, CONFIRM_S)

    async def _commit(self, sessions: Sessions, number: int) -> list[Report]:
        async def commit(replica: Replica) -> dict[str, Any]:
            try:
                done = await replica.call("POST", "/v1/weights/commit", json=_session_id(sessions, replica))
            except Unreachable:
                done = await self._confirm(replica, sessions[replica.url])
            self._ledger.record_commit(number, replica.url, done["boot_id"], done["weight_epoch"])
            self._router.note_published(replica, done["boot_id"])
            self._last_commits[replica.url] = _identity(done)
            return done

        reports = await fan_out(self._replicas, commit, 3 * CONFIRM_S)
        self._ledger.end_publication()
        if any(report.ok for report in reports):
            for replica, report in zip(self._replicas, reports, strict=True):
                if report.error is not None:
                    self._router.exclude(replica, f"its commit failed: {report.error.message}")
                    self._last_commits.pop(replica.url, None)
        return reports

    async def _confirm(self, replica: Replica, session: dict[str, Any]) -> dict[str, Any]:
        """Return what ``replica`` serves after a commit whose answer was lost. Raises Unreachable if the commit did not
        take place."""
        (report,) = await fan_out([replica], lambda r: r.call("GET", "/v1/weights"), CONFIRM_S, retry=True)
        now = report.unwrap()
        if _identity(now) != (session["boot_id"], session["weight_epoch"] + 1):
            raise Unreachable("the connection broke at the commit, which did not take place")
        return now | {"status": "committed"}


def _session_id(sessions: Sessions, replica: Replica) -> dict[str, Any]:
    return {"session_id": sessions[replica.url]["session_id"]}


def _identity(weights: dict[str, Any]) -> tuple[str, int]:
    return weights["boot_id"], weights["weight_epoch"]
