"""Calls of operators on one replica. The gateway that leads makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.replica import ReplicaState
from fastdeploy.inter_communicator.messages import ReplicaArgs


async def operate(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    """Make a call, see ReplicaArgs. Raises ReplicaNotFound, or the error of the launcher."""
    return await ACTIONS[args.action](membership, args)


async def _add(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    return {"name": await membership.add()}


async def _drain(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    """Return when nothing runs there, or after the timeout."""
    try:
        async with asyncio.timeout(args.timeout_s):
            await membership.drain(args.name)
    except TimeoutError:
        pass
    replica = membership.find(args.name)
    entry = replica.describe()
    if membership.views.has_followers:  # "in_flight" has the requests of this gateway only
        entry["in_flight"] = sum(replica.report.get(number, 0) for number in ("running", "waiting"))
    return entry


async def _undrain(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    membership.undrain(args.name)
    await membership.views.caught_up()
    return membership.find(args.name).describe()


async def _remove(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    await membership.remove(args.name, args.timeout_s)
    await membership.views.caught_up()
    return {"name": args.name, "state": ReplicaState.REMOVED.value}


ACTIONS: dict[str, Callable[[Membership, ReplicaArgs], Awaitable[dict[str, Any]]]] = {
    "add": _add,
    "drain": _drain,
    "undrain": _undrain,
    "remove": _remove,
}
