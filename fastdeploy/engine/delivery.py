"""From the engine to its clients: outputs in batches, heartbeats, and the fence that proves delivery."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from fastdeploy.core.errors import FastDeployError
from fastdeploy.core.request import Request
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.messages import Output
from fastdeploy.inter_communicator.transport import Transport
from fastdeploy.scheduler.scheduler import NewToken

MAX_OUTPUTS = 512  # in a message: a batch is smaller; the end of all that wait is not


class Delivery:
    """Knows who is connected. ``on_gone(client)`` is called once for a client that cannot be reached any more.

    A fence goes to every client behind all outputs sent so far; transports are first-in first-out per client and a
    client acknowledges only when everything before it is in the hands of the waiting requests. So when all have
    acknowledged and nothing was sent since, every output made is delivered; a socket send alone proves nothing.
    """

    def __init__(self, transport: Transport, on_gone: Callable[[str], None], observe: Callable[[Output], None]):
        """observe: is shown every output of a request with retain_s, sent or not."""
        self._transport = transport
        self._on_gone = on_gone
        self._observe = observe
        self.clients: dict[str, int] = {}  # name -> process id
        self._unreachable: set[str] = set()
        self._outputs_sent = 0
        self._fence_id = 0
        self._fence_mark = 0
        self._unacknowledged: set[str] = set()

    def send(self, client: str, message: m.ToClient) -> None:
        if client in self.clients and not self._transport.send(client, message):
            self.drop(client)

    def reply(self, client: str, call_id: int, result: dict[str, Any], error: Exception | None = None) -> None:
        """Answer a control call."""
        self.send(client, m.Reply(call_id, result, None if error is None else _failure(error)))

    def reject(self, client: str, request_id: str, error: Exception) -> None:
        """Say why a request gets no outputs, or no further ones."""
        self.send(client, m.Rejected(request_id, _failure(error)))

    def dismiss(self, client: str) -> None:
        """Count a client as gone. If its process runs after all, it must connect again."""
        self._transport.send(client, m.Goodbye())
        self.drop(client)

    def beat(self) -> None:
        """Send a heartbeat to every client. Nothing else changes, so that this may be called in the middle of a step: a
        client that cannot be reached is dropped by the next ``drop_unreachable``."""
        for client in self.clients:
            if not self._transport.send(client, m.Heartbeat()):
                self._unreachable.add(client)

    def drop_unreachable(self) -> None:
        """Drop the clients that a heartbeat did not reach."""
        while self._unreachable:
            self.drop(self._unreachable.pop())

    def broadcast(self, message: m.ToClient) -> None:
        for client in list(self.clients):
            self.send(client, message)

    def drop(self, client: str) -> None:
        if client in self.clients:
            del self.clients[client]
            self._unacknowledged.discard(client)
            self._on_gone(client)

    def send_outputs(self, tokens: list[NewToken], ended: list[Request]) -> None:
        """Every new token, and one final output for each request that ended. One message per client; more only if
        there are more than MAX_OUTPUTS, so that the client reads the first while the others are made."""
        by_client: dict[str, list[Output]] = defaultdict(list)
        with_token = set()
        for token in tokens:
            with_token.add(token.request)
            self._collect(token.request, token, by_client)
        for request in ended:
            if request not in with_token:
                self._collect(request, None, by_client)
        for client, outputs in by_client.items():
            self.send_now(client, outputs)

    def _collect(self, request: Request, token: NewToken | None, by_client: dict[str, list[Output]]) -> None:
        group = request.group
        retained = group.add.retain_s > 0
        if request.silent and not retained:
            return
        output = _output(request, token)
        if retained:
            self._observe(output)
        if not request.silent and group.client in self.clients:
            outputs = by_client[group.client]
            outputs.append(output)
            if len(outputs) == MAX_OUTPUTS:
                self.send_now(group.client, by_client.pop(group.client))

    def send_now(self, client: str, outputs: list[Output]) -> None:
        self._outputs_sent += 1
        self.send(client, m.Outputs(outputs))

    # ------------------------------------------------------------------ fence

    def raise_fence(self) -> None:
        self._fence_id += 1
        self._fence_mark = self._outputs_sent
        self._unacknowledged = set(self.clients)
        self.broadcast(m.Fence(self._fence_id))

    def acknowledge(self, client: str, fence_id: int) -> None:
        if fence_id == self._fence_id:
            self._unacknowledged.discard(client)

    @property
    def fence_passed(self) -> bool:
        """Every client has acknowledged, and nothing was sent since."""
        return not self._unacknowledged and self._outputs_sent == self._fence_mark

    @property
    def fence_overtaken(self) -> bool:
        """Every client has acknowledged, but an output was sent since: it must be raised again."""
        return not self._unacknowledged and self._outputs_sent != self._fence_mark

    @property
    def silent_clients(self) -> set[str]:
        return set(self._unacknowledged)


def _output(request: Request, token: NewToken | None) -> Output:
    first = token.first if token is not None else request.num_output_tokens == 0
    return Output(
        request_id=request.group.add.request_id,
        choice=request.choice,
        token_ids=[token.token_id] if token else [],
        logprobs=[token.logprob] if token and token.logprob is not None else [],
        spans=[token.span] if token else [],
        finish_reason=request.finish_reason.value if request.finish_reason else None,
        stop_reason=request.stop_reason,
        prompt_logprobs=request.prompt_logprobs if first else [],
        cached_tokens=request.cached_tokens if token is None or token.first else 0,
        num_preempted=request.num_preempted if request.finish_reason else 0,
        message=request.message,
    )


def _failure(error: Exception) -> m.Failure:
    """The failure that a client reads. An exception from outside our tree is an internal error."""
    if not isinstance(error, FastDeployError):
        return m.Failure(FastDeployError.code, f"internal error in the engine: {type(error).__name__}: {error}")
    return m.Failure(error.code, error.message, error.detail)
