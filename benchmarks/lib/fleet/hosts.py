"""Many hosts in one process, in virtual time: each has a CPU of its own and a network card, and real code runs there.

A callback of a host takes as long on the clock as it takes of this thread's CPU, and the host's next one waits for it;
other hosts go on meanwhile. So a busy machine changes the figures little, and a run with a thousand hosts ends. Real:
the code of the hosts, and the encoding of their messages. Modelled: sockets, delays and rates, see Network.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

import msgspec

from fastdeploy.core.errors import EngineDead
from fastdeploy.inter_communicator.messages import Malformed, ToClient, ToEngine
from fastdeploy.inter_communicator.zmq_transport import encode

T = TypeVar("T")
Args = TypeVarTuple("Args")
RECONNECT_S = 1.0  # as ZmqConnection over TCP


class Host:
    """A computer with one CPU and a network card. cpu_s, messages, sent_bytes: what it has used and sent so far."""

    def __init__(self, name: str):
        self.name = name
        self.cpu_s = 0.0
        self.messages = 0
        self.sent_bytes = 0
        self.free_at = 0.0  # its CPU is busy until then, and its card
        self.card_free_at = 0.0
        self.waits = self.is_dead = False
        self.ready: deque[asyncio.Handle] = deque()
        self.connections: set[HostConnection] = set()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Let the tasks and callbacks that begin in this context run on this host."""
        before = HOST.set(self)
        try:
            yield
        finally:
            HOST.reset(before)


HOST: ContextVar[Host | None] = ContextVar("host", default=None)  # None: the observer of the event loop


