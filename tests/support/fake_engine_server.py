"""A scripted engine on a real ZMQ socket, in a thread: the HTTP side can be tested without a model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport

NO_PROCESS = 1 << 30  # above every process id: a client that takes the engine for stuck kills nobody
STATUS = {"is_paused": False, "rejecting_new_requests": False, "admission": None, "phase": "running"}


class FakeEngine:
    """Answers Hello and status calls.

    adapters: answer to AdaptersArgs. A request that names another adapter is refused.
    model_info: of the reply to ModelInfoArgs.
    script: gives the outputs of a request. Each is sent once the client has received the one before and ``taken()`` is
    true, since a reader that finds several outputs shows them as one. seen: every message without an answer of its own.
    """

    def __init__(
        self,
        endpoint: str,
        script: Callable[[AddRequest], list[m.Output]] | None = None,
        boot_id: str = "boot-1",
        pid: int | None = None,
        max_model_len: int = 128,
        vocab_size: int = 272,
        model_info: Mapping[str, Any] = {},
    ):
        self.boot_id = boot_id
        self.seen: queue.Queue[Any] = queue.Queue()
        self.requests: dict[str, AddRequest] = {}
        self.clients: list[str] = []
        self.status: dict[str, Any] = dict(STATUS)
        self.adapters: list[dict[str, Any]] = []
        self.replies: dict[type, Callable[[m.Call], m.Reply | None]] = {}
        self.beating = True
        self._owner: dict[str, str] = {}
        self._script = script
        self.taken: Callable[[], bool] = lambda: True
        self._unsent: dict[int, Iterator[m.Output]] = {}  # by the fence behind the last output that was sent
        self._next_fence = 1 << 32  # above the fences of tests
        self._welcome = m.Welcome(boot_id=boot_id, pid=pid or NO_PROCESS, max_model_len=max_model_len)
        self._model_info = {"vocab_size": vocab_size, **model_info}
        self._transport = ZmqRouterTransport(endpoint)
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for the test

    def send(self, message: m.ToClient, client: str | None = None) -> None:
        """Send to ``client``, or to the client that connected last."""
        self.do(lambda: self._transport.send(client or self.clients[-1], message))

    def emit(self, request_id: str, token_ids: list[int], choice: int = 0, **fields: Any) -> None:
        """Send one output to the client that owns the request."""
        output = m.Output(request_id=request_id, choice=choice, token_ids=token_ids, **fields)
        self.do(lambda: self._transport.send(self._owner[request_id], m.Outputs([output])))

    def expect(self, kind: type, timeout_s: float = 30.0) -> Any:
        """Return the next message of ``kind`` that a client sent, and drop those before it."""
        while True:
            message = self.seen.get(timeout=timeout_s)
            if isinstance(message.args if isinstance(message, m.Call) else message, kind):
                return message

    def die(self) -> None:
        """Close the socket, as the kernel does for a process that dies."""
        self.do(None)
        self._thread.join()
        self._transport.close()  # not in the thread, which may end before do() has woken it

    def do(self, action: Callable[[], None] | None) -> None:
        """Run ``action`` on the engine's thread between two batches of messages; None ends it."""
        self._todo.put(action)
        self._transport.wake()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            for client, message in self._transport.recv(0.02 if self.beating else None):
                self._handle(client, message)
            while not self._todo.empty():
                if (action := self._todo.get()) is None:
                    return
                action()
            if self.beating:
                for client in self.clients:
                    self._transport.send(client, m.Heartbeat())

    def _handle(self, client: str, message: m.ToEngine) -> None:
        match message:
            case m.Hello():
                self.clients.append(client)
                self._transport.send(client, self._welcome)
            case m.Call(args=m.ModelInfoArgs()):
                self._transport.send(client, m.Reply(message.call_id, self._model_info))
            case m.Call(args=args) if type(args) in self.replies:
                self.seen.put(message)
                if reply := self.replies[type(args)](message):
                    self._transport.send(client, reply)
            case m.Call(args=m.CheckUpdateArgs(session_id=session_id)):
                admitted = {"session_id": session_id, "lease_s": 300.0}
                self._transport.send(client, m.Reply(message.call_id, admitted))
            case m.Call(args=m.WeightInfoArgs()):
                self._transport.send(
                    client, m.Reply(message.call_id, {"session": None, "asleep": [], "weight_epoch": 0})
                )
            case m.Call(args=m.AdaptersArgs()):
                self._transport.send(client, m.Reply(message.call_id, {"adapters": self.adapters}))
            case m.Call(args=m.PauseStatusArgs()):
                self._transport.send(client, m.Reply(message.call_id, self.status))
            case m.Call(args=m.MetricsArgs()):
                self._transport.send(client, m.Reply(message.call_id, {"text": "fastdeploy:num_requests_running 0\n"}))
            case AddRequest(adapter=name) if name and name not in [known["lora_name"] for known in self.adapters]:
                self.seen.put(message)
                failure = m.Failure("model_not_found", f"model: there is no adapter {name!r}", {"param": "model"})
                self._transport.send(client, m.Rejected(message.request_id, failure))
            case AddRequest():
                self.requests[message.request_id] = message
                self._owner[message.request_id] = client
                self.seen.put(message)
                self._send_next(client, iter(self._script(message) if self._script else []))
            case m.FenceAck(fence_id=fence_id) if fence_id in self._unsent:
                for _ in range(20_000):  # while the client's event loop is busy
                    if self.taken():
                        break
                    time.sleep(0.001)
                self._send_next(client, self._unsent.pop(fence_id))
            case _:
                self.seen.put(message)

    def _send_next(self, client: str, outputs: Iterator[m.Output]) -> None:
        if (output := next(outputs, None)) is not None:
            self._next_fence += 1
            self._unsent[self._next_fence] = outputs
            self._transport.send(client, m.Outputs([output]))
            self._transport.send(client, m.Fence(self._next_fence))


def reply_with(token_ids: list[int], finish_reason: str = "length", version: str = "v1", step: int = 1):
    """Return a script that gives every choice ``token_ids``, ``step`` per output, with spans and requested logprobs."""

    def script(request: AddRequest) -> list[m.Output]:
        outputs = []
        for choice in range(request.n):
            for start in range(0, len(token_ids), step):
                outputs.append(one_output(request, choice, token_ids[start : start + step], start, version))
            last = outputs.pop()
            outputs.append(replace(last, finish_reason=finish_reason))
        return outputs

    return script


def one_output(request: AddRequest, choice: int, ids: list[int], start: int, version: str = "v1") -> m.Output:
    top = request.sampling.logprobs
    entry = None if top is None else Logprob.of(-0.5, tuple((i, -float(i + 1)) for i in range(top)))
    return m.Output(
        request_id=request.request_id,
        choice=choice,
        token_ids=ids,
        logprobs=[entry] * len(ids) if entry else [],
        spans=[Span(version, 1, start, start + len(ids))],
        cached_tokens=2 if start == 0 else 0,
    )
