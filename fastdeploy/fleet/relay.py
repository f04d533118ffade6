"""A request of the fleet. Its outputs come from one replica, and from others if that replica is lost.

What of a request is at no replica is a :class:`RequestPart`, and at a replica an :class:`Attempt`. A choice that has
tokens goes on as a request of its own: its prompt with the tokens so far, and the rest of its budget. The random number
of a token depends on (seed, number of the choice, position) only, so the tokens are those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.client.resubmission import LOST, MAX_VAIN_LOSSES, rest_of
from fastdeploy.core.errors import DuplicateRequest, EngineDead, QueueFull, RequestsRejected
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest, part_id
from fastdeploy.fleet.endings import EndingCall
from fastdeploy.fleet.replica import Replica
from fastdeploy.fleet.router import Route, Seen
from fastdeploy.inter_communicator.messages import Output

REFUSED = (QueueFull, RequestsRejected)
MIN_S = 0.001  # for a deadline that has just passed: a request takes only times above 0


class Placer(Protocol):
    """What finds replicas for parts of requests. The methods return at once."""

    def lost(self, part: RequestPart) -> None:
        """Place a part whose replica was lost."""

    def refused(self, part: RequestPart, replica: Replica, error: Exception) -> bool:
        """Place a part that ``replica`` has refused. False: no other replica may take it."""
        ...


@dataclass(eq=False)
class RequestPart:
    """Choices [first, first + num) of a request: all of them, or one. request_id: the id that the engine gets. base:
    how many tokens of the choice the client has. refused_by: the names of replicas that refused it."""

    relay: Relay
    first: int
    num: int
    request_id: str
    base: int = 0
    refused_by: set[str] = field(default_factory=set)
    has_waited: bool = False
    timer: asyncio.TimerHandle | None = None  # while the part waits

    @property
    def is_whole(self) -> bool:
        """Whether the engine gets the client's request as it is."""
        return self.request_id == self.relay.request.request_id

    @property
    def open_choices(self) -> list[int]:
        """The choices that have not ended, by their numbers in the client's request."""
        return sorted(self.relay.outer.open_choices & set(range(self.first, self.first + self.num)))

    def request(self, now: float) -> AddRequest:
        """Return the message to the engine. now: on the event loop's clock."""
        request = self.relay.request
        if self.is_whole and self.relay.num_losses == 0 and not self.has_waited:
            return request
        waited = now - self.relay.began
        if request.deadline_s is not None and not request.arrival:  # else the engine counts from the arrival
            request = replace(request, deadline_s=max(request.deadline_s - waited, MIN_S))
        if request.max_queue_s is not None:
            left = None if any(self.relay.tokens) else max(request.max_queue_s - waited, MIN_S)
            request = replace(request, max_queue_s=left)
        return request if self.is_whole else self._rest_of(request)

    def _rest_of(self, request: AddRequest) -> AddRequest:
        """Return the request for one choice, with the tokens that it has."""
        tokens = self.relay.tokens[self.first]
        self.base = len(tokens)
        return rest_of(request, self.request_id, self.first, tokens)


