"""Choosing the replica of a request.

The cost of a request at a replica is the work in front of it and its own prefill, both in **prompt tokens**: the time
in which a replica computes one token of a prompt. The cheapest replica gets the request. A session's replica has the
session's prefix, so it need not compute the prefix, and stays the cheapest until its work in front exceeds that of
another one by more than the prefix.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.fleet.replica import Replica, ReplicaState

# The constants follow from the cost model of 32 billion parameters on one H200 (benchmarks/lib/fleet/loads.py). A token
# of a prompt takes 0.13 ms, a step 13.4 ms, and 0.2 ms more for each sequence and 0.055 us for each token of context.
# A choice makes some 100 tokens beside another one. So it costs the other one 100 * 0.2 / 0.13 = 150 prompt tokens, and
# 100 * 0.000055 / 0.13 = 1/24 for each token of its context.
CHOICE_TOKENS = 128
CONTEXT_SHARE = 24
# If more choices are there than the batch has places, those above wait. Each makes a new one wait for another 1/32 of a
# choice's time, with 32 places: 100 * 20 / 32 / 0.13.
QUEUED_TOKENS = 480
MOVE_FACTOR = 3.5  # a session or a group moves if this saves more than the prefix times this factor
TRUST_STEP = 0.1  # weight of the newest measurement of Replica.trust
GROUP_CHOICES = 16  # a group stays together until its replica has so many choices more than another one
GROUP_SLACK = GROUP_CHOICES * CHOICE_TOKENS
MAX_SESSIONS = 65536
MAX_GROUPS = 4096
KEY_TOKENS = 16


class Seen:
    """The weights that a client has seen in a session, or in a request without one. epoch: the newest weight_epoch.
    began: time.time() of the first request of the session; 0 = no session."""

    __slots__ = ("began", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self.began = 0.0


class Home(Seen):
    """The replica of a session or of a group. tokens: length of the prefix that is cached there."""

    __slots__ = ("replica", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.replica: Replica | None = None
        self.tokens = 0


class Wanted(NamedTuple):
    """The facts of a request on which the choice of its replica depends. group: key of the requests that have the same
    prompt, or are prompts of the same call. length: tokens of the prompt. num: choices."""

    session: str
    group: str
    length: int
    num: int

    @classmethod
    def by(cls, request: AddRequest) -> Wanted:
        """Return what ``request`` wants."""
        prompt = request.prompt_token_ids
        group = request.group
        if not group:  # The ends of a prompt stand for all of it: a wrong guess costs a prefill.
            key = hashlib.blake2b(f"{request.adapter}\0{request.cache_salt}\0{len(prompt)}".encode(), digest_size=12)
            key.update(array("q", prompt[:KEY_TOKENS] + prompt[-KEY_TOKENS:]))
            group = key.hexdigest()
        return cls(request.session, group, len(prompt), request.n)


class Route:
    """The work of one request at its replica, as it is counted in the replica's load. length: tokens of the prompt.
    cached: of these, those that are expected to be cached there. known: of these, those that its session has there."""

    __slots__ = ("_num", "_per_choice", "_prefill", "cached", "known", "replica")

    def __init__(self, replica: Replica, length: int, cached: int = 0, known: int = 0):
        self.replica = replica
        self.cached = cached
        self.known = known
        self._prefill = length - cached
        self._per_choice = CHOICE_TOKENS + length // CONTEXT_SHARE
        self._num = 0

    def promise(self, num: int) -> None:
        """Count a request with ``num`` choices that another gateway sends, until the engine tells it."""
        self.replica.promises.add(self.replica.client.num_tells, num, self._prefill + num * self._per_choice)

    def began(self, num: int) -> None:
        """Count a request with ``num`` choices."""
        self._num = num
        self.replica.in_flight += num
        self.replica.load += self._prefill + num * self._per_choice

    def started(self, cached_tokens: int) -> None:
        """Count the first output: the prompt is computed, but for those tokens that were cached."""
        if self.known:
            found = min(cached_tokens / self.known, 1.0)
            self.replica.trust += TRUST_STEP * (found - self.replica.trust)
        self._computed()

    def _computed(self) -> None:
        self.replica.load -= self._prefill
        self._prefill = 0

    def ended(self) -> None:
        """Count the end of a choice."""
        self._num -= 1
        self.replica.in_flight -= 1
        self.replica.load -= self._per_choice

    def closed(self) -> None:
        """Count nothing any more."""
        self._computed()
        while self._num:
            self.ended()


class Router:
    """The choice of replicas, with the memory of where sessions and groups are."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Home] = OrderedDict()
        self._groups: OrderedDict[str, Home] = OrderedDict()

    def seen(self, request: AddRequest) -> Seen:
        """Return what the client of ``request`` has seen."""
        if not request.session:
            return Seen()
        home = _recall(self._sessions, request.session, self._max_sessions)
        home.began = home.began or time.time()
        return home

    def began(self, session: str, at: float = 0.0) -> float:
        """Return when the first request of a session came, as time.time(). at: when one came to another gateway; 0 =
        that is not known."""
        home = _recall(self._sessions, session, self._max_sessions)
        if at and (not home.began or at < home.began):
            home.began = at
        return home.began

    def where(self, session: str) -> tuple[Replica | None, int]:
        """Return the replica of a session, and the length of the prefix there."""
        home = self._sessions.get(session)
        return (home.replica, home.tokens) if home is not None else (None, 0)

    def remember(self, session: str, replica: Replica, tokens: int) -> None:
        """Set the replica of a session, and the length of the prefix there."""
        home = _recall(self._sessions, session, self._max_sessions)
        home.replica, home.tokens = replica, tokens

    def pick(
        self,
        wanted: Wanted,
        replicas: Sequence[Replica],
        epoch: int = 0,
        refused_by: Collection[str] = (),
    ) -> Route | None:
        """Return the route to one of ``replicas`` that serves weights not older than ``epoch``, or None if none may
        have the request now. Takes time in proportion to the replicas, unless the session's own is clearly cheap."""
        if not replicas:  # a gateway whose view has ended has members, and may send them nothing
            return None
        length = wanted.length
        home = _recall(self._sessions, wanted.session, self._max_sessions) if wanted.session else None
        # The first request of a session goes as one without a session: to the other samples of its prompt.
        near, slack = (
            (home, 0)
            if home is not None and home.replica is not None
            else (_recall(self._groups, wanted.group, MAX_GROUPS), GROUP_SLACK)
        )
        place, cached = None, 0
        if near.replica is not None and may_have(near.replica, epoch, refused_by):
            place, cached = near.replica, min(near.tokens, length - 1)
            saved = int(cached * place.trust)
            work = cost_at(place, only_sure=near is home)
            bound = int(saved * MOVE_FACTOR) + slack  # a replica with so much less work in front is better
            if work > bound:
                other = _least_loaded(replicas, epoch, refused_by)
                if other is not None and work > cost_at(other) + bound:
                    place, cached = other, 0
        else:
            place = _least_loaded(replicas, epoch, refused_by)
        if place is None:
            return None
        near.replica, near.tokens = place, length
        if home is not None:
            home.replica, home.tokens = place, length
        return Route(place, length, int(cached * place.trust), cached if near is home else 0)

    def grown(self, session: str, tokens: int) -> None:
        """Set the length of ``session`` after its last turn: ``tokens`` tokens in all."""
        if (home := self._sessions.get(session)) is not None:
            home.tokens = tokens


