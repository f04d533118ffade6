"""The life of a request in the engine: accepted, ended for many reasons, handed over, retired.

Exactly one final output goes out for each accepted request. Runs on the loop's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from fastdeploy.core import envs
from fastdeploy.core.errors import AttachedElsewhere, InvalidField
from fastdeploy.core.request import FinishReason, Group, Request, RequestTable
from fastdeploy.engine.deadlines import WHY, Deadlines
from fastdeploy.engine.delivery import Delivery
from fastdeploy.engine.pause import Counts, SilentClients
from fastdeploy.engine.retention import DETACHED, Record, Retention
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import Transport
from fastdeploy.metrics.metrics import EngineMetrics
from fastdeploy.scheduler.scheduler import NewToken, Scheduler

log = logging.getLogger("fastdeploy.engine")


class RequestLifecycle:
    """All requests of the engine and the outputs they have made. Implements the pause's ``PauseEffects``.

    clock: seconds, for deadlines. runs(pid): whether the process of a client lives and is not stopped.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        retention: Retention,
        metrics: EngineMetrics,
        transport: Transport,
        clock: Callable[[], float],
        runs: Callable[[int], bool],
    ):
        self._scheduler = scheduler
        self._retention = retention
        self._metrics = metrics
        self._clock = clock
        self._runs = runs
        self.requests = RequestTable()
        self.deadlines = Deadlines()
        self.delivery = Delivery(transport, self._reap, lambda output: retention.observe(output, clock()))
        self._aborted = self._finished = self._aborted_tokens = 0

    # ------------------------------------------------------------------ in

    def accept(self, group: Group) -> None:
        """Take in a group that admission has let through."""
        self.requests.add(group)
        self._retention.track(group)
        self.deadlines.add(group, self._clock(), time.time())
        for request in group.requests:
            self._scheduler.add(request)
        self._metrics.prompt_tokens.inc(len(group.add.prompt_token_ids))

    def attach(self, client: str, record: Record) -> None:
        """Give ``client`` everything from the first token. The client that was attached before gets no more, and an
        error says so."""
        self.hand_over([])  # a request that has just ended is in the record by now
        group = record.group
        if not record.ended:
            if group.client not in (DETACHED, client):
                elsewhere = AttachedElsewhere(f"a later request with request_id {group.add.request_id!r} took over")
                self.delivery.reject(group.client, group.add.request_id, elsewhere)
            group.client = client
        if outputs := record.replay():
            self.delivery.send_now(client, outputs)

    # ------------------------------------------------------------------ out

    def hand_over(self, tokens: list[NewToken]) -> None:
        """Send new tokens and final outputs, then retire what ended: the only place where a request leaves."""
        ended, self._scheduler.ended = self._scheduler.ended, []
        if not tokens and not ended:
            return
        self._metrics.observe_tokens(tokens)
        self._metrics.observe_ended(ended, time.time())
        for request in ended:
            if request.finish_reason is not FinishReason.ABORT:
                self._finished += 1
            elif not request.silent:
                self._aborted += 1
                self._aborted_tokens += request.num_output_tokens
            self._scheduler.retire(request)
            self.requests.remove(request)
        self.delivery.send_outputs(tokens, ended)

    def end_what_is_due(self) -> None:
        """End the requests whose time is over, and forget the results whose retain_s is over."""
        now = self._clock()
        for request, kind in self.deadlines.due(now):
            self._abort_one(request, WHY[kind], kind)
        self._retention.expire(now)

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every live request and hand over the final outputs."""
        for request in self.requests:
            if request.live:
                self._scheduler.end(request, reason, message)
        self.hand_over([])

    def cancel(self, client: str, cancel: m.CancelRequest) -> None:
        """End the choices that ``client`` waits for no longer. A request with retain_s is detached and runs on."""
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

    def abort(self, args: m.AbortArgs) -> dict[str, list]:
        """End the requests of these client ids. Raises InvalidField where the call names none."""
        if args.request_ids is None and not args.abort_all:
            raise InvalidField("req_ids", "expected a list of request ids, or abort_all")
        wanted = args.request_ids if not args.abort_all else [r.group.client_id for r in self.requests]
        aborted, not_found = [], []
        for request_id in dict.fromkeys(wanted):
            live = [r for r in self.requests.known_as(request_id) if r.live]
            if not live:
                not_found.append(request_id)
                continue
            aborted.append({"request_id": request_id, "output_token_count": sum(r.num_output_tokens for r in live)})
            for request in live:
                self._abort_one(request, "aborted by request")
        self.hand_over([])  # the final outputs go before the reply
        return {"aborted": aborted, "not_found": not_found}

    def _abort_one(self, request: Request, why: str, stop_reason: str | None = None) -> None:
        message = why if request.num_output_tokens else f"Abort before prefill: {why}"
        self._scheduler.end(request, FinishReason.ABORT, message, stop_reason)

    def _reap(self, client: str) -> None:
        """End the requests of a client whose process is gone. Those with retain_s are detached and run on."""
        log.warning("client %s is gone", client)
        for request in self.requests.of_client(client):
            if request.group.add.retain_s > 0:
                request.group.client = DETACHED
                continue
            request.silent = True
            if request.live:
                self._scheduler.end(request, FinishReason.ABORT, "its API server is gone")

    # ------------------------------------------------------------------ PauseEffects

    def abort_all(self, message: str) -> list[str]:
        """End every live request; return the ids that clients know. A request that never ran is not run first."""
        live = [r for r in self.requests if r.live]
        for request in live:
            self._abort_one(request, message)
        return list(dict.fromkeys(r.group.client_id for r in live))

    def retract_unstarted(self) -> None:
        self._scheduler.retract_unstarted()

    def drop_kv(self) -> None:
        self._scheduler.drop_kv()

    def drained(self) -> bool:
        return self._scheduler.drained

    def counts(self) -> Counts:
        waiting = self._scheduler.waiting
        started = sum(r.group.started for r in self._scheduler.running) + waiting.num_started
        queued = len(waiting) + len(self._scheduler.running) - started
        return Counts(self._aborted, self._finished, self._aborted_tokens, started, queued)

    def raise_fence(self) -> None:
        self.hand_over([])
        self.delivery.raise_fence()

    def fence_passed(self) -> bool:
        return self.delivery.fence_passed

    def fence_overtaken(self) -> bool:
        return self.delivery.fence_overtaken

    def give_up_on_silent_clients(self, spare_running: bool) -> SilentClients:
        """Drop the clients that have not acknowledged the fence. spare_running: keep those whose process runs."""
        silent = SilentClients([], [])
        for client in self.delivery.silent_clients:
            pid = self.delivery.clients[client]
            if spare_running and self._runs(pid):
                log.warning(
                    "client %s (pid %d) runs but has not acknowledged a fence yet: it gets more time", client, pid
                )
                silent.slow.append(pid)
                continue
            log.error("client %s (pid %d) did not acknowledge a fence: counted as gone", client, pid)
            silent.dropped.append(pid)
            self.delivery.dismiss(client)
        self.hand_over([])
        return silent

    # ------------------------------------------------------------------ integrity

    def check_idle(self) -> None:
        """Check that nothing leaked: with no request in the engine, nothing runs or waits and every KV block is free.

        Looks at a few counters, whatever the size of the cache; FASTDEPLOY_CHECK_INTEGRITY=1 makes it the whole check.
        """
        scheduler = self._scheduler
        assert not scheduler.running and not scheduler.ended and not len(scheduler.waiting)
        assert scheduler.kv.num_free == scheduler.info.num_blocks
        if envs.check_integrity():
            self.check_integrity()

    def check_integrity(self) -> None:
        """Check that nothing leaked and nothing is counted twice.

        Takes time in proportion to the KV cache: run by tests after every turn, and after a message whose handling
        failed.
        """
        scheduler = self._scheduler
        scheduler.check_integrity()
        for request in self.requests:
            assert request.live or request in scheduler.ended, request
            unshared = request.token_ids is not request.group.add.prompt_token_ids
            assert unshared or request.num_output_tokens == 0, request
        assert sum(1 for _ in self.requests) == len(scheduler.running) + len(scheduler.waiting) + len(scheduler.ended)
        self._retention.check_integrity(self.requests)
        if not len(self.requests):
            assert scheduler.kv.num_free == scheduler.info.num_blocks
