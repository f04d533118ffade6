"""The life of a request in the engine: accepted, ended, handed over, retired.

The engine sends exactly one final output for each choice of an accepted request. All code runs on the loop's thread.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastdeploy.core.errors import AttachedElsewhere, FastDeployError
from fastdeploy.core.outputs import DEADLINE, QUEUE_TIMEOUT
from fastdeploy.core.process import check_integrity
from fastdeploy.core.request import FinishReason, Group, NewTokens, Request, Scope, ServedModel
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.request_table import RequestTable
from fastdeploy.engine.handlers import handles
from fastdeploy.engine.requests.delivery import Delivery
from fastdeploy.engine.requests.retention import DETACHED, Record, Retention
from fastdeploy.inter_communicator import messages as m
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.scheduler import Scheduler

log = logging.getLogger("fastdeploy.engine")

MIN_PRUNE = 1024
WHY = {DEADLINE: "its deadline has passed", QUEUE_TIMEOUT: "it waited for its first step for longer than max_queue_s"}


@dataclass(frozen=True)
class Counts:
    """How many choices one scope has and had. aborted, finished: since the engine started. aborted_tokens: output
    tokens of the aborted ones. started, queued: now in the engine. A choice is started when its request has a token."""

    aborted: int
    finished: int
    aborted_tokens: int
    started: int
    queued: int


class Deadlines:
    """The times at which requests must end: at their deadline, or after max_queue_s without a first step. Costs no time
    per step while none is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Group]] = []
        self._numbers = count()
        self._prune_at = MIN_PRUNE

    def add(self, group: Group, now: float, wall: float) -> None:
        """Add the deadlines of a group. now: on the loop's clock. wall: time.time() at the same moment."""
        add = group.add
        if add.deadline_s is not None:
            self._push(now + (add.arrival or wall) + add.deadline_s - wall, DEADLINE, group)
        if add.max_queue_s is not None:
            self._push(now + add.max_queue_s, QUEUE_TIMEOUT, group)

    def next(self) -> float | None:
        """Return the time of the first deadline. Its request may have ended already."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[tuple[Request, str]]:
        """Yield the requests that must end now, each with DEADLINE or QUEUE_TIMEOUT."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, group = heapq.heappop(self._heap)
            for request in list(group.requests):
                if request.live and (kind is DEADLINE or not group.scheduled):
                    yield request, kind

    def _push(self, at: float, kind: str, group: Group) -> None:
        if len(self._heap) >= self._prune_at:  # drop the deadlines of requests that have ended
            self._heap = [entry for entry in self._heap if entry[3].requests]
            heapq.heapify(self._heap)
            self._prune_at = max(MIN_PRUNE, 2 * len(self._heap))
        heapq.heappush(self._heap, (at, next(self._numbers), kind, group))


