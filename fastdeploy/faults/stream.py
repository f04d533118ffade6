"""Faults in the tokens of a request. All streams of one HTTP request share them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from fastdeploy.client.choice import pieces
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.outputs import Span
from fastdeploy.faults.book import FaultBook, Happening
from fastdeploy.faults.injection import ConnectionBroken, Injection
from fastdeploy.faults.rules import Rule
from fastdeploy.inter_communicator.messages import Output

SERVING = ("api_server", "gateway")  # what dies with the connections of its clients


class Stop:
    """A point in a request at which a fault happens: when the client has ``tokens`` tokens. middle: at the next one."""

    def __init__(self, rule: Rule, happening: Happening):
        self.rule, self.happening = rule, happening
        when = rule.parameters.get("when", "between")
        self.tokens = 0 if when == "before" else int(rule.parameters["tokens"])
        self.middle = when == "middle"
        self.at_once = self.tokens == 0 and not self.middle
        self.due = False

    def value(self, name: str) -> Any:
        return self.rule.parameters[name]


class RequestFaults:
    """The faults of one HTTP request for tokens. act(rule, request_id): kills or stops processes. keeps_tokens: tokens
    that come after the death of their engine are kept, since a fleet has counted them already."""

    def __init__(
        self,
        chosen: Sequence[tuple[Rule, Happening]],
        book: FaultBook,
        injection: Injection,
        act: Callable[[Rule, str], None],
        keeps_tokens: bool,
    ):
        self._book, self._injection, self._act, self._keeps_tokens = book, injection, act, keeps_tokens
        self._labels: list[tuple[Rule, Happening]] = []
        self._at_arrival: list[Stop] = []
        self._at_delivery: list[Stop] = []
        self._slow: tuple[float, Happening] | None = None
        for rule, happening in chosen:
            if rule.fault in ("version_wrong", "logprobs_wrong"):
                self._labels.append((rule, happening))
            elif rule.fault == "slow_tokens":
                self._slow = float(rule.parameters["seconds"]), happening
            elif rule.fault == "frozen" or (rule.fault == "death" and rule.parameters["of"] not in SERVING):
                self._at_arrival.append(Stop(rule, happening))
            else:
                self._at_delivery.append(Stop(rule, happening))
        self._streams: list[FaultyStream] = []
        self._arrived = self._delivered = 0
        self._stalled: asyncio.Task[None] | None = None
        self._lost = False  # the engine was killed

    @property
    def is_empty(self) -> bool:
        """Whether the request has no fault."""
        return not (self._labels or self._at_arrival or self._at_delivery or self._slow)

    def stream(self, *args: Any) -> FaultyStream:
        """Return a stream with these faults. The arguments are those of RequestStream."""
        self._streams.append(FaultyStream(self, *args))
        return self._streams[-1]

    # ------------------------------------------------------------------ tokens that arrive

    def submitted(self, request_id: str) -> None:
        """The engine has the request."""
        for stop in self._at_arrival:
            if stop.at_once:
                self._happen(stop, request_id)

    def arrive(self, stream: FaultyStream, output: Output) -> None:
        """Put an output of the engine into ``stream``."""
        for piece in pieces(self._labelled(output), 1):
            self._check(stream.request_id, next_arrived=True)
            if self._lost and not self._keeps_tokens:
                return
            self._arrived += len(piece.token_ids)
            stream.take(piece)
            if not stream.ended:
                self._check(stream.request_id, next_arrived=False)

    def _check(self, request_id: str, next_arrived: bool) -> None:
        for stop in self._at_arrival:
            if self._arrived >= stop.tokens and stop.middle is next_arrived:
                self._happen(stop, request_id)

    def _happen(self, stop: Stop, request_id: str) -> None:
        if stop.due:
            return
        stop.due = True
        self._lost = self._lost or stop.rule.fault == "death"
        self._book.acted(stop.happening)
        self._act(stop.rule, request_id)

    def _labelled(self, output: Output) -> Output:
        """Return ``output`` with its labels as the faults have them."""
        for rule, happening in self._labels:
            if rule.fault == "version_wrong" and output.spans:
                label, epochs = str(rule.parameters["label"]), int(rule.parameters["epochs"])
                output = replace(output, spans=[_wrong(span, label, epochs) for span in output.spans])
            elif rule.fault == "logprobs_wrong" and output.logprobs:
                add = float(rule.parameters["add"])
                wrong = [replace(entry, logprob=entry.logprob + add) for entry in output.logprobs]
                output = replace(output, logprobs=wrong)
            else:
                continue
            self._book.acted(happening)
        return output

    # ------------------------------------------------------------------ tokens that the client gets

    def deliver(self, stream: FaultyStream) -> list[Output]:
        """Return the outputs that the reader of ``stream`` may have now. Raises ConnectionBroken."""
        ready: list[Output] = []
        while stream.held:
            if self._stalled is not None:
                break
            if (stop := self._next_stop()) is not None:
                if not stop.due:  # first, the reader sends what it has got
                    stop.due = True
                    stream.wake()
                    break
                self._at_delivery.remove(stop)
                self._book.acted(stop.happening)
                if stop.rule.fault == "stream_stalled":
                    self._injection.silent = True
                    self._stall(float(stop.value("seconds")))
                    break
                broken = self._broken(stop, stream.request_id)
                if not stop.middle:
                    raise broken
                self._injection.broken = broken
                stream.wake()  # an answer without stream has all tokens
                return [*ready, stream.held.popleft()]
            output = stream.held.popleft()
            ready.append(output)
            self._delivered += len(output.token_ids)
            if self._slow is not None and output.token_ids:
                seconds, happening = self._slow
                self._book.acted(happening)
                if seconds:
                    self._stall(seconds)
        return ready

    def _next_stop(self) -> Stop | None:
        return next((stop for stop in self._at_delivery if self._delivered >= stop.tokens), None)

    def _broken(self, stop: Stop, request_id: str) -> ConnectionBroken:
        if stop.rule.fault == "death":
            return ConnectionBroken(lambda: self._act(stop.rule, request_id))
        return ConnectionBroken()

    def _stall(self, seconds: float) -> None:
        """Hold everything back for ``seconds``; 0 = until something is disarmed, and then no token is late."""

        async def wait() -> None:
            if await wait_released(self._book, seconds):
                self._slow = None
            self._stalled, self._injection.silent = None, False
            for stream in self._streams:
                stream.wake()

        self._stalled = asyncio.get_running_loop().create_task(wait())


class FaultyStream(RequestStream):
    """A stream that gives its reader what the faults let through. held: outputs of one token that wait."""

    def __init__(self, faults: RequestFaults, *args: Any):
        super().__init__(*args)
        self._faults = faults
        self.held: deque[Output] = deque()

    def put(self, output: Output) -> None:
        """See RequestStream."""
        self._faults.arrive(self, output)

    def take(self, output: Output) -> None:
        """Keep an output for the reader."""
        super().put(output)

    def read(self) -> list[Output]:
        """See RequestStream. Raises ConnectionBroken, too."""
        try:
            outputs = super().read()
        except Exception:
            if not self.held:
                raise
            outputs = []  # the error comes after what is held
        for output in outputs:
            self.held.extend(pieces(output, 1))
        ready = self._faults.deliver(self)
        if not self.held and self._error is not None:
            self.wake()
        return ready


async def wait_released(book: FaultBook, seconds: float) -> bool:
    """Wait for so many seconds, or until something is disarmed. 0 = until then alone. Return whether it was."""
    try:
        return await asyncio.wait_for(book.released.wait(), seconds or None)
    except TimeoutError:
        return False


def _wrong(span: Span, label: str, epochs: int) -> Span:
    return replace(span, version=label, weight_epoch=max(span.weight_epoch + epochs, 0))