class Relay:
    """A request of a client. outer: its stream, which the client reads. seen: the weights that the client has seen; no
    later token is of older ones. tokens: those that the client has, by choice. num_losses: how often its replica was
    lost. on_end: called at each choice's end, with the number of its tokens. endings: the calls that end the request,
    in their order. While one of them has not failed, the request may finish at its replica, but goes on at no other.
    The request always has a seed."""

    def __init__(
        self,
        request: AddRequest,
        outer: RequestStream,
        seen: Seen,
        placer: Placer,
        on_end: Callable[[Relay, int], None],
    ):
        self.request = request
        self.outer = outer
        self.seen = seen
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]
        self.began = asyncio.get_running_loop().time()
        self.num_losses = 0
        self.endings: list[EndingCall] = []
        self._vain_losses = [(0, 0)] * request.n  # by choice: losses since its last token, and tokens at the last one
        self.parts: set[RequestPart] = set()
        self.attempts: set[Attempt] = set()
        self._placer = placer
        self._on_end = on_end
        self._firsts: dict[int, Span] = {}  # span of the first token, by choice
        self._num_moves = [0] * request.n  # by choice, since its first token

    @property
    def client_id(self) -> str:
        """The id that the client knows."""
        return self.request.group or self.request.request_id

    def whole(self) -> RequestPart:
        """Return the request as one part."""
        part = RequestPart(self, 0, self.request.n, self.request.request_id)
        self.parts.add(part)
        return part

    async def send(self, part: RequestPart, route: Route) -> None:
        """Send ``part`` to a replica. Raises EngineDead if the replica is lost before."""
        request = replace(
            part.request(asyncio.get_running_loop().time()),
            session_began=self.seen.began,
            expected_cached=route.cached,
        )
        make = partial(Attempt, part, route)
        attempt = await route.replica.client.submit(request, self.outer.reader, make)
        assert isinstance(attempt, Attempt)
        self.parts.discard(part)
        self.attempts.add(attempt)
        route.began(part.num)
        if self.outer.ended:  # meanwhile
            attempt.close()
        elif len(self.outer.open_choices) < self.request.n:
            for k in set(range(part.first, part.first + part.num)) - self.outer.open_choices:
                attempt.cancel(k - part.first, "abort")

    def receive(self, output: Output) -> None:
        """Give an output to the client."""
        tokens = self.tokens[output.choice]
        if spans := output.spans:
            if not tokens:
                self._firsts[output.choice] = spans[0]
            if spans[-1].weight_epoch > self.seen.epoch:
                self.seen.epoch = spans[-1].weight_epoch
        tokens += output.token_ids
        if output.finish_reason is not None:
            self._on_end(self, len(tokens))
        self.outer.put(output)

    def moved(self, part: RequestPart, output: Output) -> Output:
        """Return an output of a choice that was moved as an output of the client's request."""
        choice, base = part.first, part.base
        first = self._firsts.get(choice)
        return replace(
            output,
            request_id=self.request.request_id,
            choice=choice,
            spans=[_shifted(span, base, first) for span in output.spans],
            cached_tokens=0 if base else output.cached_tokens,
            num_preempted=output.num_preempted + (self._num_moves[choice] if output.finish_reason else 0),
        )

    def failed(self, attempt: Attempt, error: Exception) -> None:
        """Go on elsewhere after the failure of ``attempt``, or give its error to the client."""
        self.attempts.discard(attempt)
        part = attempt.part
        # An engine that has dropped this gateway may still run the request, with retain_s. Then it knows the id.
        may_be_refused = REFUSED if part.is_whole else (*REFUSED, DuplicateRequest)
        if self._endings_in_force and isinstance(error, (*LOST, *may_be_refused)):
            self._end_as_asked(part.open_choices)
        elif isinstance(error, LOST):
            self.num_losses += 1
            if self._count_vain_losses(part.open_choices) >= MAX_VAIN_LOSSES:
                why = (
                    f"{MAX_VAIN_LOSSES} replicas were lost one after the other with this request, without a token of it"
                )
                self.outer.fail(EngineDead(f"{why}; it may be what ends them. The last one: {error}"))
                return
            for rest in self._rest_of(part):
                self.parts.add(rest)
                self._placer.lost(rest)
        elif attempt.started or not isinstance(error, may_be_refused):
            self.outer.fail(error)
        else:
            self.parts.add(part)
            if self._placer.refused(part, attempt.route.replica, error):
                return
            if isinstance(error, RequestsRejected) and self.tokens[part.first]:
                self.end(part.open_choices, error.message)  # as the pause does with requests that run
            else:
                self.outer.fail(error)

    def _count_vain_losses(self, choices: Sequence[int]) -> int:
        """Count a loss of the replica of ``choices``. Return the most losses that one of them has had since a token."""
        for k in choices:
            count, made = self._vain_losses[k]
            self._vain_losses[k] = (count + 1 if made == len(self.tokens[k]) else 1), len(self.tokens[k])
        return max((self._vain_losses[k][0] for k in choices), default=0)

    def _rest_of(self, part: RequestPart) -> list[RequestPart]:
        """Return the unfinished choices of a part whose replica was lost."""
        choices = part.open_choices
        if choices and not any(self.tokens[part.first : part.first + part.num]):
            return [RequestPart(self, part.first, part.num, part.request_id)]
        for k in choices:
            self._num_moves[k] += bool(self.tokens[k])
        ids = {k: part_id(self.request.request_id, f"{k}.{self.num_losses}") for k in choices}
        return [RequestPart(self, k, 1, ids[k]) for k in choices]

    def end_parts(self) -> None:
        """End what is at no replica, as the calls in ``endings`` ask. It has left the placer's queue."""
        choices = [k for part in self.parts for k in part.open_choices]
        self.parts.clear()
        if choices:
            self._end_as_asked(choices)

    @property
    def _endings_in_force(self) -> list[EndingCall]:
        return [ending for ending in self.endings if not ending.failed]

    def _end_as_asked(self, choices: Sequence[int]) -> None:
        first, *_ = endings = self._endings_in_force
        for ending in endings:
            ending.count(self.client_id, len(choices), sum(len(self.tokens[k]) for k in choices))
        self.end(choices, first.why(self.request) or "", first.stop_reason(self.request))

    def end(self, choices: Sequence[int], why: str, stop_reason: str | None = None) -> None:
        """End open choices, which are at no replica, with reason "abort"."""
        for k in choices:
            message = why if self.tokens[k] else f"Abort before prefill: {why}"
            end = Output(self.request.request_id, k, finish_reason="abort", stop_reason=stop_reason, message=message)
            self.outer.put(end)
        self.outer.wake()

    def cancel(self, choice: int, reason: str) -> None:
        """Cancel a choice at its replica."""
        for attempt in list(self.attempts):
            attempt.cancel(choice - attempt.part.first, reason)

    def close(self) -> None:
        """Cancel all that is left."""
        for attempt in list(self.attempts):
            attempt.close()
        self.attempts.clear()
        self.parts.clear()


