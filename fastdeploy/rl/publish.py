"""Publishing weights to many replicas in two phases: first stage the tensors on all, then commit on all.

If a replica refuses a tensor or cannot be reached, the sessions are aborted everywhere and no replica commits. Each
replica is sent what it lacks: a delta if it serves the base of the delta, else the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastdeploy.rl.errors import FleetError, Report, Unreachable
from fastdeploy.rl.fan_out import fan_out, require_all, run_shielded
from fastdeploy.rl.holds import Holds
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.replica_session import ReplicaSession
from fastdeploy.rl.routing import Router
from fastdeploy.rl.staleness import PublicationLedger
from fastdeploy.rl.state_transfer import Group, Transfer

CONFIRM_S = 30.0  # limit of each call that begins or aborts a session, or asks what a replica serves
NOT_COMMITTED = "no replica has committed"


@dataclass(frozen=True)
class Publication:
    """Weights that all replicas have committed.

    number: counts this client's publications from 1. version: the label on the first replica (without a given version,
    each replica makes a label of its weight_epoch). reports: of the commits. tensors, nbytes: sent to each replica; to
    the one that was sent most, if they differ. full_nbytes: of the whole. changed_values: values that differ from the
    last publication. Both are None if not known. deltas: urls of the replicas that were sent a delta."""

    number: int
    version: str
    reports: list[Report]
    tensors: int = 0
    nbytes: int = 0
    full_nbytes: int | None = None
    changed_values: int | None = None
    deltas: tuple[str, ...] = ()


class Publisher:
    """Publishes weights, one publication at a time: callers of :meth:`publish` hold ``lock``."""

    def __init__(self, replicas: Sequence[Replica], router: Router, ledger: PublicationLedger, holds: Holds):
        self._replicas = replicas
        self._router = router
        self._ledger = ledger
        self._holds = holds
        self.lock = asyncio.Lock()

    async def publish(self, options: dict[str, Any], transfer: Transfer, deadline_s: float) -> Publication:
        """Stage the transfer on all replicas, then commit. options: the body of /v1/weights/begin. Raises FleetError
        with a report per replica: if staging failed, no replica has committed; if some commits failed, those replicas
        get no requests until the next publication. Raises HoldLost if a hold of this client has ended on a replica;
        then no replica has committed."""
        sessions = [ReplicaSession(replica, options, CONFIRM_S) for replica in self._replicas]
        try:
            async with asyncio.timeout(deadline_s):
                await self._each(sessions, lambda session: session.begin(transfer.base), CONFIRM_S)
                for group in _groups(sessions):
                    await self._stage([s for s in sessions if s.replica.url in group.urls], group, transfer, deadline_s)
                await self._holds.require_standing(CONFIRM_S)
        except BaseException as error:
            await run_shielded(self._call(sessions, ReplicaSession.abort, CONFIRM_S))
            if isinstance(error, TimeoutError):
                late = Unreachable(f"not staged within {deadline_s} s")
                raise FleetError(NOT_COMMITTED, [Report(r.url, error=late) for r in self._replicas]) from error
            raise
        number = self._ledger.begin_publication()
        reports = await run_shielded(self._commit(sessions, transfer, number))
        require_all("the commit failed on some replicas, which are left out until they are published to", reports)
        return Publication(
            number,
            str(reports[0].unwrap()["version"]),
            reports,
            max(session.tensors for session in sessions),
            max(session.nbytes for session in sessions),
            transfer.full_nbytes,
            transfer.changed_values,
            tuple(session.replica.url for session in sessions if session.is_delta),
        )

    async def _stage(
        self, sessions: Sequence[ReplicaSession], group: Group, transfer: Transfer, deadline_s: float
    ) -> None:
        async with aclosing(transfer.calls(group)) as calls:
            async for call in calls:
                stage = partial(ReplicaSession.stage, call=call, timeout_s=deadline_s)
                await self._each(sessions, stage, deadline_s)

    async def _commit(self, sessions: Sequence[ReplicaSession], transfer: Transfer, number: int) -> list[Report]:
        async def commit(session: ReplicaSession) -> dict[str, Any]:
            done, replica = await session.commit(transfer), session.replica
            self._ledger.record_commit(number, replica.url, done["boot_id"], done["weight_epoch"])
            self._router.note_published(replica, done["boot_id"])
            return done

        reports = await self._call(sessions, commit, 3 * CONFIRM_S)
        self._ledger.end_publication()
        if any(report.ok for report in reports):
            for session, report in zip(sessions, reports, strict=True):
                if report.error is not None:
                    self._router.exclude(session.replica, f"its commit failed: {report.error.message}")
        return reports

    async def _each(
        self,
        sessions: Sequence[ReplicaSession],
        call: Callable[[ReplicaSession], Awaitable[dict[str, Any]]],
        timeout_s: float,
    ) -> None:
        """Make a call that must succeed on all sessions."""
        require_all(NOT_COMMITTED, await self._call(sessions, call, timeout_s))

    async def _call(
        self,
        sessions: Sequence[ReplicaSession],
        call: Callable[[ReplicaSession], Awaitable[dict[str, Any]]],
        timeout_s: float,
    ) -> list[Report]:
        by_replica = {session.replica: session for session in sessions}
        return await fan_out(list(by_replica), lambda replica: call(by_replica[replica]), timeout_s)


def _groups(sessions: Sequence[ReplicaSession]) -> list[Group]:
    """Return groups of replicas that are sent the same, those of a delta first."""
    found: dict[tuple[bool, str], list[str]] = {}
    for session in sessions:
        alone = session.group
        found.setdefault((not alone.is_delta, alone.dtype), []).append(session.replica.url)
    return [Group(dtype, not is_whole, tuple(urls)) for (is_whole, dtype), urls in sorted(found.items())]