class _NoFiles(selectors.SelectSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []


class HostsLoop(asyncio.SelectorEventLoop):
    """An event loop for the callbacks of all hosts. Each callback belongs to the host of its context. Without other
    threads."""

    def __init__(self) -> None:
        self._now = 0.0  # when the running callback began
        self._running: Host | None = None
        self._cpu_began = 0.0
        self._charged_s = 0.0
        self._events: list[tuple[float, int, Host, asyncio.TimerHandle | None]] = []  # None: the host's next callback
        self._order = count()
        self.observer = Host("observer")  # its work takes no time
        self.ends = False  # then tasks of dead hosts can be cancelled
        super().__init__(_NoFiles())

    def time(self) -> float:
        """Return the seconds on the clock of the host whose callback runs."""
        return self._now + self._spent_s()

    def charge(self, seconds: float) -> None:
        """Let the running callback take so much CPU more than it takes here."""
        self._charged_s += seconds

    def _spent_s(self) -> float:
        if self._running is None or self._running is self.observer:
            return 0.0
        return time.thread_time() - self._cpu_began + self._charged_s

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._give(_host_in(context) or self.observer, handle, self.time())
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        event = max(when, self.time()), next(self._order), _host_in(context) or self.observer, timer
        heapq.heappush(self._events, event)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """See BaseEventLoop. A timer that was cancelled is skipped at its time."""

    def _give(self, host: Host, handle: asyncio.Handle, now: float) -> None:
        if host.is_dead and not self.ends:
            return
        host.ready.append(handle)
        if not host.waits:
            host.waits = True
            heapq.heappush(self._events, (max(now, host.free_at), next(self._order), host, None))

    def _run_once(self) -> None:
        if not self._events:
            raise RuntimeError("everything waits, and no event is left")
        at, _, host, timer = heapq.heappop(self._events)
        if timer is not None:
            if not timer.cancelled():
                self._give(host, timer, at)
            return
        handle = host.ready.popleft()
        if not handle.cancelled():
            self._now, self._running, self._charged_s = at, host, 0.0
            self._cpu_began = time.thread_time()
            handle._run()
            spent_s = self._spent_s()
            self._running = None
            host.cpu_s += spent_s
            if host is not self.observer:
                host.free_at = at + spent_s
        host.waits = bool(host.ready)
        if host.waits:
            heapq.heappush(self._events, (max(at, host.free_at), next(self._order), host, None))


def _host_in(context: Context) -> Host | None:
    return context.get(HOST, None)


def run_on_hosts(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on the observer's host, in virtual time."""

    async def run() -> T:
        try:
            return await main
        finally:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, HostsLoop)
            loop.ends = True

    with asyncio.Runner(loop_factory=HostsLoop) as runner:
        return runner.run(run())


@dataclass(frozen=True)
class Network:
    """The modelled part of a message: CPU of its sender's and of its receiver's socket, delay of the way, and rate of
    the sender's card, in seconds and bytes/s."""

    socket_s: float = 0.0
    delay_s: float = 50e-6
    bytes_per_s: float = 25e9 / 8

    def send(self, receiver: Host, nbytes: int, arrived: Callable[[], None]) -> None:
        """Send a message of the running host; it is charged for that. ``arrived`` is called on the receiver. Messages
        of one host to another one keep their order."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        sender = HOST.get() or loop.observer
        loop.charge(self.socket_s)
        sender.messages += 1
        sender.sent_bytes += nbytes
        sender.card_free_at = max(sender.card_free_at, loop.time()) + nbytes / self.bytes_per_s
        with receiver.here():
            loop.call_at(sender.card_free_at + self.delay_s, self._arrive, arrived)

    def _arrive(self, arrived: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostsLoop)
        loop.charge(self.socket_s)
        arrived()


class HostTransport:
    """The listening end of ``host``, for an engine (see transport.Transport) or a gateway (see PeerTransport).
    woken: called when a message has come."""

    def __init__(self, host: Host, network: Network, endpoint: str):
        self.host, self.network, self.endpoint = host, network, endpoint
        self.woken: Callable[[], None] = lambda: None
        self._inbox: list[tuple[str, ToEngine | Malformed]] = []
        self._connections: dict[str, HostConnection] = {}
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._readable = asyncio.Event()

    def connected(self, connection: HostConnection) -> None:
        self._connections[connection.identity] = connection

    def disconnected(self, connection: HostConnection) -> None:
        self._connections.pop(connection.identity, None)

    def arrived(self, client: str, data: bytes) -> None:
        """Take a message of a client, on this host."""
        self._inbox.append((client, self._decoder.decode(data)))
        self._readable.set()
        self.woken()

    def recv(self, timeout_s: float | None) -> list[tuple[str, ToEngine | Malformed]]:
        messages, self._inbox = self._inbox, []
        return messages

    async def receive(self) -> list[tuple[str, ToEngine | Malformed]]:
        while not (messages := self.recv(0.0)):
            self._readable.clear()
            await self._readable.wait()
        return messages

    def send(self, client: str, message: ToClient) -> bool:
        if (connection := self._connections.get(client)) is None:
            return False
        data = encode(message)
        self.network.send(connection.host, len(data), lambda: connection.arrived(data))
        return True

    def wake(self) -> None: ...

    def close(self) -> None:
        """End the process that listens: its connections are reset."""
        for connection in self._connections.values():
            self.network.send(connection.host, 0, connection.reset)
        self._connections.clear()


class HostConnection:
    """The client's end, on the running host (see transport.Connection). transport: None = nobody listens."""

    def __init__(self, network: Network, transport: HostTransport | None, number: int):
        host = HOST.get()
        assert host is not None, "the observer has no connections"
        self.host = host
        self.identity = f"{self.host.name}-{number}"
        self._network, self._transport = network, transport
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self._messages: deque[ToClient] = deque()
        self._arrived = asyncio.Event()
        self._is_reset = transport is None
        self._began = asyncio.get_running_loop().time()
        self.host.connections.add(self)
        if transport is not None:
            transport.connected(self)

    def send(self, message: ToEngine) -> None:
        if (transport := self._transport) is not None:
            data = self._encoder.encode(message)
            self._network.send(transport.host, len(data), lambda: transport.arrived(self.identity, data))

    def arrived(self, data: bytes) -> None:
        self._messages.append(self._decoder.decode(data))
        self._arrived.set()

    def reset(self) -> None:
        self._is_reset = True
        self._arrived.set()

    async def messages(self) -> AsyncIterator[ToClient]:
        """Yield the messages, and end when the connection is lost. Raises EngineDead if nobody listens, after the time
        that a connection over TCP waits before the next try."""
        if self._transport is None:
            await asyncio.sleep(RECONNECT_S)
            raise EngineDead("it cannot be reached")
        while self._messages or not self._is_reset:
            if not self._messages:
                self._arrived.clear()
                await self._arrived.wait()
            while self._messages:
                yield self._messages.popleft()

    def close(self) -> None:
        self.host.connections.discard(self)
        if self._transport is not None:
            self._transport.disconnected(self)


class HostConnector:
    """See transport.Connector. transports: those that listen, by endpoint."""

    def __init__(self, network: Network, transports: dict[str, HostTransport], endpoint: str, numbers: Iterator[int]):
        self._network, self._transports, self._endpoint, self._numbers = network, transports, endpoint, numbers

    def connect(self) -> HostConnection:
        return HostConnection(self._network, self._transports.get(self._endpoint), next(self._numbers))

    def close(self) -> None: ...