class Attempt(RequestStream):
    """The stream of a part at a replica. It passes its outputs on at once, and keeps none. The client's stream has the
    same reader. started: it has an output."""

    def __init__(
        self,
        part: RequestPart,
        route: Route,
        request_id: str,
        n: int,
        cancel: Callable[[str, int | None, str], None],
        forget: Callable[[str], None],
        reader: Reader | None = None,
        fingerprint: str = "",
    ):
        super().__init__(request_id, n, cancel, forget, reader, fingerprint)
        self.part = part
        self.route = route
        self.started = False
        self._relay = part.relay
        self._is_whole = part.is_whole

    def put(self, output: Output) -> None:
        choice = output.choice
        if choice not in self._open:
            return
        if not self.started:
            self.started = True
            self.route.started(output.cached_tokens)
        if output.finish_reason is not None:
            self._end(choice)
        self._relay.receive(output if self._is_whole else self._relay.moved(self.part, output))

    def wake(self) -> None:
        self._relay.outer.wake()

    def fail(self, error: Exception) -> None:
        if self.ended:
            return
        self._error = error
        self._forget(self.request_id)
        self.route.closed()
        if not self._relay.outer.ended:
            self._relay.failed(self, error)

    def cancel(self, choice: int, reason: str) -> None:
        """Cancel a choice."""
        if choice in self._open and self._error is None:
            self._cancel(self.request_id, choice, reason)
            self._end(choice)

    def close(self) -> None:
        super().close()
        self.route.closed()

    def _end(self, choice: int) -> None:
        self.route.ended()
        super()._end(choice)
        if not self._open:
            self._relay.attempts.discard(self)
            self.route.closed()


def _shifted(span: Span, base: int, first: Span | None) -> Span:
    """Return the span of a choice that was moved when it had ``base`` tokens. first: span of its first token."""
    changed = first is not None and (first.weight_epoch, first.adapter_epoch) != (span.weight_epoch, span.adapter_epoch)
    return replace(span, start=span.start + base, end=span.end + base, recomputed=span.recomputed or changed)
