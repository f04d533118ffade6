"""The clients of the engine and the messages to them: outputs, heartbeats, and the fence that proves delivery."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NamedTuple

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.process import stat_of
from fastdeploy.core.request import NewTokens, Request, Scope
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.messages import Output
from fastdeploy.inter_communicator.transport import Transport

log = logging.getLogger("fastdeploy.engine")

MAX_OUTPUTS = 512  # in one message. A step rarely makes more; the end of all waiting requests may
DEAD_OR_STOPPED = "ZXxTt"  # of the states in man 5 proc: zombie, dead, stopped by a signal, stopped by a debugger


class ClientProcess(NamedTuple):
    """The process of a client. here: whether it runs on this machine, so that its state can be looked up by ``pid``.
    gateway: see messages.Hello."""

    pid: int
    here: bool
    gateway: str = ""


class SilentClients(NamedTuple):
    """Process ids of API servers that have not acknowledged a fence. slow: those whose process runs, which get more
    time. dropped: those that count as gone."""

    slow: list[int]
    dropped: list[int]


def process_runs(pid: int) -> bool:
    """Return whether the process ``pid`` lives and is not stopped. A process that waits or computes runs."""
    try:
        return stat_of(pid)[0] not in DEAD_OR_STOPPED
    except OSError:
        return False


Answer = Callable[[dict[str, Any], FastDeployError | None], None]  # answers a control call: (result, error)


class DeliveryFence:
    """A message to every client, behind all outputs sent so far. Transports keep the order of messages. A client
    acknowledges the fence when its waiting requests have got all outputs before the fence. When every client has
    acknowledged, and no output of the scope was sent meanwhile, every output of the scope is delivered. A successful
    send on a socket does not prove that.

    deadline: time on the loop's clock. After it the engine checks the clients that have not acknowledged. last: the
    same for all clients but the gateways that follow another one.
    """

    def __init__(self, fence_id: int, scope: Scope, clients: Iterable[str], deadline: float, last: float):
        self.id = fence_id
        self.scope = scope
        self.unacknowledged = set(clients)
        self.deadline, self.last = deadline, last
        self.followed = False  # True once an output of the scope was sent behind the fence

    @property
    def passed(self) -> bool:
        return not self.unacknowledged and not self.followed

    @property
    def overtaken(self) -> bool:
        """True if all have acknowledged, but an output of the scope followed: a new fence must be raised."""
        return not self.unacknowledged and self.followed


class Delivery:
    """The connected clients, and all messages to them. retain: called with every output of a request with retain_s,
    sent or not. load(client): returns the load that a client is told. runs(pid): whether a process of this machine
    runs. clock: seconds, for output intervals. on_gone(client): called once when a client cannot be reached any more;
    the lifecycle of requests sets it.

    Tokens of a request with an output interval wait here. They are delivered at the first step behind a multiple of the
    interval, so those of many requests are in one message, and with the end of the request. They are also delivered
    when somebody must have them: before a fence of their scope, and before the goodbye to their client."""

    def __init__(
        self,
        transport: Transport,
        retain: Callable[[Output], None],
        load: Callable[[str], m.Load],
        runs: Callable[[int], bool],
        clock: Callable[[], float],
    ):
        self._transport = transport
        self._retain = retain
        self._load = load
        self._runs = runs
        self._clock = clock
        self._waiting: dict[Request, None] = {}  # requests with tokens that wait for their interval
        self.on_gone: Callable[[str], None] = lambda client: None
        self.clients: dict[str, ClientProcess] = {}  # by name
        self._unreachable: set[str] = set()
        self._fence_ids = count(1)
        self._leader, self._patience_s = "", 0.0
        self._fences: dict[Scope, DeliveryFence] = {}  # raised and not lowered yet

    def send(self, client: str, message: m.ToClient) -> None:
        if client in self.clients and not self._transport.send(client, message):
            self.drop(client)

    def reply(self, client: str, call_id: int, result: dict[str, Any], error: Exception | None = None) -> None:
        self.send(client, m.Reply(call_id, result, None if error is None else _failure(error)))

    def reject(self, client: str, request_id: str, error: Exception) -> None:
        """Tell a client why its request gets no outputs, or no further outputs."""
        self.send(client, m.Rejected(request_id, _failure(error)))

    def dismiss(self, client: str) -> None:
        """Drop a client, and tell it to connect again if its process still runs."""
        self.deliver(lambda request: request.group.client == client)
        self._transport.send(client, m.Goodbye())
        self.drop(client)

    def send_heartbeats(self) -> None:
        """Send a heartbeat to every client. No request changes, so the call is safe in the middle of a step. The next
        ``drop_unreachable`` drops the clients that could not be reached."""
        for client in self.clients:
            self.send_heartbeat(client)

    def tell_gateways(self) -> None:
        """Send a heartbeat to each of several gateways, for its load."""
        for client, process in self.clients.items():
            if process.gateway:
                self.send_heartbeat(client)

    def send_heartbeat(self, client: str) -> None:
        """Send a heartbeat to one client, see ``send_heartbeats``."""
        if not self._transport.send(client, m.Heartbeat(self._load(client))):
            self._unreachable.add(client)

    def drop_unreachable(self) -> None:
        while self._unreachable:
            self.drop(self._unreachable.pop())

    def broadcast(self, message: m.ToClient) -> None:
        for client in list(self.clients):
            self.send(client, message)

    def drop(self, client: str) -> None:
        if client in self.clients:
            del self.clients[client]
            for fence in self._fences.values():
                fence.unacknowledged.discard(client)
            self.on_gone(client)

    def send_outputs(self, step: list[NewTokens], ended: list[Request]) -> None:
        """Send the tokens of a step that need not wait, and one final output for each request that ended."""
        now, due = self._clock(), []
        for new in step:
            request = new.request
            if request.finish_reason is not None:  # its final output has them
                continue
            if now < request.next_output_at:
                self._waiting[request] = None
                continue
            due.append(request)
            if interval_s := request.group.output_interval_s:
                request.next_output_at = (now // interval_s + 1) * interval_s
        self._send(due + ended)

    def deliver(self, wanted: Callable[[Request], bool]) -> None:
        """Send the tokens that wait for their interval, of the requests that are ``wanted``."""
        self._send([request for request in self._waiting if wanted(request)])

    def _send(self, requests: list[Request]) -> None:
        """Send an output of each request. A client with more than MAX_OUTPUTS outputs gets several messages, so it can
        read the first while the others are made."""
        by_client: dict[str, list[Output]] = defaultdict(list)
        for request in requests:
            self._waiting.pop(request, None)
            group = request.group
            retained = group.add.retain_s > 0
            if request.silent and not retained:
                continue
            output = _output(request)
            if retained:
                self._retain(output)
            if not request.silent and group.client in self.clients:
                outputs = by_client[group.client]
                outputs.append(output)
                if self._fences:
                    self._follow_fences(group.model.scope)
                if len(outputs) == MAX_OUTPUTS:
                    self.send(group.client, m.Outputs(by_client.pop(group.client)))
        for client, outputs in by_client.items():
            self.send(client, m.Outputs(outputs, self._load(client)))

    def send_replay(self, client: str, scope: Scope, outputs: list[Output]) -> None:
        """Send the earlier outputs of a request of ``scope`` to a client that attached to the request."""
        self._follow_fences(scope)
        self.send(client, m.Outputs(outputs))

    # ------------------------------------------------------------------ fence

    def lead(self, client: str, patience_s: float) -> None:
        """Wait for the acknowledgements of other gateways than ``client`` for so long. 0 = there is no other one."""
        self._leader, self._patience_s = client, patience_s

    def _follows(self, client: str) -> bool:
        return bool(self.clients[client].gateway) and client != self._leader

    def fence_timeout_s(self, longest_s: float) -> float:
        """Return the time for an acknowledgement."""
        follows = self._patience_s and any(map(self._follows, self.clients))
        return min(self._patience_s, longest_s) if follows else longest_s

    def raise_fence(self, scope: Scope, deadline: float, last: float) -> DeliveryFence:
        """Send a new fence, behind all tokens of the scope. It replaces an earlier fence of this scope. deadline, last:
        see DeliveryFence."""
        self.deliver(lambda request: scope.covers(request.scope))
        fence = self._fences[scope] = DeliveryFence(next(self._fence_ids), scope, self.clients, deadline, last)
        self.broadcast(m.Fence(fence.id))
        return fence

    def lower_fence(self, fence: DeliveryFence) -> None:
        """Stop waiting for ``fence``."""
        self._fences.pop(fence.scope, None)

    def acknowledge(self, client: str, ack: m.FenceAck) -> None:
        for fence in self._fences.values():
            if fence.id == ack.fence_id:
                fence.unacknowledged.discard(client)

    def give_up_on_silent_clients(self, fence: DeliveryFence, spare_running: bool) -> SilentClients:
        """Drop the clients that have not acknowledged ``fence``. spare_running: keep clients whose process is known to
        run. Nothing is known about processes of other machines. A gateway that follows another one is not kept: the
        requests that it has here go on elsewhere, and the gateway that leads does not wait for long. All others, and
        the one that leads, are kept until ``fence.last``."""
        silent, now = SilentClients([], []), self._clock()
        for client in list(fence.unacknowledged):
            if now < fence.last and not self._follows(client):
                continue
            pid, here, _ = self.clients[client]
            if spare_running and here and not self._follows(client) and self._runs(pid):
                log.warning("client %s (pid %d) is slow to acknowledge a fence: it gets more time", client, pid)
                silent.slow.append(pid)
                continue
            log.error("client %s (pid %d) did not acknowledge a fence: counted as gone", client, pid)
            silent.dropped.append(pid)
            self.dismiss(client)
        return silent

    def _follow_fences(self, scope: Scope) -> None:
        for fence in self._fences.values():
            fence.followed |= fence.scope.covers(scope)


def _output(request: Request) -> Output:
    """Return what of ``request`` was not delivered yet. It counts as delivered from now on."""
    start, request.num_delivered = request.num_delivered, request.num_output_tokens
    logprobs, request.logprobs = request.logprobs, []
    routed, request.routed = request.routed, b""
    first = start == 0
    return Output(
        request_id=request.group.add.request_id,
        choice=request.choice,
        token_ids=request.token_ids[request.num_prompt_tokens + start :],
        logprobs=logprobs,
        spans=request.spans(start),
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        stop_reason=request.stop_reason,
        prompt_logprobs=request.prompt_logprobs if first else [],
        cached_tokens=request.cached_tokens if first else 0,
        num_preempted=request.num_preempted if request.finish_reason else 0,
        message=request.message,
        routed=routed,
    )


def _failure(error: Exception) -> m.Failure:
    """Return the failure that a client reads. Any exception but a FastDeployError is an internal error."""
    if not isinstance(error, FastDeployError):
        return m.Failure(FastDeployError.code, f"internal error in the engine: {type(error).__name__}: {error}")
    return m.Failure(error.code, error.message, error.detail)
