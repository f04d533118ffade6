"""Make one call to every replica, within a deadline, and report each replica's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastdeploy.core.errors import FastDeployError
from fastdeploy.rl.errors import FleetError, Report, Unreachable
from fastdeploy.rl.replica import Replica

RETRY_S, MAX_RETRY_S = 0.1, 2.0
T = TypeVar("T")


async def fan_out(
    replicas: Sequence[Replica],
    call: Callable[[Replica], Awaitable[dict[str, Any]]],
    timeout_s: float,
    retry: bool = False,
) -> list[Report]:
    """Make ``call`` on all replicas at once; return a report for each, in their order. A replica's error is in its
    report, and is not raised.

    retry: repeat the call, which must be idempotent, on a replica that cannot be reached or has no live engine, until
    ``timeout_s`` has passed.
    """

    async def report(replica: Replica) -> Report:
        last: FastDeployError = Unreachable(f"no answer within {timeout_s} s")
        wait = RETRY_S
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return Report(replica.url, await call(replica))
                    except FastDeployError as error:
                        last = error
                        if not (retry and (isinstance(error, Unreachable) or error.code == "engine_dead")):
                            return Report(replica.url, error=error)
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, MAX_RETRY_S)
        except TimeoutError:
            return Report(replica.url, error=last)

    return list(await asyncio.gather(*map(report, replicas)))


def require_all(failure: str, reports: list[Report]) -> list[Report]:
    """Return ``reports``. Raises FleetError with the message ``failure`` if one of them has an error."""
    if not all(report.ok for report in reports):
        raise FleetError(failure, reports)
    return reports


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, also if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