def _recall(homes: OrderedDict[str, Home], key: str, limit: int) -> Home:
    """Return the home of ``key``, and make it the newest one."""
    if (home := homes.get(key)) is None:
        home = homes[key] = Home()
        if len(homes) > limit:
            homes.popitem(last=False)
    else:
        homes.move_to_end(key)
    return home


def cost_at(replica: Replica, only_sure: bool = False) -> int:
    """Return the work in front of a new request at ``replica``, in prompt tokens: that of this gateway, and that of
    others as the engine has told it last. only_sure: leave out the promises. The engine may have told some of them, so
    with them the work can be too much, and a session would leave its prefix for no reason."""
    others = replica.client.load
    promises = replica.promises
    promises.forget_told(replica.client.num_tells)
    promised, load = (0, 0) if only_sure else (promises.choices, promises.load)
    choices = replica.in_flight + others.choices + promised
    work = replica.load + load + others.prompt_tokens + others.choices * CHOICE_TOKENS + others.context // CONTEXT_SHARE
    return work + max(choices - replica.slots, 0) * QUEUED_TOKENS


def _least_loaded(replicas: Sequence[Replica], epoch: int, refused_by: Collection[str]) -> Replica | None:
    best, least = None, 0
    for replica in replicas:
        work = cost_at(replica)
        if (best is None or work < least) and may_have(replica, epoch, refused_by):
            best, least = replica, work
    return best


def may_have(replica: Replica, epoch: int, refused_by: Collection[str]) -> bool:
    """Return whether a replica is open, and its weights are not too old. All members have the same adapters."""
    open_now = replica.state is ReplicaState.MEMBER and replica.name not in refused_by
    return open_now and replica.weight_epoch >= epoch
