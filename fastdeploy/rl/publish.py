"""Publishing weights to many replicas in two phases: the tensors everywhere, then the commits.

If a replica refuses a tensor or cannot be reached, the sessions are aborted everywhere and nobody has committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastdeploy.rl.errors import FleetError, Report, Unreachable
from fastdeploy.rl.fleet import fan_out, require_all, to_the_end
from fastdeploy.rl.pause import Holds
from fastdeploy.rl.replica import Replica
from fastdeploy.rl.routing import Router
from fastdeploy.rl.staleness import Ledger

CONFIRM_S = 30.0  # given to abort a session, and to learn whether a commit took place whose answer was lost
Chunks = AsyncGenerator[dict[str, Any], None]


@dataclass(frozen=True)
class Publication:
    """number: of this client's publications, from 1. version: the label, as the first replica has it (without one given
    each replica makes its own, of its epoch). reports: of the commits. tensors, nbytes: sent to each replica."""

    number: int
    version: str
    reports: list[Report]
    tensors: int = 0
    nbytes: int = 0


class Publisher:
    """One publication at a time. ``Chunks`` yields keyword arguments of Replica.call for /v1/weights/chunk."""

    def __init__(self, replicas: Sequence[Replica], router: Router, ledger: Ledger, holds: Holds):
        self._replicas = replicas
        self._router = router
        self._ledger = ledger
        self._holds = holds
        self.lock = asyncio.Lock()
        self.held: dict[str, tuple[str, int]] = {}  # replica -> (boot id, weight_epoch) of its last commit of ours

    async def up_to_date(self) -> bool:
        """Whether every replica still serves what this client committed last, and nobody else has since."""
        reports = await fan_out(self._replicas, lambda r: r.call("GET", "/v1/weights"), CONFIRM_S)
        return all(
            r.ok and self.held.get(r.replica) == (r.result["boot_id"], r.result["weight_epoch"]) for r in reports
        )

    async def publish(self, options: dict[str, Any], chunks: Callable[[], Chunks], deadline_s: float) -> Publication:
        """Stage chunks on all replicas, then commit. options: the body of /v1/weights/begin. Raises FleetError with a
        report per replica: while staging, no replica has committed; at the commit, those that failed are left out until
        they are published to again. Raises HoldLost, and no replica has committed, if the client believes the replicas
        paused and they are not."""
        sessions: dict[str, dict[str, Any]] = {}
        tensors = nbytes = 0
        try:
            async with asyncio.timeout(deadline_s):
                await self._begin(options, sessions)
                async with aclosing(chunks()) as parts:
                    async for chunk in parts:
                        staged = await self._stage(sessions, chunk, deadline_s)
                        tensors, nbytes = tensors + staged["tensors"], nbytes + staged["nbytes"]
                await self._holds.require_standing(CONFIRM_S)
        except BaseException as error:
            await to_the_end(self._abort(sessions))
            if isinstance(error, TimeoutError):
                late = Unreachable(f"not staged within {deadline_s} s")
                raise FleetError("nobody has committed", [Report(r.url, error=late) for r in self._replicas]) from error
            raise
        number = self._ledger.begin()
        reports = await to_the_end(self._commit(sessions, number))
        require_all("the commit failed on some replicas, which are left out until they are published to", reports)
        return Publication(number, str(reports[0].result["version"]), reports, tensors, nbytes)

    async def _begin(self, options: dict[str, Any], sessions: dict[str, dict[str, Any]]) -> None:
        async def begin(replica: Replica) -> dict[str, Any]:
            sessions[replica.url] = await replica.call("POST", "/v1/weights/begin", json=options)
            return sessions[replica.url]

        require_all("nobody has committed", await fan_out(self._replicas, begin, CONFIRM_S))

    async def _stage(self, sessions: dict[str, dict[str, Any]], chunk: dict[str, Any], deadline_s: float) -> dict:
        async def stage(replica: Replica) -> dict[str, Any]:
            session = {"session_id": sessions[replica.url]["session_id"]}
            body = {"json": chunk["json"] | session} if "json" in chunk else {}
            params = {"params": chunk.get("params", {}) | session} if "content" in chunk else {}
            return await replica.call("POST", "/v1/weights/chunk", deadline_s, **(chunk | body | params))

        reports = require_all("nobody has committed", await fan_out(self._replicas, stage, deadline_s))
        return reports[0].result

    async def _abort(self, sessions: dict[str, dict[str, Any]]) -> None:
        async def abort(replica: Replica) -> dict[str, Any]:
            session = {"session_id": sessions[replica.url]["session_id"]}
            return await replica.call("POST", "/v1/weights/abort", json=session)

        # One that cannot be reached drops its session when the lease ends.
        await fan_out([r for r in self._replicas if r.url in sessions], abort, CONFIRM_S)

    async def _commit(self, sessions: dict[str, dict[str, Any]], number: int) -> list[Report]:
        async def commit(replica: Replica) -> dict[str, Any]:
            session = sessions[replica.url]
            try:
                done = await replica.call("POST", "/v1/weights/commit", json={"session_id": session["session_id"]})
            except Unreachable:
                done = await self._confirm(replica, session)
            self._ledger.committed(number, replica.url, done["boot_id"], done["weight_epoch"])
            self._router.published(replica, done["boot_id"])
            self.held[replica.url] = (done["boot_id"], done["weight_epoch"])
            return done

        reports = await fan_out(self._replicas, commit, 3 * CONFIRM_S)
        self._ledger.end()
        if any(report.ok for report in reports):
            for replica, report in zip(self._replicas, reports, strict=True):
                if not report.ok:
                    self._router.left_behind(replica, f"its commit failed: {report.error.message}")
                    self.held.pop(replica.url, None)
        return reports

    async def _confirm(self, replica: Replica, session: dict[str, Any]) -> dict[str, Any]:
        """The answer to a commit was lost: what became of it. Raises Unreachable if it did not take place."""

        async def info(replica: Replica) -> dict[str, Any]:
            return await replica.call("GET", "/v1/weights")

        (report,) = await fan_out([replica], info, CONFIRM_S, retry=True)
        if report.error is not None:
            raise report.error
        now = report.result
        if (now["boot_id"], now["weight_epoch"]) != (session["boot_id"], session["weight_epoch"] + 1):
            raise Unreachable("the connection broke at the commit, which did not take place")
        return now | {"status": "committed"}
