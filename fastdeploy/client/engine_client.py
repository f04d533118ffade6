"""Client of the engine for one event loop: sends requests and control calls, and returns outputs and typed errors.

One task keeps the connection: it connects, sends Hello, and reads until the engine is lost. Then it fails everything
that is open with EngineDead or EngineStalled, and connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from typing import Any

from fastdeploy.client.request_stream import Reader, RequestStream
from fastdeploy.core import errors
from fastdeploy.core.loading import Loading
from fastdeploy.core.process import host_id
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.transport import Connection, Connector

logger = logging.getLogger(__name__)
MAX_REMEMBERED_CANCELS = 4096
STALL_SLICES = 8
RETRY_S = 1.0
WAKE_AT_ONCE = 16  # readers in a round of the event loop, 0.07 to 0.1 ms each (benchmarks/gateway.py)
MakeStream = Callable[
    [str, int, Callable[[str, int | None, str], None], Callable[[str], None], Reader | None, str], RequestStream
]


class EngineClient:
    """All requests and control calls of one process. Use from one event loop only.

    stall_s: an engine that sends nothing for so many seconds is stuck, and is killed (see ``_watch``); None = never.
    first_connection_s: seconds that a request or call waits for the first connection. kills_stalled: False = an engine
    that is stuck is only given up, since its process may be on another host. on_connected: called when an engine is
    there; on_lost(error): when it is lost, before anything that is open fails. read_loading: returns how far an engine
    is that starts. gateway: see messages.Hello.
    """

    def __init__(
        self,
        connector: Connector,
        stall_s: float | None = 10.0,
        first_connection_s: float = 2.0,
        kills_stalled: bool = True,
        on_connected: Callable[[], None] = lambda: None,
        on_lost: Callable[[errors.EngineError], None] = lambda error: None,
        read_loading: Callable[[], Loading | None] = lambda: None,
        gateway: str = "",
    ):
        self._connector = connector
        self._stall_s = stall_s
        self._first_connection_s = first_connection_s
        self._kills_stalled = kills_stalled
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._gateway = gateway
        self._first_connection = True
        self._connection: Connection | None = None
        self._streams: dict[str, RequestStream] = {}
        self._with_tokens: deque[RequestStream] = deque()  # their readers are woken first,
        self._with_ends: deque[RequestStream] = deque()  # because thousands may end at once while a few run on
        self._waking: asyncio.Handle | None = None
        self._calls: dict[int, asyncio.Future[m.Reply]] = {}
        self._cancelled: dict[str, int] = {}
        self._next_call = 0
        self._num_received = 0
        self._pidfd: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_cut = False
        self._lost_because = "it is starting"
        self._read_loading = read_loading
        self.connected = asyncio.Event()
        self.closing = asyncio.Event()  # the server shuts down
        self.welcome: m.Welcome | None = None
        self.model_info: dict[str, Any] = {}
        self.load = m.Load()  # as the engine has told it last,
        self.num_tells = 0  # and how often it has

    # ------------------------------------------------------------------ life

    def start(self) -> asyncio.Task[None]:
        """Begin to connect. :attr:`connected` is set when the engine is there. Returns the task that keeps the
        connection until :meth:`close`. If the task ends by itself, this client cannot be used any more."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-client")
        return self._task

    async def close(self) -> None:
        """Drop the connection. Open requests and calls fail with EngineDead."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._connector.close()

    def cut(self, why: str) -> None:
        """Fail everything that is open with EngineDead, at once, and receive nothing more. ``close`` must follow."""
        self._is_cut, self._connection = True, None
        self._disconnect(errors.EngineDead(why))
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while (connection := await self._connect()) is not None:
            lost: errors.EngineError = errors.EngineDead("the client of the engine is closing")
            try:
                lost = await self._until_lost(connection)
            finally:
                self._connection = None
                connection.close()
                self._disconnect(lost)

    async def _connect(self) -> Connection | None:
        """Try until there is a connection, and return it. Return None if the engine has ended for ever."""
        while True:
            try:
                connection = self._connector.connect()
            except OSError as error:
                logger.error("cannot connect to the engine: %s; trying again in %g s", error, RETRY_S)
                await asyncio.sleep(RETRY_S)
            else:
                if connection is not None and not self._first_connection:
                    logger.warning("%s; reconnecting", self.missing_because)
                return connection

    async def _until_lost(self, connection: Connection) -> errors.EngineError:
        """Use ``connection`` until it is lost, and return the reason."""
        self._connection = connection
        connection.send(m.Hello(os.getpid(), host_id(), self._gateway))
        tasks = [asyncio.ensure_future(self._read(connection))]
        if self._stall_s is not None:
            tasks.append(asyncio.ensure_future(self._watch(self._stall_s)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, connection: Connection) -> errors.EngineError:
        """Handle the messages of the engine until it is lost, and return the reason."""
        try:
            async for message in connection.messages():
                self._receive(message)
        except errors.EngineError as error:
            return error
        except Exception as error:  # one bad message must not end this process and all of its requests
            logger.exception("a message of the engine could not be handled")
            return errors.EngineDead(f"a message of the engine could not be handled: {type(error).__name__}: {error}")
        return errors.EngineDead("the engine process died")

    async def _watch(self, stall_s: float) -> errors.EngineError:
        """Kill the engine, and return, once it has been silent for ``stall_s`` seconds. The engine sends a heartbeat
        about once a second, also during a step, so a silent engine hangs, or its process is stopped.

        Silence is counted in slices. A slice that took twice its time is not counted: this process itself was stopped,
        or its event loop was blocked, and heartbeats may wait unread. Before the Welcome the engine is loading, and is
        not watched."""
        now = asyncio.get_running_loop().time
        slice_s, silent_slices = stall_s / STALL_SLICES, 0
        while silent_slices < STALL_SLICES:
            received, began = self._num_received, now()
            await asyncio.sleep(slice_s)
            if self._num_received != received or self.welcome is None:
                silent_slices = 0
            elif now() - began < 2 * slice_s:
                silent_slices += 1
        message = f"the engine was silent for {stall_s:g} s"
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):  # another API server was first
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            message += "; it was killed and is being replaced"
        return errors.EngineStalled(message)

    def _receive(self, message: m.ToClient) -> None:
        if self._is_cut:
            return
        self._num_received += 1
        match message:
            case m.Outputs(outputs=outputs, load=load):
                self._told(load)
                for output in outputs:
                    if stream := self._streams.get(output.request_id):  # else: cancelled while it was in flight
                        stream.put(output)
                        if not stream.in_wake_queue:
                            stream.in_wake_queue = True
                            (self._with_tokens if output.finish_reason is None else self._with_ends).append(stream)
                self._wake()
            case m.Fence(fence_id=fence_id):
                # Messages are handled in order: all outputs before this fence are in their streams.
                self._send(m.FenceAck(fence_id=fence_id))
            case m.Reply(call_id=call_id):
                self._replied(call_id, message)
            case m.Rejected(request_id=request_id, failure=failure):
                if stream := self._streams.get(request_id):
                    stream.fail(errors.from_wire(failure.code, failure.message, failure.detail))
            case m.Welcome():
                self._welcomed(message)
            case m.Heartbeat(load=load):
                self._told(load)
            case m.Goodbye():
                raise errors.EngineDead("the engine dropped this API server")

    def _told(self, load: m.Load | None) -> None:
        if load is not None:
            self.load = load
            self.num_tells += 1

    def _wake(self) -> None:
        """Wake readers, a few in each round of the event loop. So the reply to a call that ends thousands of requests
        does not wait for all of their readers."""
        if self._waking is not None:
            return
        for _ in range(min(WAKE_AT_ONCE, len(self._with_tokens) + len(self._with_ends))):
            stream = (self._with_tokens or self._with_ends).popleft()
            stream.in_wake_queue = False
            stream.wake()
        if self._with_tokens or self._with_ends:
            self._waking = asyncio.get_running_loop().call_soon(self._wake_more)

    def _wake_more(self) -> None:
        self._waking = None
        self._wake()

    def _replied(self, call_id: int, reply: m.Reply) -> None:
        if (future := self._calls.pop(call_id, None)) and not future.done():
            future.set_result(reply)
        if len(self._cancelled) > MAX_REMEMBERED_CANCELS:
            self._cancelled = {key: call for key, call in self._cancelled.items() if call >= call_id}

    def _welcomed(self, welcome: m.Welcome) -> None:
        self.welcome = welcome
        if self._kills_stalled and welcome.pid != os.getpid():  # an engine in this process cannot be killed alone
            logger.info("connected to engine %s (pid %d)", welcome.boot_id, welcome.pid)
            try:
                self._pidfd = os.pidfd_open(welcome.pid)
            except OSError as error:  # it has just died, or this process has no file descriptor left
                logger.warning("the engine's process %d cannot be watched: %s", welcome.pid, error)
        self._post(m.ModelInfoArgs())[1].add_done_callback(self._ready)

    def _ready(self, future: asyncio.Future[m.Reply]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.model_info = future.result().result
            self._first_connection = False
            self.connected.set()
            self._on_connected()

    def _disconnect(self, error: errors.EngineError) -> None:
        self._lost_because = error.message
        self.load = m.Load()
        self.connected.clear()
        self.welcome = None
        self._cancelled.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._on_lost(error)
        for stream in list(self._streams.values()):
            stream.fail(type(error)(error.message))
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(type(error)(error.message))

    def _send(self, message: m.ToEngine) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def require_engine(self) -> m.Welcome:
        """Return the Welcome of the engine. Raises EngineDead if no engine is connected. Waits a moment for the first
        connection only, since API servers do not connect to a new engine at the same time."""
        if self._first_connection and not self.connected.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._first_connection_s):
                    await self.connected.wait()
        if self.welcome is None or not self.connected.is_set():
            raise errors.EngineDead(f"no engine is connected: {self.missing_because}")
        return self.welcome

    @property
    def loading(self) -> Loading | None:
        """How far an engine is that starts; None while one is connected, and if none has said so."""
        return None if self.connected.is_set() else self._read_loading()

    @property
    def missing_because(self) -> str:
        """Why no engine is connected, and how far the next one is."""
        if (loading := self.loading) is None:
            return self._lost_because
        return f"{self._lost_because}{':' if self._first_connection else '; the next one is starting:'} {loading}"

    @property
    def closed_because(self) -> str:
        """Why a new request would reach no engine; "" = there is one."""
        return "" if self.connected.is_set() else self.missing_because

    # ------------------------------------------------------------------ requests

    async def submit(
        self, request: AddRequest, reader: Reader | None = None, make_stream: MakeStream = RequestStream
    ) -> RequestStream:
        """Send a request, and return its stream, which the caller must close. Several streams may have one ``reader``.
        Raises EngineDead or DuplicateRequest; the stream raises a refusal by the engine. make_stream: makes the stream
        from the arguments of RequestStream."""
        name, fingerprint = request.request_id, request.fingerprint if request.retain_s > 0 else ""
        while True:  # other requests with this name may begin and end while this one waits
            await self.require_engine()  # also after each wait: the loss of an engine fails only the streams open then
            if (open_stream := self._streams.get(name)) is not None:
                self._take_over(open_stream, fingerprint)
            if (cancelled := self._cancelled.get(name)) is None:
                break
            # Both directions keep the order. After this reply no output of the cancelled request is in flight, so the
            # new request with its id cannot get one.
            await self.call(m.PauseStatusArgs())
            if self._cancelled.get(name) == cancelled:  # else another request of this name was cancelled meanwhile
                del self._cancelled[name]
        stream = make_stream(name, request.n, self._cancel, self._forget, reader, fingerprint)
        self._send(request)  # raises if the request cannot be encoded: then no stream is open
        self._streams[name] = stream
        return stream

    def _take_over(self, stream: RequestStream, fingerprint: str) -> None:
        """End ``stream`` in favour of a later request with the same id and body. Raises DuplicateRequest if the later
        request may not take over."""
        name = stream.request_id
        if not fingerprint or stream.fingerprint != fingerprint:
            message = f"request_id: {name!r} is still running, without retain_s or with another body"
            raise errors.DuplicateRequest(message, param="request_id")
        stream.fail(errors.AttachedElsewhere(f"a later request with request_id {name!r} took over"))
        self._cancel(name, None, "abort")

    def _cancel(self, request_id: str, choice: int | None, reason: str) -> None:
        self._send(m.CancelRequest(request_id=request_id, choice=choice, reason=reason))
        self._cancelled[request_id] = self._next_call
        if len(self._cancelled) % MAX_REMEMBERED_CANCELS == 0:  # the reply makes ``_replied`` forget old ones
            self._post(m.PauseStatusArgs())[1].add_done_callback(lambda f: f.cancelled() or f.exception())

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def abort_open(self, bound_s: float) -> None:
        """Abort every open request. A request that has not ended after ``bound_s`` seconds fails with EngineDead. So
        does a request with retain_s, which runs on at the engine."""
        self.closing.set()
        to_abort = [name for name, stream in self._streams.items() if not stream.fingerprint]
        if to_abort and self.connected.is_set():
            try:
                async with asyncio.timeout(bound_s):
                    await self.call(m.AbortArgs(request_ids=to_abort))
            except (TimeoutError, errors.FastDeployError) as error:
                logger.warning("could not abort the open requests: %r", error)
        for stream in list(self._streams.values()):
            if not stream.ended:
                stream.fail(errors.EngineDead("the server is shutting down"))

    # ------------------------------------------------------------------ control

    def post(self, args: m.Args, change: int = 0) -> asyncio.Future[m.Reply]:
        """Send a control call at once, without waiting for an engine, and return the future of its answer. So calls to
        several engines are sent in one order everywhere. change: see messages.Call. Raises EngineDead if no engine is
        connected; the future gets EngineDead or EngineStalled as soon as the engine is lost."""
        if not self.connected.is_set():
            raise errors.EngineDead(f"no engine is connected: {self.missing_because}")
        return self._post(args, change)[1]

    def _post(self, args: m.Args, change: int = 0) -> tuple[int, asyncio.Future[m.Reply]]:
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._next_call += 1
        # Raises if the call cannot be encoded: then no future is kept.
        self._send(m.Call(call_id=self._next_call, args=args, change=change))
        self._calls[self._next_call] = future
        return self._next_call, future

    async def call(self, args: m.Args) -> dict[str, Any]:
        """Make a control call and return its result. The engine owns the timeouts of calls.

        Raises the error of the engine's answer (``detail["report"]`` is the result that came with a failure), or
        EngineDead or EngineStalled as soon as the engine is lost.
        """
        await self.require_engine()
        call_id, future = self._post(args)
        try:
            reply = await future
        finally:
            self._calls.pop(call_id, None)
        return result_of(reply)


def result_of(reply: m.Reply) -> dict[str, Any]:
    """Return the result of a reply, or raise its error. ``detail["report"]`` is the result that came with a failure."""
    if reply.failure is None:
        return reply.result
    failure = reply.failure
    detail = {**failure.detail, "report": reply.result} if reply.result else failure.detail
    raise errors.from_wire(failure.code, failure.message, detail)
