"""Choosing the replica of a request.

The cost of a request at a replica is the work in front of it and its own prefill, both in **prompt tokens**: the time
in which a replica computes one token of a prompt. The cheapest replica gets the request. A session's replica has the
session's prefix, so it need not compute the prefix, and stays the cheapest until its work in front exceeds that of
another one by more than the prefix.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

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
MOVE_FACTOR = 1.5  # a session moves if this saves more than the prefix times this factor
TRUST_STEP = 0.1  # weight of the newest measurement of Replica.trust
GROUP_CHOICES = 16  # a group stays together until its replica has so many choices more than another one
GROUP_SLACK = GROUP_CHOICES * CHOICE_TOKENS
MAX_SESSIONS = 65536
MAX_GROUPS = 4096
KEY_TOKENS = 16
Key = TypeVar("Key", bound=Hashable)


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


class Route:
    """The work of one request at its replica, as it is counted in the replica's load. prefill: prompt tokens that the
    replica computes. per_choice: cost of each choice that has not ended. expected: tokens of the prompt that should be
    cached there."""

    __slots__ = ("_expected", "_num", "_per_choice", "_prefill", "replica")

    def __init__(self, replica: Replica, prefill: int, per_choice: int, expected: int = 0):
        self.replica = replica
        self._expected = expected
        self._prefill = prefill
        self._per_choice = per_choice
        self._num = 0

    def began(self, num: int) -> None:
        """Count a request with ``num`` choices."""
        self._num = num
        self.replica.in_flight += num
        self.replica.load += self._prefill + num * self._per_choice

    def started(self, cached_tokens: int) -> None:
        """Count the first output: the prompt is computed, but for those tokens that were cached."""
        if self._expected:
            found = min(cached_tokens / self._expected, 1.0)
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
        self._groups: OrderedDict[Hashable, Home] = OrderedDict()

    def seen(self, request: AddRequest) -> Seen:
        """Return what the client of ``request`` has seen."""
        if not request.session:
            return Seen()
        home = _recall(self._sessions, request.session, self._max_sessions)
        home.began = home.began or time.time()
        return home

    def pick(
        self, request: AddRequest, replicas: Sequence[Replica], epoch: int = 0, refused_by: Collection[str] = ()
    ) -> Route | None:
        """Return the route of ``request`` to one of ``replicas`` that serves weights not older than ``epoch``, or None
        if none may have it now. Takes time in proportion to the replicas, unless the session's own is clearly cheap."""
        length = len(request.prompt_token_ids)
        home = _recall(self._sessions, request.session, self._max_sessions) if request.session else None
        # The first request of a session goes as one without a session: to the other samples of its prompt.
        near, slack = (
            (home, 0) if home is not None and home.replica is not None else (self._group(request), GROUP_SLACK)
        )
        place, cached = None, 0
        if near.replica is not None and _may_have(near.replica, epoch, refused_by):
            place, cached = near.replica, min(near.tokens, length - 1)
            saved = int(cached * place.trust)
            work = cost_at(place)
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
        prefill = length - int(cached * place.trust)
        return Route(place, prefill, CHOICE_TOKENS + length // CONTEXT_SHARE, cached if near is home else 0)

    def route_to(self, replica: Replica, request: AddRequest) -> Route:
        """Return a route to ``replica``, which runs the request already or has its result."""
        return Route(replica, 0, CHOICE_TOKENS)

    def _group(self, request: AddRequest) -> Home:
        """Return the home of the requests that have the same prompt, or are prompts of the same call."""
        prompt = request.prompt_token_ids
        # The ends of a prompt stand for all of it: a wrong guess costs a prefill.
        key: Hashable = request.group or (
            request.adapter, request.cache_salt, len(prompt), *prompt[:KEY_TOKENS], *prompt[-KEY_TOKENS:]
        )  # fmt: skip
        return _recall(self._groups, key, MAX_GROUPS)

    def grown(self, session: str, tokens: int) -> None:
        """Set the length of ``session`` after its last turn: ``tokens`` tokens in all."""
        if (home := self._sessions.get(session)) is not None:
            home.tokens = tokens


def _recall(homes: OrderedDict[Key, Home], key: Key, limit: int) -> Home:
    """Return the home of ``key``, and make it the newest one."""
    if (home := homes.get(key)) is None:
        home = homes[key] = Home()
        if len(homes) > limit:
            homes.popitem(last=False)
    else:
        homes.move_to_end(key)
    return home


def cost_at(replica: Replica) -> int:
    """Return the work in front of a new request at ``replica``, in prompt tokens."""
    queued = replica.in_flight - replica.slots
    return replica.load + queued * QUEUED_TOKENS if queued > 0 else replica.load


def _least_loaded(replicas: Sequence[Replica], epoch: int, refused_by: Collection[str]) -> Replica | None:
    best, least = None, 0
    for replica in replicas:
        work = cost_at(replica)
        if (best is None or work < least) and _may_have(replica, epoch, refused_by):
            best, least = replica, work
    return best


def _may_have(replica: Replica, epoch: int, refused_by: Collection[str]) -> bool:
    """Return whether a replica is open, and its weights are not too old. All members have the same adapters."""
    open_now = replica.state is ReplicaState.MEMBER and replica.name not in refused_by
    return open_now and replica.weight_epoch >= epoch
