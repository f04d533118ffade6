"""Requests of hostile clients while replicas are lost, come back and are drained, on engines that the test plays.

A client knows every id that an engine has seen, and asks for requests of these names. Ids come in as HTTP hands them
over. Each token is its own position, so one that is lost or doubled shows."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastdeploy.client.choice import TextOptions
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.errors import DuplicateRequest, EngineDead, InvalidField, QueueFull
from fastdeploy.core.request import Group
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.request_table import RequestTable
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.replica import ReplicaEvent, ReplicaState
from fastdeploy.http.body import parse_body
from fastdeploy.http.openai.protocol import GenerationBody, generation_request
from fastdeploy.inter_communicator import messages as m
from fleet.played_fleet import MAX_WAITING, Fleet, PlayedConnection
from support.search import examples

NUM_REPLICAS = 2
MAX_TOKENS = 4
NAMES = ["x", "y", "z"]
LIMIT = NUM_REPLICAS * MAX_WAITING


class PlayedEngine(PlayedConnection):
    """Knows the ids of its requests as an engine does, and answers every call. added: called with each AddRequest.
    open: the position of the next token by request id and choice. hangs: it does nothing any more. refuses: every
    call."""

    def __init__(self, client: Any, added: Callable[[AddRequest], None]):
        super().__init__(client)
        self.open: dict[tuple[str, int], int] = {}
        self._adds: dict[str, AddRequest] = {}
        self._added = added
        self.hangs = self.refuses = False

    def send(self, message: m.ToEngine) -> None:
        super().send(message)
        if self.hangs:
            return
        later = asyncio.get_running_loop().call_soon
        match message:
            case m.Call() if self.refuses:
                later(self.refuse, message, InvalidField.code)
            case m.Call(args=m.AbortArgs() | m.ResetArgs()):
                later(self._abort, message)
            case m.Call():
                later(self._client._receive, m.Reply(message.call_id, {}))
            case AddRequest():
                later(self._add, message)
            case m.CancelRequest(request_id=name, choice=choice):
                later(self._cancel, name, choice)

    def _add(self, add: AddRequest) -> None:
        self._added(add)
        table = RequestTable()
        for other in self._adds.values():
            table.add(Group("gateway", other, None))
        if table.id_is_in_use(add):
            self.reject(add.request_id, DuplicateRequest.code)
        else:
            self._adds[add.request_id] = add
            self.open |= {(add.request_id, k): add.resumed_tokens for k in range(add.n)}

    def _cancel(self, request_id: str, choice: int | None) -> None:
        for key in [key for key in self.open if key[0] == request_id and choice in (None, key[1])]:
            self._end(key)

    def _abort(self, call: m.Call) -> None:
        """Abort the requests that the call names, or all, and answer the call."""
        ids = call.args.request_ids if isinstance(call.args, m.AbortArgs) else None
        ended: dict[str, int] = {}
        for key in list(self.open):
            client_id = self._adds[key[0]].group or key[0]
            if ids is None or client_id in ids:
                ended[client_id] = ended.get(client_id, 0) + self.open[key]
                self._end(key)
                self.output(key[0], [], key[1], finish_reason="abort")
        if isinstance(call.args, m.ResetArgs):
            self.reply(call, aborted=len(ended), version="0")
            return
        aborted = [{"request_id": name, "output_token_count": count} for name, count in ended.items()]
        self.reply(call, aborted=aborted, not_found=[name for name in ids or () if name not in ended])

    def _end(self, key: tuple[str, int]) -> None:
        del self.open[key]
        if not any(name == key[0] for name, _ in self.open):
            del self._adds[key[0]]

    def make_token(self, key: tuple[str, int]) -> None:
        position = self.open[key]
        self.open[key] += 1
        ends = position + 1 == MAX_TOKENS
        if ends:
            self._end(key)
        self.output(key[0], [position], key[1], finish_reason="length" if ends else None)


class Requests(RuleBasedStateMachine):
    """open: streams by the id that the client knows, while one of them has not ended. seen: ids that engines have got.
    placed: those of requests that are open. tokens: of each choice. aborted: streams that a call has ended."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.WARNING)  # of each loss of a replica
        self.loop = asyncio.new_event_loop()
        self.seen: set[str] = set()
        self.placed: set[str] = set()
        self.open: dict[str, list[RequestStream]] = {}
        self.tokens: dict[tuple[RequestStream, int], list[int]] = {}
        self.aborted: set[RequestStream] = set()
        self.fleet = self.do(lambda: Fleet(NUM_REPLICAS, lambda client: PlayedEngine(client, self.added)))

    def teardown(self) -> None:
        self.loop.close()
        logging.disable(logging.NOTSET)

    def do(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` in the event loop, until nothing is left to send."""

        async def run() -> Any:
            result = work()
            if inspect.isawaitable(result):
                result = await result
            for _ in range(20):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(run())

    def added(self, add: AddRequest) -> None:
        self.seen.add(add.request_id)
        self.placed.add(add.request_id)

    # ------------------------------------------------------------------ clients

    @rule(name=st.sampled_from(NAMES), num_prompts=st.integers(1, 2), n=st.integers(1, 2))
    def ask(self, name: str, num_prompts: int, n: int) -> None:
        try:
            body = parse_body({"request_id": name, "n": n}, GenerationBody, {})
        except InvalidField as error:
            assert error.field == "request_id" and name in self.seen - set(NAMES), "a client made this id"
            return
        sampling, prompts = [SamplingParams(max_tokens=MAX_TOKENS)] * num_prompts, [[1, 2]] * num_prompts
        adds = generation_request(body, "cmpl", prompts, sampling, [TextOptions()], 0.0, "").requests
        if name not in self.open:
            self.placed -= {add.request_id for add in adds}
        streams: list[RequestStream] = []
        try:
            for add in adds:
                streams.append(self.do(lambda add=add: self.fleet.client.submit(add)))
        except DuplicateRequest:
            assert name in self.open
        except QueueFull as error:
            assert not self.takes_requests and self.num_new + n > LIMIT and error.detail["retry_after"]
        except EngineDead:
            assert not self.fleet.client.membership.quorum
        else:
            assert name not in self.open
            self.open[name] = streams
            self.tokens |= {(stream, k): [] for stream in streams for k in range(n)}
            return
        for stream in streams:
            self.do(stream.close)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def ask_for_an_id_that_an_engine_has_seen(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from(sorted(self.seen, reverse=True))), 1, 1)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.open))))

    def close(self, name: str) -> None:
        for stream in self.open.pop(name):
            self.do(stream.close)

    # ------------------------------------------------------------------ calls that end requests

    @precondition(lambda self: len(self.lost) < NUM_REPLICAS)
    @rule(name=st.none() | st.sampled_from(NAMES), resets=st.booleans(), hangs=st.integers(-1, NUM_REPLICAS - 1))
    def abort(self, name: str | None, resets: bool, hangs: int) -> None:
        """Abort one request or all, or reset. hangs: the replica that is fenced in this call; -1 = none."""
        args = m.ResetArgs() if resets and name is None else m.AbortArgs([name] if name else None, abort_all=not name)
        self.no_client_pays_for_the_names_of_another_one()  # forgets what has ended
        streams = [stream for key in self.open if name in (None, key) for stream in self.open[key] if not stream.ended]
        ids = {key for key in self.open if name in (None, key)}
        open_choices = {(stream, k) for stream in streams for k in stream.open_choices}
        num_tokens = sum(len(self.tokens[choice]) for choice in open_choices)
        self.aborted |= set(streams)
        hanging = [i for i in range(NUM_REPLICAS) if i == hangs and i not in self.lost]
        for i in hanging:
            self.fleet.engines[i].hangs = True
        report = self.do(lambda: self.call(args, hanging))
        assert all(stream.ended for stream in streams), "the call has ended them all"
        if report is None:
            assert len(self.lost) == NUM_REPLICAS
        elif isinstance(args, m.AbortArgs):
            assert {entry["request_id"] for entry in report["aborted"]} == ids
            assert sum(entry["output_token_count"] for entry in report["aborted"]) == num_tokens
            assert report["not_found"] == ([name] if name and name not in ids else [])

    @precondition(lambda self: len(self.lost) < NUM_REPLICAS and not self.fleet.client.num_waiting)
    @rule()
    def abort_in_vain(self) -> None:
        """All replicas refuse an abort of all: every request goes on."""
        engines = [self.fleet.engines[i] for i in range(NUM_REPLICAS) if i not in self.lost]
        for engine in engines:
            engine.refuses = True
        assert self.do(lambda: self.call(m.AbortArgs(abort_all=True), [])) is None
        for engine in engines:
            engine.refuses = False

    async def call(self, args: m.Args, hanging: list[int]) -> dict[str, Any] | None:
        """Make a call in which replicas are fenced. Return its report, or None if it fails."""
        call = asyncio.ensure_future(self.fleet.client.call(args))
        for _ in range(5):
            await asyncio.sleep(0)
        for i in hanging:
            self.fleet.lose(i)
        try:
            return await call
        except (EngineDead, InvalidField):
            return None

    # ------------------------------------------------------------------ replicas

    @precondition(lambda self: self.running)
    @rule(data=st.data(), then_lose=st.booleans())
    def make_token(self, data: st.DataObject, then_lose: bool) -> None:
        i, key = data.draw(st.sampled_from(self.running))
        self.do(lambda: self.fleet.engines[i].make_token(key))
        if then_lose:
            self.do(lambda: self.fleet.lose(i))

    @precondition(lambda self: self.lost)
    @rule()
    def connect(self) -> None:
        for i in self.lost:
            self.do(lambda i=i: self.fleet.connect(i))

    @rule(i=st.integers(0, NUM_REPLICAS - 1))
    def lose(self, i: int) -> None:
        if i not in self.lost:
            self.do(lambda: self.fleet.lose(i))

    @rule(how_many=st.integers(0, NUM_REPLICAS))
    def drain(self, how_many: int) -> None:
        """Drain the first replicas, and let the others take requests."""
        for i, replica in enumerate(self.fleet.replicas):
            if i < how_many and replica.state is ReplicaState.MEMBER:
                self.do(lambda replica=replica: replica.advance(ReplicaEvent.DRAIN))
            elif i >= how_many and replica.state is ReplicaState.DRAINING:
                self.do(lambda replica=replica: replica.advance(ReplicaEvent.UNDRAIN))

    @property
    def lost(self) -> list[int]:
        return [i for i, replica in enumerate(self.fleet.replicas) if not replica.in_quorum]

    @property
    def running(self) -> list[tuple[int, tuple[str, int]]]:
        """Choices that run, with the number of their replica."""
        return [(i, key) for i in range(NUM_REPLICAS) if i not in self.lost for key in self.fleet.engines[i].open]

    # ------------------------------------------------------------------ what holds

    @property
    def takes_requests(self) -> bool:
        return any(replica.state is ReplicaState.MEMBER for replica in self.fleet.replicas)

    @property
    def num_new(self) -> int:
        """Choices that wait in the gateway and have been at no replica."""
        waiting = self.fleet.client._dispatcher._waiting
        return sum(part.num for part in waiting if part.relay.request.request_id not in self.placed)

    @invariant()
    def no_client_pays_for_the_names_of_another_one(self) -> None:
        for name, streams in list(self.open.items()):
            try:
                for stream in streams:
                    for output in stream.read():
                        self.tokens[stream, output.choice] += output.token_ids
            except EngineDead as error:
                assert "one after the other" in str(error), "only a request that loses too many replicas fails"
                self.close(name)
                continue
            for stream in streams:
                for k in range(2):
                    tokens = self.tokens.get((stream, k), [])
                    assert tokens == list(range(len(tokens)))
                    may_be_short = k in stream.open_choices or stream in self.aborted
                    assert len(tokens) == MAX_TOKENS or may_be_short or (stream, k) not in self.tokens
            if all(stream.ended for stream in streams):
                del self.open[name]

    @invariant()
    def the_queue_is_bounded_and_empty_while_a_replica_takes_requests(self) -> None:
        assert self.num_new <= LIMIT
        assert not (self.takes_requests and self.fleet.client._dispatcher._waiting)
        assert bool(self.fleet.client.closed_because) is not self.takes_requests


TestRequests = Requests.TestCase
TestRequests.settings = settings(examples(50), stateful_step_count=30)
