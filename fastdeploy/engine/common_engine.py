"""The engine: one loop, on one thread, owns every request, all KV and the pause state.

    messages in  ->  timers  ->  settle the pauses  ->  plan  ->  step  ->  outputs  ->  settle the pauses  ->  ...

The loop handles control calls between steps, so it answers a status query or an abort during a drain too. When there
is nothing to do, the loop blocks on its sockets. A pause of the whole engine in mode abort or keep abandons the step in
flight between two layers: no token of the step is sampled, and requests that are kept compute the step again.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import EngineDead, EngineError, FastDeployError, RequestError
from fastdeploy.core.events import EventKind
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.process import VERSION, host_id
from fastdeploy.core.request import FinishReason, NewTokens
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.runner import Runner
from fastdeploy.engine.field_checks import check_label
from fastdeploy.engine.handlers import handlers_of, handles
from fastdeploy.engine.parts import EngineParts
from fastdeploy.engine.pauses.holds import closes_whole_engine
from fastdeploy.engine.requests.delivery import ClientProcess, process_runs
from fastdeploy.engine.requests.retention import RetainedLog
from fastdeploy.engine.views.gauges import add_gauges
from fastdeploy.engine.views.trace_file import tracing
from fastdeploy.engine.views.viewers import Viewers, fleet_state
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.known_messages import known_messages
from fastdeploy.inter_communicator.transport import Transport
from fastdeploy.metrics.metrics import NonFiniteWatch
from fastdeploy.scheduler.drafts import Drafter

# While new weights are staged, the loop rests after each step for this share of the step's time. The threads that stage
# have the lowest priority: they use the cores in these rests, and what the steps leave of them.
STAGING_REST = 0.1
TELL_S = 0.05  # the age of the loads by which several gateways choose replicas (benchmarks/fleet.py --doors)
log = logging.getLogger("fastdeploy.engine")


class Inbox:
    """The messages that wait, in the order in which they came. Used by the loop's thread only. may_pause(client):
    whether the engine takes pauses of this client.

    After an abandoned step, the next step is always completed. So frequent pauses cannot stop all progress.
    """

    def __init__(self, transport: Transport, may_pause: Callable[[str], bool]):
        self._transport = transport
        self._may_pause = may_pause
        self._read: list[tuple[str, m.ToEngine | m.Malformed]] = []
        self._abandoned = False

    def receive(self, timeout_s: float | None) -> list[tuple[str, m.ToEngine | m.Malformed]]:
        """Return all messages that wait to be handled. If there are none, wait as ``Transport.recv`` does."""
        read, self._read = self._read, []
        return read + self._transport.recv(0.0 if read else timeout_s)

    def pause_has_come(self) -> bool:
        """Return whether a pause has come for which the runner must abandon the step in flight. Called between two
        layers. :meth:`receive` returns the pause with the other messages later."""
        arrived = self._transport.recv(0.0)
        self._read += arrived
        wanted = any(
            isinstance(message, m.Call) and closes_whole_engine(message.args) and self._may_pause(client)
            for client, message in arrived
        )
        if self._abandoned or not wanted:
            return False
        self._abandoned = True
        return True

    def step_completed(self) -> None:
        """Allow the next step to be abandoned."""
        self._abandoned = False


class CommonEngine:
    """The engine. on_commit is called after each commit of weights, on the loop's thread: see WeightSwitch. clock:
    seconds, for deadlines and heartbeats. runs(pid): whether the process of a client lives and is not stopped.
    retained_log: of the requests with retain_s; None = there is no next engine. drafter: guesses tokens; None = as the
    config says.

    events: gets all that happens, for those who look."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        transport: Transport,
        boot_id: str | None = None,
        on_commit: Callable[[bool], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        runs: Callable[[int], bool] = process_runs,
        retained_log: RetainedLog | None = None,
        drafter: Drafter | None = None,
    ):
        info = self.info = runner.info
        assert info.num_blocks * info.block_size >= info.max_model_len, "the KV cache must hold at least one request"
        self.config, self.boot_id = config, boot_id or uuid.uuid4().hex
        self._runner, self._transport, self._clock = runner, transport, clock
        self._parts = parts = EngineParts(
            config, runner, transport, self.boot_id, on_commit, clock, runs, retained_log or RetainedLog(), drafter
        )
        self.events, self.metrics, self.scheduler, self.kv = parts.events, parts.metrics, parts.scheduler, parts.kv
        self.retention, self.delivery, self.lifecycle = parts.retention, parts.delivery, parts.lifecycle
        self.scopes, self.pause, self.adapters = parts.scopes, parts.scopes.whole_pause, parts.adapters
        self.weights, self.sleeper, self.gateway_lease = parts.weights, parts.sleeper, parts.gateway_lease
        self.viewers, self._non_finite = Viewers(self.events, parts, clock), NonFiniteWatch(self.metrics)
        self._adapter_reads, self._switch = self.adapters.reads, parts.switch
        add_gauges(parts, config)
        self._inbox = Inbox(transport, self.gateway_lease.leads)
        self._next_heartbeat, self._next_tell, self._stopping, self._was_busy = 0.0, 0.0, False, False
        self._owed_rest_s = 0.0  # to staging
        self._on_message: dict[type, Callable[[str, Any], None]] = {
            m.Hello: self._hello,
            AddRequest: parts.admission.add,
            m.CancelRequest: self.lifecycle.cancel,
            m.Call: self._call,
            m.Malformed: self._malformed,
            m.FenceAck: self.delivery.acknowledge,
        }
        self._on_call = handlers_of(self, self.viewers, self.adapters.lookups, *vars(parts).values())
        if config.lost_commit:
            self.weights.hold_for_republish()

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Run the loop until ``stop``. Every open request and call is answered at the end, but those of gateways: their
        connections are closed. Raises EngineError if a step failed: the process must be replaced."""
        path, max_mb, dropped = self.config.trace, self.config.trace_max_mb, self.metrics.trace_dropped.inc
        with tracing(path, max_mb, self.events, self.boot_id, self.info.num_blocks, dropped):
            self._run()

    def _run(self) -> None:
        self.weights.refresh_standby()
        try:
            while not self._stopping:
                self.run_once(block=True)
        except Exception as error:
            log.exception("the engine failed")
            failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._dismiss_gateways()
            self._end_everything(FinishReason.ERROR, failure)
            raise EngineError(str(error)) from error
        self._dismiss_gateways()
        self._end_everything(FinishReason.ABORT, EngineDead("the server is shutting down"))

    def _dismiss_gateways(self) -> None:
        """Drop the gateways. Their requests need not end with this engine: they go on at another one."""
        clients = self.delivery.clients
        for client in [c for c in clients if clients[c].gateway or c == self.gateway_lease.gateway]:
            self.delivery.dismiss(client)

    def stop(self) -> None:
        """Ask the loop to end. Safe to call from any thread and from a signal handler."""
        self._stopping = True
        self._transport.wake()

    def run_once(self, block: bool) -> None:
        """Run one round of the loop. Every invariant of the engine holds between any two lines of this function."""
        for client, message in self._inbox.receive(self._idle_time() if block else 0.0):
            self._handle(client, message)
            self.weights.swap_prepared()
        self.send_heartbeats()
        self.delivery.drop_unreachable()
        self.weights.poll()
        self.adapters.poll()
        self.viewers.poll()
        self.lifecycle.end_what_is_due()
        self.lifecycle.hand_over([])
        self._settle()
        plan = self.scheduler.plan()
        self._adapter_reads.serve_memory()
        if plan is not None:
            self.lifecycle.hand_over(self._step(plan))
            self._settle()

    def _settle(self) -> None:
        self.scopes.settle()
        self.sleeper.settle()

    def _idle_time(self) -> float:
        """Return the seconds that the loop may block: while there is work, the time that it leaves to staging, else the
        time to the next deadline. A message ends the wait."""
        if self.scheduler.ended or self.scheduler.has_work:
            self._was_busy = True
            return self._take_rest()
        if self._was_busy and not len(self.lifecycle.requests):
            self._was_busy = False
            self.lifecycle.check_idle()
        deadlines = (
            self.scopes.next_deadline(),
            self.weights.next_deadline(),
            self.adapters.next_deadline(),
            self.sleeper.next_deadline(),
            self.viewers.next_deadline(),
            self.lifecycle.next_deadline(),
            self._next_heartbeat,
            self._next_tell if self.scheduler.load.changed else None,
        )
        return max(min(d for d in deadlines if d is not None) - self._clock(), 0.0)

    def _take_rest(self) -> float:
        """Return the rest that the loop owes to staging. The transport waits whole milliseconds, so what is less than
        one goes to a later rest."""
        rest = math.floor(self._owed_rest_s * 1000) / 1000
        self._owed_rest_s -= rest
        return rest

    def _step(self, plan: StepPlan) -> list[NewTokens]:
        if not self.events.watched_steps:
            return self._compute(plan) or []
        began, requests = self._clock(), self.scheduler.in_flight
        tokens = self._compute(plan)
        fields = {"plan": plan, "requests": requests, "sampled": tokens, "free_blocks": self.kv.num_free}
        self.events.add(EventKind.STEP, "", seconds=self._clock() - began, **fields)
        return tokens or []

    def _compute(self, plan: StepPlan) -> list[NewTokens] | None:
        """Compute one step. Return its tokens, or None if the step was given up for a pause."""
        result = self._runner.execute(plan, self._between_layers)
        if result is None:
            self.scheduler.abandon()
            self.metrics.steps_abandoned.inc()
            return None
        self._inbox.step_completed()
        self._owed_rest_s = self._owed_rest_s + STAGING_REST * result.elapsed_s if self.weights.staging else 0.0
        before = self.scheduler.num_non_finite
        tokens = self.scheduler.apply(plan, result)
        self._non_finite.observe(plan, len(tokens), self.scheduler.num_non_finite - before)
        return tokens

    def _between_layers(self) -> bool:
        self.send_heartbeats()
        return self._inbox.pause_has_come()

    def send_heartbeats(self) -> None:
        """Send every client a heartbeat, at most once in heartbeat_s. A client that hears nothing for stall_s kills
        this process as stuck. The gateways of a fleet get one after each change of the load, at most once in TELL_S.

        The loop sends the heartbeats, because a separate thread would go on when the loop hangs. So long work must call
        this function between its pieces: each layer of a step, each slice of prompt logprobs. A piece takes
        milliseconds, or about a second on a slow machine. No request changes.
        """
        now = self._clock()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self.config.heartbeat_s
            self.delivery.send_heartbeats()
        elif self.scheduler.load.changed and now >= self._next_tell:
            self._next_tell = now + TELL_S
            self.scheduler.load.changed = False
            self.delivery.tell_gateways()

    # ------------------------------------------------------------------ messages

    def _handle(self, client: str, message: m.ToEngine | m.Malformed) -> None:
        """Handle one message. A handler that raises an unexpected exception has answered the message. The engine then
        goes on if its state is consistent. If not, the engine ends, as after a failed step."""
        if client not in self.delivery.clients and not isinstance(message, m.Hello):
            self._transport.send(client, m.Goodbye())
            return
        try:
            self._on_message[type(message)](client, message)
        except Exception:
            log.exception("a %s of client %s could not be handled", type(message).__name__, client)
            self.metrics.internal_errors.inc()
            self.lifecycle.check_integrity()
            self.adapters.check_integrity()

    def _malformed(self, client: str, message: m.Malformed) -> None:
        """Answer the call or the request that could not be decoded."""
        error = RequestError(f"the engine cannot read this message: {message.why}")
        if message.call_id is not None:
            self.delivery.reply(client, message.call_id, {}, error)
        if message.request_id is not None:
            self.delivery.reject(client, message.request_id, error)

    def _hello(self, client: str, hello: m.Hello) -> None:
        here = hello.host in ("", host_id())
        self.delivery.clients[client] = ClientProcess(hello.pid, here, hello.gateway)
        welcome = m.Welcome(self.boot_id, os.getpid(), self.info.max_model_len, VERSION, known_messages())
        self.delivery.send(client, welcome)
        self.delivery.send_heartbeat(client)

    def _call(self, client: str, call: m.Call) -> None:
        answered = False

        def answer(result: dict[str, Any], error: Exception | None = None) -> None:
            nonlocal answered
            if not answered:  # a handler that failed may have kept ``answer`` for later
                answered = True
                self.delivery.reply(client, call.call_id, result, error)

        try:
            self.gateway_lease.check(call.args, client)
            self.gateway_lease.note_change(call.change, client)
            if (handler := self._on_call.get(type(call.args))) is None:
                raise RequestError(f"{type(call.args).__name__} is a call between gateways, and this is an engine")
            result = handler(call.args, client, answer)
        except Exception as error:
            answer({}, error)
            if not isinstance(error, FastDeployError):
                raise
        else:
            if result is not None:  # None: the handler answers later
                answer(result)

    @handles(m.LeadArgs)
    def _lead(self, args: m.LeadArgs, client: str) -> dict[str, Any]:
        is_another = client != self.gateway_lease.gateway
        if is_another:
            self.delivery.send(self.gateway_lease.gateway, m.Heartbeat())  # drops a leader that has died
        self.gateway_lease.lead(args, client)
        if is_another:
            self.scopes.keep_holds()
        self.delivery.lead(client, args.patience_s)
        self.adapters.stop_lookups()
        self.adapters.note_past_epoch(args.past_adapter_epoch)
        return fleet_state(self._parts)

    @handles(m.FleetStateArgs)
    def _fleet_state(self, args: m.FleetStateArgs) -> dict[str, Any]:
        return fleet_state(self._parts)

    @handles(m.AbortArgs)
    def _abort(self, args: m.AbortArgs, client: str) -> dict[str, Any]:
        return self.scopes.abort(args, None if self.gateway_lease.leads(client) else client)

    @handles(m.MetricsArgs)
    def _metrics_text(self, args: m.MetricsArgs) -> dict[str, Any]:
        return {"text": self.metrics.render()}

    @handles(m.ResetCacheArgs)
    def _reset_cache(self, args: m.ResetCacheArgs) -> dict[str, Any]:
        return self.lifecycle.reset_cache(args, self.scopes.whole)

    @handles(m.ModelInfoArgs)
    def _model_info(self, args: m.ModelInfoArgs) -> dict[str, Any]:
        config = self.config
        limits = {"max_waiting": config.max_waiting, "max_num_seqs": config.max_num_seqs}
        limits |= {"max_lora_rank": config.max_lora_rank, "has_adapter_root": bool(config.adapter_root)}
        model = self.info._replace(eos_token_ids=self.scheduler.eos_token_ids)._asdict()
        model["experts"] = None if self.info.experts is None else msgspec.structs.asdict(self.info.experts)
        return {**model, **limits, **self.scopes.whole.weights_label()}

    @handles(m.ResetArgs)
    def _reset(self, args: m.ResetArgs) -> dict[str, Any]:
        """Reset the engine for a trainer that starts over. See messages.ResetArgs."""
        check_label("version", args.version)
        aborted = self.lifecycle.abort_all("the trainer starts over (reset)", self.scopes.whole)
        self.lifecycle.hand_over([])  # the final outputs go before the reply
        self.retention.forget_ended()  # the next run may use the same request ids
        sessions = self.weights.drop_session("dropped by a reset")
        loads = self.adapters.drop_loads("dropped by a reset")
        unloaded = self.adapters.unload_all()  # the next run may use the same names
        released = self.scopes.release_anonymous_holds()
        self.scheduler.drop_kv(self.scopes.whole)
        self._switch.relabel(args.version)
        return {
            "aborted": len(aborted),
            "released": released,
            "sessions_aborted": sessions,
            "loads_aborted": loads,
            "adapters_unloaded": unloaded,
            "still_held_by": self.scopes.holds(),
            **self.scopes.whole.weights_label(),
        }

    def _end_everything(self, reason: FinishReason, error: FastDeployError) -> None:
        self.lifecycle.end_all(reason, error.message)
        self.scopes.fail(error)
        self.weights.fail(error)
        self.adapters.fail(error)
        self.sleeper.fail(error)
