"""Sources of the events that a page shows: one engine, or all members of a fleet as if they were one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.core.errors import EngineDead, FastDeployError
from fastdeploy.core.events import EventKind
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.membership import Membership
from fastdeploy.fleet.reports import merge
from fastdeploy.inter_communicator.messages import EventsArgs

LATE_S = 1.0  # a member that answers later is not shown, until it answers again
OF_REQUESTS = frozenset(
    {EventKind.QUEUED, EventKind.ADMITTED, EventKind.FROZEN, EventKind.THAWED, EventKind.PREEMPTED, EventKind.FINAL}
)


class Source(Protocol):
    """A source of what a page shows: it gives the reply to EventsArgs without "next". num_engines: number of engines
    that are asked for a reply."""

    @property
    def num_engines(self) -> int: ...

    def begin_anew(self) -> None:
        """Forget what was read. The next answer begins with all requests, if they are asked for."""
        ...

    async def read(self, whole: bool) -> dict[str, Any]:
        """Return what has happened since the last call. whole: with all live requests. "anew" in the answer: it has all
        requests, also if it was not asked for them, since others run now. Raises FastDeployError."""
        ...


class EngineSource:
    """One engine. replica: of a fleet's replica of this name."""

    num_engines = 1

    def __init__(self, client: ServingClient, replica: str = ""):
        self._client = client
        self._replica = replica
        self._boot_id, self._after = "", 0

    def begin_anew(self) -> None:
        self._boot_id, self._after = "", 0

    async def read(self, whole: bool) -> dict[str, Any]:
        client = self._engine()
        reply = await client.call(EventsArgs(self._after, whole))
        boot_id = reply["state"]["boot_id"]
        if self._boot_id not in ("", boot_id):  # another engine, whose events are counted from 0
            self.begin_anew()
            return await self.read(True) | {"anew": True}
        self._boot_id, self._after = boot_id, reply.pop("next")
        return reply

    def _engine(self) -> ServingClient | EngineClient:
        if not self._replica or not isinstance(self._client, FleetClient):
            return self._client
        replica = self._client.membership.replicas.get(self._replica)
        if replica is None:
            raise EngineDead(f"the fleet has no replica {self._replica!r} any more")
        return replica.client


@dataclass
class Member:
    """What a fleet's source knows of one member. ahead_s: seconds by which the member's clock is ahead of that of this
    process. num_tokens: as of its last answer."""

    client: EngineClient
    boot_id: str = ""
    after: int = 0
    ahead_s: float = float("-inf")
    num_tokens: int = 0


class FleetSource:
    """All members of a fleet. Names of requests begin with the name of their replica. Events of a pause and of weights
    are those of one member, since they come to all members. Times are on the clock of this process."""

    def __init__(self, client: FleetClient):
        self._client = client
        self._members: dict[str, Member] = {}
        self._num_tokens = 0
        self._shown: dict[str, str] = {}  # boot ids of the engines of the last answer, by replica
        self._changed = False  # other engines than before: the next answer has all requests

    @property
    def num_engines(self) -> int:
        return len(self._members)

    def begin_anew(self) -> None:
        self._members.clear()
        self._shown.clear()
        self._changed = False

    async def read(self, whole: bool) -> dict[str, Any]:
        anew, self._changed = self._changed, False
        replies = await self._ask(self._client.membership, whole or anew)
        if not replies:
            raise EngineDead("no replica is a member of the fleet, or none answers")
        shown = {name: reply["state"]["boot_id"] for name, reply in replies.items()}
        self._changed = bool(self._shown) and shown != self._shown
        self._shown = shown
        return self._merged(replies) | ({"anew": True} if anew else {})

    async def _ask(self, fleet: Membership, whole: bool) -> dict[str, dict[str, Any]]:
        """Return the answers of the members that answer in time, by name."""
        now_there = {replica.name: replica.client for replica in fleet.quorum}
        known = self._members
        self._members = {
            name: known[name] if name in known and known[name].client is client else Member(client)
            for name, client in now_there.items()
        }
        calls = {
            name: asyncio.ensure_future(member.client.call(EventsArgs(member.after, whole)))
            for name, member in self._members.items()
        }
        if calls:
            await asyncio.wait(calls.values(), timeout=LATE_S)
        replies = {}
        for name, call in calls.items():
            if not call.done():
                call.cancel()
            elif (error := call.exception()) is None:
                replies[name] = call.result()
            elif not isinstance(error, FastDeployError):
                raise error
        return replies

    def _merged(self, replies: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        events: list[list[Any]] = []
        for i, (name, reply) in enumerate(replies.items()):
            member, state = self._members[name], reply["state"]
            if member.boot_id != state["boot_id"]:
                member.boot_id, member.num_tokens, member.ahead_s = state["boot_id"], state["tokens"], float("-inf")
            self._num_tokens += state["tokens"] - member.num_tokens
            member.num_tokens, member.after = state["tokens"], reply["next"]
            member.ahead_s = max(member.ahead_s, reply["now"] - now)  # that of the fastest answer
            for at, kind, what, fields in reply["events"]:
                if kind in OF_REQUESTS:
                    events.append([at - member.ahead_s, kind, f"{name}: {what}", fields])
                elif i == 0:
                    events.append([at - member.ahead_s, kind, what, fields])
        merged: dict[str, Any] = {"now": now, "events": sorted(events, key=lambda event: event[0])}
        merged["lost"] = sum(reply["lost"] for reply in replies.values())
        merged["state"] = self._state({name: reply["state"] for name, reply in replies.items()})
        if all("requests" in reply for reply in replies.values()):
            merged["requests"] = [
                request | {"name": f"{name}: {request['name']}"}
                for name, reply in replies.items()
                for request in reply["requests"]
            ]
        elif merged["lost"]:
            self._changed = True  # the requests of all members follow in the next answer
        return merged

    def _state(self, states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        state = merge(list(states.values()))
        scopes = [scope for other in states.values() for scope in other["scopes"]]
        state["scopes"] = [
            merge([scope for scope in scopes if scope["lora_name"] == name])
            for name in dict.fromkeys(scope["lora_name"] for scope in scopes)
        ]
        state["kv"] = {key: sum(other["kv"][key] for other in states.values()) for key in state["kv"]}
        state["preemptions"] = sum(other["preemptions"] for other in states.values())
        state["num_adapters"] = max(other["num_adapters"] for other in states.values())
        state["progress"] = {
            f"{name}: {request}": tokens
            for name, other in states.items()
            for request, tokens in other["progress"].items()
        }
        state["counts"]["waiting"] += self._client.num_waiting
        return state | {"tokens": self._num_tokens, "boot_id": self._client.membership.boot_id}
