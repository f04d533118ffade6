"""The engine: one loop, on one thread, owns every request, all KV and the pause state.

    messages in  ->  timers  ->  plan  ->  step  ->  outputs  ->  settle the pause  ->  ...

Control is handled between steps on that same thread, so a status query or an abort is answered during a drain; when
there is nothing to do the loop blocks on its sockets. A pause that leaves no use for the step in flight (abort, keep)
ends it between two layers: nothing was sampled, and what runs on is planned and computed again.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from fastdeploy import envs
from fastdeploy.cache_manager.kv_cache_manager import KVCacheManager
from fastdeploy.config import EngineConfig
from fastdeploy.engine.deadlines import WHY, Deadlines, check_deadlines
from fastdeploy.engine.delivery import Delivery
from fastdeploy.engine.finite_watch import FiniteWatch
from fastdeploy.engine.holds import Admission, Mode
from fastdeploy.engine.inbox import Inbox, StepAbandoned
from fastdeploy.engine.pause import Counts, PauseState, SilentClients
from fastdeploy.engine.processes import process_runs
from fastdeploy.engine.request import FinishReason, Group, Request, RequestTable
from fastdeploy.engine.retention import DETACHED, Record, Retention, check_retainable
from fastdeploy.engine.sampling_params import MAX_INT32, check_prompt_logprobs
from fastdeploy.engine.sleep import Sleeper
from fastdeploy.engine.weight_session import check_label
from fastdeploy.engine.weight_sources import SourcePolicy
from fastdeploy.engine.weights import NO_WEIGHTS, REPUBLISH_HOLD, WeightSessions
from fastdeploy.errors import (
    AttachedElsewhere,
    DuplicateRequest,
    EngineDead,
    EngineError,
    FastDeployError,
    InvalidField,
    QueueFull,
    RequestError,
    RequestsRejected,
)
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import Transport
from fastdeploy.metrics.metrics import EngineMetrics, Gauges
from fastdeploy.scheduler.interface import Runner, StepPlan
from fastdeploy.scheduler.pacer import StepPacer
from fastdeploy.scheduler.scheduler import NewToken, Scheduler

log = logging.getLogger("fastdeploy.engine")

MAX_N = 1024
RETRY_AFTER_S = 1


class CommonEngine:
    """``run()`` until ``stop()``. on_commit(epoch) is called after each commit of weights, on the loop thread. clock:
    seconds, for deadlines and heartbeats. runs(pid): whether the process of a client lives and is not stopped.

    run() returns normally after stop(); if a step fails, every open request and call is answered and it raises
    EngineError, and the process is expected to be replaced.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        transport: Transport,
        boot_id: str | None = None,
        on_commit: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        runs: Callable[[int], bool] = process_runs,
    ):
        info = runner.info
        assert info.num_blocks * info.block_size >= info.max_model_len, "one request must always fit"
        self.config = config
        self.info = info
        self.boot_id = boot_id or uuid.uuid4().hex
        self.epoch = 0
        self.version = "0"
        self._runner = runner
        self._transport = transport
        self._inbox = Inbox(transport)
        self._on_commit = on_commit or (lambda epoch: None)
        self._clock = clock
        self._runs = runs
        self.kv = KVCacheManager(info.num_blocks, info.block_size, config.enable_prefix_caching)
        pacer = StepPacer(config.max_num_batched_tokens, config.max_step_ms / 1000)
        self.scheduler = Scheduler(info, config.max_num_seqs, pacer, self.kv)
        self.requests = RequestTable()
        self.metrics = EngineMetrics()
        self._finite_watch = FiniteWatch(self.metrics)
        self.retention = Retention(config.max_retained, config.max_retained_mb << 20)
        self.deadlines = Deadlines()
        self.delivery = Delivery(transport, self._reap, lambda output: self.retention.observe(output, clock()))
        self.pause = PauseState(self, clock)
        policy = SourcePolicy(config.model_roots, config.upload_dir)
        self.weights = WeightSessions(runner, self, self.pause, policy, transport.wake, clock, config.stage_timeout_s)
        self.sleeper = Sleeper(runner, self, self.pause, self.weights, clock)
        self._arrivals = 0
        self._aborted = self._finished = self._aborted_tokens = 0
        self._next_heartbeat = 0.0
        self._stopping = False
        self._was_busy = False
        self._on_message: dict[type, Callable[[str, Any], None]] = {
            m.Hello: self._hello,
            m.AddRequest: self._add_request,
            m.CancelRequest: self._cancel_request,
            m.Call: self._call,
            m.Malformed: self._malformed,
            m.FenceAck: lambda client, ack: self.delivery.acknowledge(client, ack.fence_id),
        }
        self._on_call: dict[type, Callable[[Any, _Answer], dict[str, Any] | None]] = {
            m.PauseArgs: self.pause.pause,
            m.ResumeArgs: lambda args, answer: self.pause.resume(args),
            m.RenewArgs: lambda args, answer: self.pause.renew(args),
            m.PauseStatusArgs: lambda args, answer: self.pause.status(),
            m.AbortArgs: lambda args, answer: self._abort(args),
            m.UpdateWeightsArgs: self.weights.update,
            m.BeginUpdateArgs: lambda args, answer: self.weights.begin(args),
            m.UpdateChunkArgs: self.weights.chunk,
            m.CheckUpdateArgs: lambda args, answer: self.weights.check(args),
            m.CommitUpdateArgs: self.weights.commit,
            m.AbortUpdateArgs: lambda args, answer: self.weights.abort(args),
            m.WeightInfoArgs: self.weights.info,
            m.SetVersionArgs: lambda args, answer: self._set_version(args.version),
            m.ResetArgs: lambda args, answer: self._reset(args),
            m.ResetCacheArgs: lambda args, answer: self._reset_cache(args),
            m.SleepArgs: self.sleeper.sleep,
            m.WakeArgs: lambda args, answer: self.sleeper.wake(args),
            m.ModelInfoArgs: lambda args, answer: self._model_info(),
            m.MetricsArgs: lambda args, answer: {"text": self.metrics.render(self._gauges())},
        }
        if config.lost_commit:
            self.pause.place_system_hold(REPUBLISH_HOLD, Mode.KEEP, Admission.HOLD)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        try:
            while not self._stopping:
                self.turn(block=True)
        except Exception as error:
            log.exception("the engine failed")
            self._fail(EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            raise EngineError(str(error)) from error
        self._shut_down()

    def stop(self) -> None:
        """Ask the loop to end; safe from any thread and from a signal handler."""
        self._stopping = True
        self._transport.wake()

    def turn(self, block: bool) -> None:
        """One round of the loop. Between two lines of it every invariant of the engine holds."""
        for client, message in self._inbox.take(self._patience() if block else 0.0):
            self._handle(client, message)
        self.beat()
        self.delivery.drop_unreachable()
        self.weights.poll()
        self._end_what_is_due()
        self._hand_over([])
        self._settle()
        plan = self.scheduler.plan(self.pause.gate, self.epoch, self.version)
        if plan is not None:
            self._hand_over(self._step(plan))
            self._settle()

    def _settle(self) -> None:
        self.pause.settle()
        self.sleeper.settle()

    def _patience(self) -> float | None:
        """How long the loop may block: not at all while there is work."""
        if self.scheduler.ended or self.scheduler.has_work(self.pause.gate):
            self._was_busy = True
            return 0.0
        if self._was_busy and not len(self.requests):
            self._was_busy = False
            self._check_idle()
        now = self._clock()
        deadlines = (
            self.pause.next_deadline(),
            self.weights.next_deadline(),
            self.sleeper.next_deadline(),
            self.deadlines.next(),
            self._next_heartbeat,
        )
        due = [d for d in deadlines if d is not None]
        return max(min(due) - now, 0.0)

    def _step(self, plan: StepPlan) -> list[NewToken]:
        try:
            result = self._runner.execute(plan, self._between_layers)
        except StepAbandoned:
            self.scheduler.abandon()
            self.metrics.steps_abandoned.inc()
            return []
        self._inbox.step_completed()
        before = self.scheduler.num_non_finite
        tokens = self.scheduler.apply(plan, result)
        self._finite_watch.step_done(plan, len(tokens), self.scheduler.num_non_finite - before)
        return tokens

    def _between_layers(self) -> None:
        self.beat()
        self._inbox.look_for_pause()

    def _hand_over(self, tokens: list[NewToken]) -> None:
        """Send new tokens and final outputs, then retire what ended: the only place where a request leaves."""
        ended, self.scheduler.ended = self.scheduler.ended, []
        if not tokens and not ended:
            return
        self.metrics.observe_tokens(tokens)
        self.metrics.observe_ended(ended, time.time())
        for request in ended:
            if request.finish_reason is not FinishReason.ABORT:
                self._finished += 1
            elif not request.silent:
                self._aborted += 1
                self._aborted_tokens += request.num_output_tokens
            self.scheduler.retire(request)
            self.requests.remove(request)
        self.delivery.send_outputs(tokens, ended)

    def beat(self) -> None:
        """Tell every client that the loop gets on, at most once in heartbeat_s. A client that hears nothing for stall_s
        kills this process as stuck.

        The loop itself sends the heartbeats, and no other thread does: a thread would go on beating for a loop that
        hangs. So whatever keeps the loop longer than a moment calls this between its pieces: every turn, every layer of
        a step, every slice of prompt logprobs, every piece of weights that is put to sleep or woken up. A piece takes
        milliseconds, or a second or so on a slow machine. Nothing here changes the state of a request.
        """
        now = self._clock()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self.config.heartbeat_s
            self.delivery.beat()

    # ------------------------------------------------------------------ messages

    def _handle(self, client: str, message: m.ToEngine) -> None:
        """Handle one message. An exception that its handler does not expect fails this message only: the handler has
        answered it. The engine goes on if its state is whole; else it ends as after a step that failed."""
        if client not in self.delivery.clients and not isinstance(message, m.Hello):
            self._transport.send(client, m.Goodbye())
            return
        try:
            self._on_message[type(message)](client, message)
        except Exception:
            log.exception("a %s of client %s could not be handled", type(message).__name__, client)
            self.metrics.internal_errors.inc()
            self.check_integrity()

    def _malformed(self, client: str, message: m.Malformed) -> None:
        """Answer whoever waits for it."""
        failure = _failure(RequestError(f"the engine cannot read this message: {message.why}"))
        if message.call_id is not None:
            self.delivery.send(client, m.Reply(message.call_id, {}, failure))
        if message.request_id is not None:
            self.delivery.send(client, m.Rejected(message.request_id, failure))

    def _hello(self, client: str, hello: m.Hello) -> None:
        self.delivery.clients[client] = hello.pid
        self.delivery.send(client, m.Welcome(self.boot_id, os.getpid(), self.info.max_model_len))
        self.delivery.send(client, m.Heartbeat())

    def _add_request(self, client: str, add: m.AddRequest) -> None:
        try:
            if (record := self.retention.find(add)) is not None:
                self._attach(client, record)
                return
            group = self._new_group(client, add)
        except Exception as error:
            self.delivery.send(client, m.Rejected(add.request_id, _failure(error)))
            if not isinstance(error, FastDeployError):
                raise
            return
        self.requests.add(group)
        self.retention.track(group)
        self.deadlines.add(group, self._clock(), time.time())
        for request in group.requests:
            self.scheduler.add(request)
        self.metrics.prompt_tokens.inc(len(add.prompt_token_ids))

    def _new_group(self, client: str, add: m.AddRequest) -> Group:
        """The choices of ``add``, not in the engine yet. Raises what the client is told."""
        max_output_tokens = self._check_admissible(add)
        group = Group(client, add)
        self._arrivals += 1
        order = (add.priority, self._arrivals)
        group.requests = [Request(group, choice, order, max_output_tokens) for choice in range(add.n)]
        return group

    def _attach(self, client: str, record: Record) -> None:
        """It gets everything from the first token; whoever was attached gets no more, and is told."""
        self._hand_over([])  # who has just come to an end is in the record by now
        group = record.group
        if not record.ended:
            if group.client not in (DETACHED, client):
                elsewhere = AttachedElsewhere(f"a later request with request_id {group.add.request_id!r} took over")
                self.delivery.send(group.client, m.Rejected(group.add.request_id, _failure(elsewhere)))
            group.client = client
        if outputs := record.replay():
            self.delivery.send_now(client, outputs)

    def _end_what_is_due(self) -> None:
        now = self._clock()
        for request, kind in self.deadlines.due(now):
            self._abort_one(request, WHY[kind], kind)
        self.retention.expire(now)

    def _check_admissible(self, add: m.AddRequest) -> int:
        """The door. Returns how many tokens each choice may produce; raises what the client is told."""
        if self.pause.admission is Admission.REJECT:
            message = "the engine is pausing or paused and rejects new requests"
            raise RequestsRejected(message, retry_after=RETRY_AFTER_S, state=self.pause.phase.value)
        if self.requests.is_taken(add):
            raise DuplicateRequest(f"request_id {add.request_id!r} is alive already", param="request_id")
        if not 1 <= add.n <= MAX_N:
            raise InvalidField("n", f"expected an integer from 1 to {MAX_N}, got {add.n}")
        if len(self.scheduler.waiting) + add.n > self.config.max_waiting:
            message = f"the queue holds its maximum of {self.config.max_waiting} requests"
            raise QueueFull(message, retry_after=RETRY_AFTER_S)
        prompt, limit = add.prompt_token_ids, self.info.max_model_len
        add.sampling.check()  # a row that a step cannot compute would fail the step of everybody
        check_retainable(add)
        self.retention.check_room(add)
        check_deadlines(add)
        if not prompt:
            raise InvalidField("prompt", "expected at least one token")
        if len(prompt) >= limit:
            raise InvalidField("prompt", f"expected fewer than max_model_len={limit} tokens, got {len(prompt)}")
        check_prompt_logprobs(add.sampling.prompt_logprobs, len(prompt))
        if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
            raise InvalidField("prompt", f"expected token ids from 0 to {self.info.vocab_size - 1}")
        if max(add.sampling.stop_token_ids, default=0) >= self.info.vocab_size:
            raise InvalidField("stop_token_ids", f"expected token ids from 0 to {self.info.vocab_size - 1}")
        if not 0 <= add.resumed_tokens < len(prompt):
            expected = f"an integer from 0 to {len(prompt) - 1} (one less than the prompt has)"
            raise InvalidField("resumed_tokens", f"expected {expected}, got {add.resumed_tokens}")
        if not 0 <= add.first_choice <= MAX_INT32:
            raise InvalidField("first_choice", f"expected an integer from 0 to 2**31 - 1, got {add.first_choice}")
        return min(add.sampling.max_tokens, limit - len(prompt))

    def _cancel_request(self, client: str, cancel: m.CancelRequest) -> None:
        requests, reason = self.requests.get(cancel.request_id), FinishReason(cancel.reason)
        if requests and requests[0].group.add.retain_s > 0 and reason is FinishReason.ABORT:
            if requests[0].group.client == client:
                requests[0].group.client = DETACHED
            return
        for request in requests:
            mine = request.group.client == client and cancel.choice in (None, request.choice)
            if mine and request.live:
                request.silent = True
                self.scheduler.end(request, reason)

    def _reap(self, client: str) -> None:
        """Its process is gone: nobody waits for what it asked for."""
        log.warning("client %s is gone", client)
        for request in self.requests.of_client(client):
            if request.group.add.retain_s > 0:
                request.group.client = DETACHED
                continue
            request.silent = True
            if request.live:
                self.scheduler.end(request, FinishReason.ABORT, "its API server is gone")

    def _call(self, client: str, call: m.Call) -> None:
        answered = False

        def answer(result: dict[str, Any], error: Exception | None = None) -> None:
            nonlocal answered
            if not answered:  # a handler that failed may have left its answer to be given later
                answered = True
                failure = None if error is None else _failure(error)
                self.delivery.send(client, m.Reply(call.call_id, result, failure))

        try:
            handler = self._on_call.get(type(call.args))
            if handler is None:
                raise InvalidField("args", f"this engine knows no call {type(call.args).__name__}")
            result = handler(call.args, answer)
        except Exception as error:
            answer({}, error)
            if not isinstance(error, FastDeployError):
                raise
        else:
            if result is not None:  # else it is answered later
                answer(result)

    def _abort(self, args: m.AbortArgs) -> dict[str, Any]:
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
        self._hand_over([])  # the final outputs go before the reply
        return {"aborted": aborted, "not_found": not_found}

    def _abort_one(self, request: Request, why: str, stop_reason: str | None = None) -> None:
        message = why if request.num_output_tokens else f"Abort before prefill: {why}"
        self.scheduler.end(request, FinishReason.ABORT, message, stop_reason)

    def _model_info(self) -> dict[str, Any]:
        limits = {"max_waiting": self.config.max_waiting, "max_num_seqs": self.config.max_num_seqs}
        return {**self.info._asdict(), "boot_id": self.boot_id, **limits, **self.weights_label()}

    def _gauges(self) -> Gauges:
        return Gauges(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            free_blocks=self.kv.num_free,
            total_blocks=self.info.num_blocks,
            prefix_hit_tokens=self.kv.hit_tokens,
            prefix_queried_tokens=self.kv.queried_tokens,
            preemptions=self.scheduler.num_preemptions,
            rejecting=self.pause.rejecting_new_requests,
            paused=self.pause.is_paused,
            epoch=self.epoch,
            updates_failed=self.weights.num_failed,
            session_open=self.weights.session is not None,
            last_commit_s=self.weights.last_commit_s,
            asleep=self._runner.asleep,
            retained_bytes=self.retention.nbytes,
            retained_dropped=self.retention.num_dropped,
        )

    # ------------------------------------------------------------------ weights

    def swap(self, staged: Any, version: str | None, kv: str) -> dict[str, Any]:
        """Between two steps: weights, epoch, label and KV namespace change in one motion. Returns the report."""
        before = self.weights_label()
        in_flight = [r for r in self.requests if r.num_computed]
        recompute = kv == "recompute"
        to_recompute = sum(r.num_computed for r in in_flight) if recompute else 0
        self._runner.commit(staged)
        self.epoch += 1
        self.version = version if version is not None else str(self.epoch)
        self.scheduler.start_epoch(self.epoch, recompute)
        self._on_commit(self.epoch)
        return {
            "status": "committed",
            **self.weights_label(),
            "previous_version": before["version"],
            "previous_epoch": before["epoch"],
            "kv": kv,
            "requests_in_flight": len(in_flight),
            "tokens_to_recompute": to_recompute,
        }

    def _set_version(self, version: str) -> dict[str, Any]:
        """Only the label of tokens to come changes: no past span, no KV, no request."""
        check_label("version", version)
        self.version = version
        return self.weights_label()

    def _reset(self, args: m.ResetArgs) -> dict[str, Any]:
        """A trainer starts over."""
        check_label("version", args.version)
        aborted = self.abort_all("the trainer starts over (reset)")
        self._hand_over([])  # the final outputs go before the reply
        self.retention.forget_ended()  # of the run before: the ids of the next one may be the same
        sessions = self.weights.drop_session("dropped by a reset")
        released = self.pause.resume(m.ResumeArgs())["released"]
        self.scheduler.drop_kv()
        self.version = args.version if args.version is not None else self.version
        return {
            "aborted": len(aborted),
            "released": released,
            "sessions_aborted": sessions,
            "still_held_by": list(self.pause.holds),
            **self.weights_label(),
        }

    def _reset_cache(self, args: m.ResetCacheArgs) -> dict[str, Any]:
        """In every state, frozen requests or not; they keep their tokens, and their KV unless it is asked for too."""
        computed = [r for r in self.requests if r.live and r.num_computed]
        if args.running:
            self.scheduler.drop_kv()
        else:
            self.kv.forget_prefixes()
        return {"success": True, "requests_to_recompute": len(computed) if args.running else 0}

    def weights_in_use(self) -> bool:
        return self.weights.session is not None or self.weights.staging_busy

    def hold_for_republish(self) -> None:
        self.pause.place_system_hold(REPUBLISH_HOLD, Mode.KEEP, Admission.HOLD, locked=NO_WEIGHTS)

    # ------------------------------------------------------------------ PauseEffects

    def abort_all(self, message: str) -> list[str]:
        """End everything that lives; returns the ids. What never ran is not run first."""
        live = [r for r in self.requests if r.live]
        for request in live:
            self._abort_one(request, message)
        return list(dict.fromkeys(r.group.client_id for r in live))

    def retract_unstarted(self) -> None:
        self.scheduler.retract_unstarted()

    def drop_kv(self) -> None:
        self.scheduler.drop_kv()

    def drained(self) -> bool:
        return self.scheduler.drained

    def counts(self) -> Counts:
        waiting = self.scheduler.waiting
        started = sum(r.group.started for r in self.scheduler.running) + waiting.num_started
        queued = len(waiting) + len(self.scheduler.running) - started
        return Counts(self._aborted, self._finished, self._aborted_tokens, started, queued)

    def raise_fence(self) -> None:
        self._hand_over([])
        self.delivery.raise_fence()

    def fence_passed(self) -> bool:
        return self.delivery.fence_passed

    def fence_overtaken(self) -> bool:
        return self.delivery.fence_overtaken

    def give_up_on_silent_clients(self, spare_running: bool) -> SilentClients:
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
            self._transport.send(client, m.Goodbye())
            self.delivery.drop(client)
        self._hand_over([])
        return silent

    def weights_label(self) -> dict[str, Any]:
        return {"version": self.version, "epoch": self.epoch, "boot_id": self.boot_id}

    # ------------------------------------------------------------------ the end

    def _end_everything(self, reason: FinishReason, message: str, error: FastDeployError) -> None:
        for request in self.requests:
            if request.live:
                self.scheduler.end(request, reason, message)
        self._hand_over([])
        self.pause.fail(error)
        self.weights.fail(error)
        self.sleeper.fail(error)

    def _fail(self, error: EngineError) -> None:
        self._end_everything(FinishReason.ERROR, error.message, error)

    def _shut_down(self) -> None:
        error = EngineDead("the server is shutting down")
        self._end_everything(FinishReason.ABORT, "the server is shutting down", error)

    def _check_idle(self) -> None:
        """Check that nothing leaked: with no request in the engine, nothing runs or waits and every KV block is free.

        Looks at a few counters, whatever the size of the cache; FASTDEPLOY_CHECK_INTEGRITY=1 makes it the whole check.
        """
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.ended and not len(scheduler.waiting)
        assert self.kv.num_free == self.info.num_blocks
        if envs.check_integrity():
            self.check_integrity()

    def check_integrity(self) -> None:
        """Check that nothing leaked and nothing is counted twice.

        Takes time in proportion to the KV cache: run by tests after every turn, and after a message whose handling
        failed.
        """
        self.scheduler.check_integrity()
        scheduler = self.scheduler
        for request in self.requests:
            assert request.live or request in scheduler.ended, request
            unshared = request.token_ids is not request.group.add.prompt_token_ids
            assert unshared or request.num_output_tokens == 0, request
        assert sum(1 for _ in self.requests) == len(scheduler.running) + len(scheduler.waiting) + len(scheduler.ended)
        self.retention.check_integrity(self.requests)
        if not len(self.requests):
            assert self.kv.num_free == self.info.num_blocks


_Answer = Callable[[dict[str, Any], FastDeployError | None], None]


def _failure(error: Exception) -> m.Failure:
    """What the client is told. An exception from outside our tree is an internal error."""
    if not isinstance(error, FastDeployError):
        return m.Failure(FastDeployError.code, f"internal error in the engine: {type(error).__name__}: {error}")
    return m.Failure(error.code, error.message, error.detail)
