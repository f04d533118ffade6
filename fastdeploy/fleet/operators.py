"""Calls of operators on replicas. The gateway that leads makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.replica import Replica, ReplicaState
from fastdeploy.inter_communicator.messages import ReplicaArgs


async def operate(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    """Make a call, see ReplicaArgs. Raises ReplicaNotFound, or the error of the launcher."""
    return await ACTIONS[args.action](membership, args)


async def _list(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    return {"replicas": [_entry(membership, replica) for replica in membership.replicas.values()]}


def _entry(membership: Membership, replica: Replica) -> dict[str, Any]:
    """Return the replica's entry of GET /v1/replicas. Its own "in_flight" has the requests of this gateway only."""
    entry = replica.describe()
    if membership.views.has_followers:
        entry["in_flight"] = sum(replica.report.get(number, 0) for number in ("running", "waiting"))
    return entry


async def _add(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    return {"name": await membership.add()}


async def _drain(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    """Return when nothing runs there, or after the timeout."""
    try:
        async with asyncio.timeout(args.timeout_s):
            await membership.drain(args.name)
    except TimeoutError:
        pass
    return _entry(membership, membership.find(args.name))


async def _undrain(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    membership.undrain(args.name)
    await membership.views.caught_up()
    return membership.find(args.name).describe()


async def _remove(membership: Membership, args: ReplicaArgs) -> dict[str, Any]:
    await membership.remove(args.name, args.timeout_s)
    await membership.views.caught_up()
    return {"name": args.name, "state": ReplicaState.REMOVED.value}


ACTIONS: dict[str, Callable[[Membership, ReplicaArgs], Awaitable[dict[str, Any]]]] = {
    "list": _list,
    "add": _add,
    "drain": _drain,
    "undrain": _undrain,
    "remove": _remove,
}