class RequestLifecycle:
    """All requests of the engine. clock: seconds, for deadlines."""

    def __init__(
        self,
        scheduler: Scheduler,
        delivery: Delivery,
        retention: Retention,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ):
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._delivery = delivery
        self._retention = retention
        self.metrics = metrics
        self._clock = clock
        self._deadlines = Deadlines()
        self.requests = RequestTable()
        delivery.on_gone = self._reap

    # ------------------------------------------------------------------ in

    def accept(self, group: Group) -> None:
        """Take in a group that has passed the admission control."""
        self.requests.add(group)
        self._retention.track(group)
        self._deadlines.add(group, self._clock(), time.time())
        for request in group.requests:
            self._scheduler.add(request)
        self.metrics.observe_accepted(group.requests)

    def attach(self, client: str, record: Record, output_interval_s: float) -> None:
        """Send ``client`` the outputs of a retained request from the first token on. A client that was attached before
        gets an error and no further outputs. output_interval_s: of the further outputs."""
        self.hand_over([])  # puts the end of a request that has just ended into the record
        group, record.attached_at = record.group, time.time()
        if not record.ended:
            if group.client not in (DETACHED, client):
                self._delivery.reject(group.client, group.add.request_id, _taken_over(group.add))
            group.client, group.output_interval_s = client, output_interval_s
            for request in group.requests:
                request.next_output_at = 0.0
        if outputs := record.replay():
            self._delivery.send_replay(client, group.model.scope, outputs)

    def take_over(self, add: AddRequest) -> None:
        """End the rests of an earlier sending of ``add``, a request with retain_s, that were moved here when their
        engine was lost. Their client gets an error: a gateway that has died, which is not noticed yet, or one whose
        own client is gone."""
        rests = [r for r in self.requests.known_as(add.request_id) if r.live and _is_rest(r.group.add, add)]
        for request in rests:
            request.silent = True
            self._scheduler.end(request, FinishReason.ABORT, "a later request with its id took over")
            self._delivery.reject(request.group.client, request.group.add.request_id, _taken_over(add))
        if rests:
            self.hand_over([])

    # ------------------------------------------------------------------ out

    def hand_over(self, tokens: list[NewTokens]) -> None:
        """Send new tokens and final outputs, and retire ended requests. No other function retires a request."""
        ended, self._scheduler.ended = self._scheduler.ended, []
        if not tokens and not ended:
            return
        self.metrics.observe_tokens(tokens)
        self.metrics.observe_ended(ended, time.time())
        for request in ended:
            self._count_ended(request)
            self._scheduler.retire(request)
            self.requests.remove(request)
        self._delivery.send_outputs(tokens, ended)

    def _count_ended(self, request: Request) -> None:
        for scope in (request.scope, request.scope.above):
            if scope is None:
                continue
            if request.finish_reason is not FinishReason.ABORT:
                scope.totals.finished += 1
            elif not request.silent:
                scope.totals.aborted += 1
                scope.totals.aborted_tokens += request.num_output_tokens

    def end_what_is_due(self) -> None:
        """End the requests whose deadline has passed, and drop the results whose retain_s is over."""
        now = self._clock()
        for request, kind in self._deadlines.due(now):
            self._abort_one(request, WHY[kind], kind)
        self._retention.expire(now)

    def next_deadline(self) -> float | None:
        """Time at which ``end_what_is_due`` must be called even if no message comes."""
        return self._deadlines.next()

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every live request and hand over the final outputs."""
        for request in self.requests:
            if request.live:
                self._scheduler.end(request, reason, message)
        self.hand_over([])

    def refuse(self, model: ServedModel, error: FastDeployError) -> None:
        """Reject all requests of ``model`` after all."""
        groups = dict.fromkeys(request.group for request in model.requests if request.live)
        for group in groups:
            self._delivery.reject(group.client, group.add.request_id, error)
            for request in group.requests:
                if request.live:
                    request.silent = True
                    self._scheduler.end(request, FinishReason.ERROR, error.message)
        self.hand_over([])
        for group in groups:
            self._retention.forget(group.add.request_id)  # the same request may come again

    def cancel(self, client: str, cancel: m.CancelRequest) -> None:
        """End the choices that ``client`` cancels. With retain_s, an abort only detaches the client."""
        requests, reason = self.requests.get(cancel.request_id), FinishReason(cancel.reason)
        if requests and requests[0].group.add.retain_s > 0 and reason is FinishReason.ABORT:
            if requests[0].group.client == client:
                requests[0].group.client = DETACHED
            return
        for request in requests:
            mine = request.group.client == client and cancel.choice in (None, request.choice)
            if mine and request.live:
                request.silent = True
                self._scheduler.end(request, reason)

    def knows(self, request_id: str) -> bool:
        """Return whether a request that its client knows by this id runs here, or has a retained result."""
        return self._retention.knows(request_id) or any(request.live for request in self.requests.known_as(request_id))

    def abort(self, request_ids: list[str] | None, scope: Scope, client: str | None = None) -> dict[str, list]:
        """End the requests of ``scope`` with these ids, which clients know; None stands for all of them. client: end
        requests of this connection only. Return the report."""
        if request_ids is None:
            request_ids = [r.group.client_id for r in self.requests if _ends_with_all(r, scope)]
        aborted, not_found = [], []
        for request_id in dict.fromkeys(request_ids):
            live = [r for r in self.requests.known_as(request_id) if r.live and scope.covers(r.scope)]
            if client is not None:
                live = [request for request in live if request.group.client == client]
            if not live:
                not_found.append(request_id)
                continue
            aborted.append({"request_id": request_id, "output_token_count": sum(r.num_output_tokens for r in live)})
            for request in live:
                self._abort_one(request, "aborted by request")
        self.hand_over([])  # the final outputs go before the reply
        return {"aborted": aborted, "not_found": not_found}

    def abort_session(self, session: str) -> dict[str, list]:
        """End the requests of a session. Return the report."""
        members = [r for r in self.requests if r.group.add.session == session]
        if not members:
            return {"aborted": [], "not_found": []}
        return self.abort([r.group.client_id for r in members], members[0].scope.above or members[0].scope)

    def _abort_one(self, request: Request, why: str, stop_reason: str | None = None) -> None:
        message = why if request.num_output_tokens else f"Abort before prefill: {why}"
        self._scheduler.end(request, FinishReason.ABORT, message, stop_reason)

    def _reap(self, client: str) -> None:
        """End the requests of a client whose process is gone. Requests with retain_s go on without a client."""
        log.warning("client %s is gone", client)
        for request in self.requests.of_client(client):
            if request.group.add.retain_s > 0:
                request.group.client = DETACHED
                continue
            request.silent = True
            if request.live:
                self._scheduler.end(request, FinishReason.ABORT, "its API server is gone")

    @handles(m.RetainedArgs)
    def describe_retained(self, args: m.RetainedArgs) -> dict[str, Any]:
        """Say whether a request runs here or has a retained result, and how long ago its tokens were asked for."""
        name = args.request_id
        asked_at = self._retention.attached_at(name)
        return {"known": self.knows(name), "kept_s": time.time() - asked_at if asked_at else None}

    def reset_cache(self, args: m.ResetCacheArgs, scope: Scope) -> dict[str, Any]:
        """Drop the prefix cache. Works in every state of a pause. Requests keep their tokens, and also their KV unless
        ``running`` is set."""
        computed = [r for r in self.requests if r.live and r.num_computed]
        if args.running:
            self._scheduler.drop_kv(scope)
        else:
            self._kv.forget_prefixes()
        return {"success": True, "requests_to_recompute": len(computed) if args.running else 0}

    # ------------------------------------------------------------------ for pauses

    def abort_all(self, message: str, scope: Scope) -> list[str]:
        """End every live request of ``scope``, also one that has not run yet, unless it survives aborts. Return the ids
        that clients know."""
        live = [r for r in self.requests if r.live and _ends_with_all(r, scope)]
        for request in live:
            self._abort_one(request, message)
        return list(dict.fromkeys(r.group.client_id for r in live))

    def counts(self, scope: Scope) -> Counts:
        totals = scope.totals
        return Counts(totals.aborted, totals.finished, totals.aborted_tokens, *self._scheduler.count(scope))

    def count_by_scope(self) -> dict[Scope, tuple[int, int]]:
        """Return the numbers of started and of queued choices of each scope, in one pass."""
        started, queued = Counter[Scope](), Counter[Scope]()
        for request in self.requests:
            if request.live:
                (started if request.group.started else queued)[request.scope] += 1
        return {scope: (started[scope], queued[scope]) for scope in started | queued}

    # ------------------------------------------------------------------ integrity

    def check_idle(self) -> None:
        """Check that nothing leaked, when no request is in the engine. Reads a few counters only, unless
        FASTDEPLOY_CHECK_INTEGRITY=1 asks for the full check."""
        scheduler = self._scheduler
        assert not scheduler.running and not scheduler.frozen and not scheduler.ended and not len(scheduler.waiting)
        assert scheduler.kv.num_free == scheduler.info.num_blocks
        if check_integrity():
            self.check_integrity()

    def check_integrity(self) -> None:
        """Check that nothing leaked and nothing is counted twice, in time in proportion to the KV cache. Runs after a
        message whose handling failed and in tests; see also ``check_idle``."""
        scheduler = self._scheduler
        scheduler.check_integrity()
        for request in self.requests:
            assert request.live or request in scheduler.ended, request
            unshared = request.token_ids is not request.group.add.prompt_token_ids
            assert unshared or request.num_output_tokens == 0, request
        in_batch = len(scheduler.running) + len(scheduler.frozen)
        assert sum(1 for _ in self.requests) == in_batch + len(scheduler.waiting) + len(scheduler.ended)
        scheduler.load.check_integrity([request for request in self.requests if request.live])
        self._retention.check_integrity(self.requests)
        if not len(self.requests):
            assert scheduler.kv.num_free == scheduler.info.num_blocks


def _is_rest(earlier: AddRequest, add: AddRequest) -> bool:
    """Return whether ``earlier`` is the rest of an earlier sending of ``add``. See AddRequest.fingerprint."""
    return earlier.retain_s <= 0 and bool(add.fingerprint) and earlier.fingerprint == add.fingerprint


def _taken_over(add: AddRequest) -> AttachedElsewhere:
    return AttachedElsewhere(f"a later request with request_id {add.request_id!r} took over")


def _ends_with_all(request: Request, scope: Scope) -> bool:
    """Return whether an abort of all requests of ``scope`` ends this one."""
    return scope.covers(request.scope) and not request.group.add.survives_aborts
