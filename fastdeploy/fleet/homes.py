"""The choice of replicas in a fleet with several gateways. Each session, and each group of requests without one, has a
**home**: the gateway that chooses for all of them, whichever gateway they come to. All gateways find the same home, by
a hash over the key and the addresses of the gateways. So a session stays on its replica, and a group together.

Nothing is wrong if a home is gone or answers late: the gateway then chooses by what it knows itself, and at worst a
prefix is computed again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Route, Router, Wanted, may_have
from fastdeploy.inter_communicator.messages import PlaceArgs

ASK_S = 0.1  # then the gateway that has the request chooses itself
SILENT_S = 1.0  # for so long it does not ask again a home that gave no answer


class Homes:
    """The choice of replicas by the homes of requests. address: of this gateway; "" = it is the only one. gateways():
    the addresses of all. ask(gateway, args): asks another gateway. open_replicas(): those that take requests."""

    def __init__(
        self,
        router: Router,
        open_replicas: Callable[[], Sequence[Replica]],
        address: str,
        gateways: Callable[[], Sequence[str]],
        ask: Callable[[str, PlaceArgs], Awaitable[dict[str, Any]]],
    ):
        self._router = router
        self._open_replicas = open_replicas
        self._address = address
        self._gateways = gateways
        self._ask = ask
        self._silent: dict[str, float] = {}  # by gateway: until when it is not asked, on the event loop's clock

    async def place(self, request: AddRequest, epoch: int, refused_by: Collection[str]) -> Route | None:
        """Return the route of ``request``, see Router.pick. Waits only if its home is another gateway."""
        wanted = Wanted.by(request)
        if (home := self._home_of(wanted.session or wanted.group)) != self._address:
            if (route := await self._place_at(home, self._address, wanted, epoch, refused_by)) is not None:
                return route
            return self._pick(wanted, epoch, refused_by)
        return await self._place_here(self._address, wanted, epoch, refused_by)

    async def answer(self, args: PlaceArgs) -> dict[str, Any]:
        """Choose for another gateway. It may be wrong about the home: then this gateway does what the home would do."""
        wanted = Wanted(args.session, args.group, args.length, args.num)
        if args.session:
            self._router.began(args.session, args.began)
            replica, known = self._router.where(args.session)
            told = next((r for r in self._open_replicas() if r.name == args.replica), None)
            if told is not None and replica in (None, told):  # the last turn of the other gateway may be an old one
                self._router.remember(args.session, told, max(known, args.tokens))
        route = await self._place_here(args.sender, wanted, args.epoch, args.refused_by)
        if route is None:
            return {"replica": ""}
        if args.sender != self._address:  # else it counts the request when it sends it
            route.promise(args.num)
        return {
            "replica": route.replica.name,
            "cached": route.cached,
            "known": route.known,
            "began": self._router.began(args.session) if args.session else 0.0,
        }

    async def _place_here(self, sender: str, wanted: Wanted, epoch: int, refused_by: Collection[str]) -> Route | None:
        """Choose for a request whose home is this gateway. A new session goes to the other samples of its prompt, which
        may have another home."""
        if wanted.session and self._router.where(wanted.session)[0] is None:
            home = self._home_of(wanted.group)
            if home != self._address:
                group = wanted._replace(session="")
                if (route := await self._place_at(home, sender, group, epoch, refused_by)) is not None:
                    self._router.remember(wanted.session, route.replica, wanted.length)
                    return route
        return self._pick(wanted, epoch, refused_by)

    async def _place_at(
        self, home: str, sender: str, wanted: Wanted, epoch: int, refused_by: Collection[str]
    ) -> Route | None:
        """Return the route that another gateway chooses, or None if it answers late, or none that is good here."""
        now = asyncio.get_running_loop().time
        if now() < self._silent.get(home, 0.0):
            return None
        session, began, replica, tokens = wanted.session, 0.0, None, 0
        if session:
            began, (replica, tokens) = self._router.began(session), self._router.where(session)
        name = replica.name if replica is not None else ""
        args = PlaceArgs(
            sender, session, wanted.group, wanted.length, wanted.num, epoch, sorted(refused_by), began, name, tokens
        )
        try:
            async with asyncio.timeout(ASK_S):
                reply = await self._ask(home, args)
        except (FastDeployError, TimeoutError):
            self._silent[home] = now() + SILENT_S
            return None
        chosen = next((r for r in self._open_replicas() if r.name == reply["replica"]), None)
        if chosen is None or not may_have(chosen, epoch, refused_by):
            return None
        if session:
            self._router.began(session, reply["began"])
            self._router.remember(session, chosen, wanted.length)
        return Route(chosen, wanted.length, reply["cached"], reply["known"])

    def _pick(self, wanted: Wanted, epoch: int, refused_by: Collection[str]) -> Route | None:
        return self._router.pick(wanted, self._open_replicas(), epoch, refused_by)

    def _home_of(self, key: str) -> str:
        """Return the home of a key: a gateway that comes or goes moves the keys of its own only."""
        gateways = self._gateways()
        if len(gateways) < 2:
            return self._address
        return max(gateways, key=lambda gateway: hashlib.blake2b(f"{gateway}\0{key}".encode(), digest_size=8).digest())
