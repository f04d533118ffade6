"""Other ways to choose a replica, to compare with. Each counts the load as ours does, and is a Router."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Sequence
from functools import cache
from itertools import count

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Route, Router, Seen

POINTS = 128  # of each replica on the ring


class _Policy(Router):
    def seen(self, request: AddRequest) -> Seen:
        """Return what the client has seen, without the place in the queue that our router gives."""
        seen = super().seen(request)
        seen.began = 0.0
        return seen

    def pick(
        self, request: AddRequest, replicas: Sequence[Replica], epoch: int = 0, refused_by: Collection[str] = ()
    ) -> Route | None:
        there = [replica for replica in replicas if replica.name not in refused_by]
        return self.route_to(self._choose(request, there), request) if there else None

    def _choose(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica:
        raise NotImplementedError


class RoundRobin(_Policy):
    """One replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._next = count()

    def _choose(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica:
        return replicas[next(self._next) % len(replicas)]


class ConsistentHashing(_Policy):
    """The replica whose point follows that of the session on a ring."""

    def _choose(self, request: AddRequest, replicas: Sequence[Replica]) -> Replica:
        ring = _ring(tuple(replica.name for replica in replicas))
        at = bisect.bisect(ring, (_point(request.session or request.request_id), 0)) % len(ring)
        return replicas[ring[at][1]]


class OrderedHashing(ConsistentHashing):
    """Consistent hashing with our order in the queues: it shows what the choice of the replica adds to the order."""

    def seen(self, request: AddRequest) -> Seen:
        return Router.seen(self, request)


POLICIES: dict[str, type[Router]] = {
    "ours": Router,
    "round robin": RoundRobin,
    "consistent hashing": ConsistentHashing,
    "hashing, our order": OrderedHashing,
}


@cache
def _ring(names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the points on the ring, each with the number of its replica."""
    return sorted((_point(f"{name}/{i}"), k) for k, name in enumerate(names) for i in range(POINTS))


def _point(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
