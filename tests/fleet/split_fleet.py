"""A fleet of real gateways and engines in virtual time, on a network that can hold, delay and lose what any two hosts
send each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from benchmarks.lib.fleet.hosted import HostedEngine, HostedFleet, HostedGateway
from benchmarks.lib.fleet.hosts import HOST, Host, HostConnection, HostConnector, HostsLoop, HostTransport
from benchmarks.lib.fleet.runner import checksum, fingerprint_of, next_token
from fastdeploy.core.errors import (
    EngineDead,
    EngineStalled,
    FastDeployError,
    HoldNotFound,
    NotLeader,
    PauseInterrupted,
    QueueFull,
    RequestsRejected,
)
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.replica import Replica
from fastdeploy.inter_communicator import messages as m

STEP_S = 0.02
CALLBACK_S = 20e-6
CONFIG = FleetConfig(fleet_id="split", fence_after_s=0.5, lease_s=2.0, stall_s=4.0, rebuild_s=1.0, failover_s=30.0)
AGAIN_S = 0.1  # between two tries of a client
PATIENCE_S = 60.0
ANSWER_S = 40.0
UNSURE = (EngineDead, EngineStalled, NotLeader)  # nobody knows what has become of the call


class SteadyLoop(HostsLoop):
    """Each callback takes the same time, so that a script always gives the same run."""

    def _spent_s(self) -> float:
        return 0.0 if self._running is None else self._charged_s + CALLBACK_S


class SplitNetwork:
    """See Network. What two hosts send each other is held while they are cut off. If that lasts until it is noticed,
    their connections are reset, and what was held is lost."""

    def __init__(self, delay_s: float = 1e-4):
        self._delay_s = delay_s
        self._delays: dict[frozenset[str], float] = {}
        self._held: dict[frozenset[str], deque[tuple[Host, Callable[[], None]]]] = {}
        self._last: dict[tuple[str, str], float] = {}  # arrival of the last message, by sender and receiver
        self.connections: set[HostConnection] = set()
        self.servers: dict[HostConnection, HostTransport] = {}

    def send(self, receiver: Host, nbytes: int, arrived: Callable[[], None]) -> None:
        sender, loop = HOST.get(), asyncio.get_running_loop()
        name = "" if sender is None else sender.name  # "": what a script does to a host
        pair = frozenset((name, receiver.name))
        if (held := self._held.get(pair)) is not None:
            held.append((receiver, arrived))
            return
        way = name, receiver.name
        at = max(self._last.get(way, 0.0), loop.time() + self._delays.get(pair, self._delay_s))
        self._last[way] = at = at + 1e-9  # keeps the order
        with receiver.here():
            loop.call_at(at, arrived)

    def is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self._held

    def slow(self, a: str, b: str, delay_s: float) -> None:
        """Let what ``a`` and ``b`` send each other take so long from now on."""
        self._delays[frozenset((a, b))] = delay_s

    def cut(self, a: str, b: str, noticed_s: float) -> None:
        """Cut two hosts off from each other, until they are healed. noticed_s: until both notice it."""
        pair = frozenset((a, b))
        if pair not in self._held:
            held = self._held[pair] = deque()
            asyncio.get_running_loop().call_later(noticed_s, self._notice, pair, held)

    def _notice(self, pair: frozenset[str], held: deque[tuple[Host, Callable[[], None]]]) -> None:
        if self._held.get(pair) is not held:  # healed in time
            return
        held.clear()
        for connection, server in list(self.servers.items()):
            if frozenset((connection.host.name, server.host.name)) == pair:
                del self.servers[connection]
                server.disconnected(connection)
                with connection.host.here():
                    asyncio.get_running_loop().call_soon(connection.reset)

    def heal(self, a: str, b: str) -> None:
        pair = frozenset((a, b))
        self._delays.pop(pair, None)
        for receiver, arrived in self._held.pop(pair, ()):
            with receiver.here():
                asyncio.get_running_loop().call_soon(arrived)

    def heal_all(self) -> None:
        self._delays.clear()
        for a, b in [tuple(pair) for pair in self._held]:
            self.heal(a, b)


class SplitConnection(HostConnection):
    """A connection from another host, whose processes an engine cannot see."""

    def send(self, message: Any) -> None:
        super().send(replace(message, host=self.host.name) if isinstance(message, m.Hello) else message)


class SplitConnector(HostConnector):
    """Nobody listens at a host that is cut off."""

    def connect(self) -> SplitConnection:
        network, transport = self._network, self._transports.get(self._endpoint)
        assert isinstance(network, SplitNetwork)
        if transport is not None and network.is_cut(HOST.get().name, transport.host.name):
            transport = None
        connection = SplitConnection(network, transport, next(self._numbers))  # type: ignore[arg-type]
        if transport is not None:
            network.servers[connection] = transport
        return connection


class ServingEngine(HostedEngine):
    """An engine with requests, whose steps take STEP_S."""

    def _round(self) -> None:
        super()._round()
        scheduler = self.engine.scheduler
        if not self._is_dead and not self._waits and (scheduler.has_work or scheduler.ended):
            self._waits = True
            self._loop.call_later(STEP_S, self._round)


@dataclass
class Asked:
    """An answer as a client has got it. floor: no token may be of older weights."""

    name: str
    prompt: list[int]
    floor: int
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ends: int = 0


class SplitFleet(HostedFleet):
    """``num`` engines and three gateways. problems: what has gone wrong so far."""

    def __init__(self, num: int):
        self.split = SplitNetwork()
        super().__init__(num, 3, self.split, CONFIG, boot_s=0.2, read_s=0.05)  # type: ignore[arg-type]
        self.problems: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.holds: dict[str, bool | None] = {}  # whether they stand; None = nobody knows
        self.seen: dict[str, int] = {}  # newest epoch by session
        self._busy: dict[str, asyncio.Lock] = {}
        self._names = iter(range(1_000_000))
        self.num_tokens = 0
        self._dead: list[Host] = []

    def _connector(self, endpoint: str) -> SplitConnector:
        return SplitConnector(self.network, self._transports, endpoint, self._numbers)

    def _gateway(self, i: int) -> HostedGateway:
        gateway = super()._gateway(i)
        gateway.client.membership.hosts.copied = self._copied  # type: ignore[method-assign, assignment]
        return gateway

    @contextlib.asynccontextmanager
    async def _copied(self, owner: Replica, replica: Replica) -> AsyncIterator[FolderSource]:
        """Stand for a copy over HTTP, which these hosts do not have: yield the source of the owner's weights."""
        if owner.name not in self.engines:
            raise EngineDead("its API server cannot be reached")
        label = self.engines[owner.name].engine.scopes.whole.weights_label()
        yield FolderSource(f"/w{number_of(label['version'])}")

    def _boot_one(self, name: str) -> None:
        self.engines[name] = engine = ServingEngine(self.hosts[name], name, self.network, self._read_s)
        self._listen(name, engine.transport)

    async def restart(self, name: str, why: str) -> None:
        if name in self.engines:
            self.kill([name])

    # ------------------------------------------------------------------ what a script does

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"a client failed: {error!r}")

    def freeze(self, gateway: HostedGateway, seconds: float) -> None:
        """Stop the process of a gateway for some time."""
        now = asyncio.get_running_loop().time()
        gateway.host.free_at = max(gateway.host.free_at, now) + seconds

    def replace(self, i: int) -> None:
        """Kill a gateway, and start another one on its host."""
        self.gateways[i].kill()
        self._dead.append(self.gateways[i].host)
        gateway = self.gateways[i] = self._gateway(i)
        gateway.start()

    async def _call(self, i: int, args: m.Args) -> dict[str, Any]:
        """Make a call at a gateway. Raises EngineDead if the gateway does not answer, as one that was killed."""
        call = asyncio.ensure_future(self.gateways[i].call(args))
        await asyncio.wait([call], timeout=ANSWER_S)
        if not call.done():
            raise EngineDead("the gateway does not answer")
        return call.result()

    async def pause(self, i: int, hold: str, mode: str) -> None:
        self.holds[hold] = None
        try:
            report = await self._call(i, m.PauseArgs(mode, hold_id=hold, timeout_s=30.0))
        except (PauseInterrupted, *UNSURE):
            return
        except FastDeployError as error:
            self.problems.append(f"pause {hold}: {error!r}")
            return
        if self.holds[hold] is not None:
            return
        for entry in report["replicas"]:
            engine = self.engines.get(entry["name"])
            if entry["status"] != "done" or engine is None:
                continue
            replica = self.leader.client.membership.replicas[entry["name"]] if self.has_leader else None
            is_member = replica is not None and replica.in_quorum and replica.client.welcome is not None
            if is_member and hold not in engine.engine.pause.holds:
                self.problems.append(f"{hold} is answered, and {entry['name']} is not paused")
        self.holds[hold] = True

    @property
    def has_leader(self) -> bool:
        return any(gateway.leads for gateway in self.gateways)

    async def resume(self, i: int, hold: str) -> None:
        self.holds[hold] = False if self.holds.get(hold) else None
        sure = self.holds[hold] is False
        self.holds[hold] = None
        try:
            await self._call(i, m.ResumeArgs(hold))
        except (HoldNotFound, *UNSURE):
            return
        if sure:
            self.holds[hold] = False

    async def update(self, i: int, number: int) -> None:
        args = m.UpdateWeightsArgs(FolderSource(f"/w{number}"), version=f"w{number}")
        try:
            await self._call(i, args)
        except FastDeployError:
            return

    async def ask(self, i: int, session: str, length: int) -> None:
        """Ask in a session, one turn after the other, at any gateway that answers."""
        async with self._busy.setdefault(session, asyncio.Lock()):
            number = next(self._names)
            asked = Asked(f"{session}-{number}", [1 + number % 900, 2, 3], self.seen.get(session, 0))
            end = asyncio.get_running_loop().time() + PATIENCE_S
            while asyncio.get_running_loop().time() < end:
                gateway = self.gateways[i % len(self.gateways)]
                tried = Asked(asked.name, asked.prompt, asked.floor)
                with gateway.host.here():
                    task = asyncio.get_running_loop().create_task(self._read(gateway, session, length, tried))
                await asyncio.wait([task], timeout=10.0)  # that of a gateway that was killed never ends
                task.cancel()
                try:
                    if task.done():
                        task.result()
                except (*UNSURE, QueueFull, RequestsRejected, TimeoutError):
                    pass
                except FastDeployError as error:
                    self.problems.append(f"{asked.name}: {error!r}")
                    return
                self._check(tried)
                self.seen[session] = max([self.seen.get(session, 0), *(span.weight_epoch for span in tried.spans)])
                if tried.ends:
                    return
                asked.floor = self.seen[session]
                i += 1
                await asyncio.sleep(AGAIN_S)

    async def _read(self, gateway: HostedGateway, session: str, length: int, asked: Asked) -> None:
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        request = AddRequest(f"{asked.name}-{next(self._names)}", asked.prompt, sampling, session=session)
        with await gateway.client.submit(request) as stream:
            while not asked.ends:
                await stream.reader.wait()
                for output in stream.read():
                    asked.tokens += output.token_ids
                    asked.spans += output.spans
                    asked.ends += output.finish_reason is not None

    def _check(self, asked: Asked) -> None:
        """Compare the tokens with those of the weights in their spans."""
        known, at = checksum(asked.prompt), 0
        for span in asked.spans:
            if span.start != at:
                self.problems.append(f"{asked.name}: the span [{span.start}, {span.end}) follows token {at}")
                return
            if span.weight_epoch < asked.floor:
                self.problems.append(f"{asked.name}: epoch {span.weight_epoch} after {asked.floor}")
            for token in asked.tokens[span.start : span.end]:
                if token != next_token(known, number_of(span.version)):
                    self.problems.append(f"{asked.name}: a token is not that of {span.version!r}")
                    return
                known = checksum([token], known)
            at = span.end
            asked.floor = max(asked.floor, span.weight_epoch)
        if at != len(asked.tokens):
            self.problems.append(f"{asked.name}: {len(asked.tokens)} tokens, and spans of {at}")
        self.num_tokens += at

    # ------------------------------------------------------------------ the end

    async def settle(self) -> None:
        """Heal the network, and wait until the fleet is whole and every client has its answer. Holds that hinder this
        are released."""
        self.split.heal_all()
        try:
            async with asyncio.timeout(200.0):
                await self._until_whole()
        except TimeoutError:
            told = [
                (g.host.name, g.leads, [str(r.state) for r in g.client.membership.replicas.values()])
                for g in self.gateways
            ]
            raise AssertionError(f"not whole: {len(self.tasks)} clients, holds {self._holds_now()}, {told}") from None

    async def _until_whole(self) -> None:
        while self.tasks or not self.complete or sum(g.leads for g in self.gateways) != 1 or self._holds_now():
            await asyncio.sleep(1.0)
            for gateway in self.gateways:
                gateway.raise_error()
            for hold in self._holds_now() if self.complete and self.has_leader else ():
                self.holds[hold] = False
                with contextlib.suppress(HoldNotFound, *UNSURE):
                    await self.leader.call(m.ResumeArgs(hold))

    def _holds_now(self) -> set[str]:
        return {hold for engine in self.engines.values() for hold in engine.engine.pause.holds if hold in self.holds}

    def end(self) -> None:
        """Let everything end that still runs, also what was killed."""
        for host in self._dead:
            host.is_dead = False

    def check(self) -> None:
        """All members have one state, and one gateway leads."""
        engines = [engine.engine for engine in self.engines.values()]
        states = {(e.pause.is_paused, tuple(sorted(e.pause.holds)), *self._weights(e)) for e in engines}
        assert len(states) == 1, states
        (state,) = states
        assert not state[0] and not state[1], state
        assert not self.problems, self.problems

    def _weights(self, engine: Any) -> tuple[Any, ...]:
        label = engine.scopes.whole.weights_label()
        assert engine._runner.fingerprint == fingerprint_of(number_of(label["version"])), label
        return label["weight_epoch"], label["version"]


def number_of(version: str) -> int:
    """Return the number of the weights with this label. The first ones are 0."""
    return int(version[1:]) if version.startswith("w") and version[1:].isdigit() else 0


def run_steadily(main: Coroutine[Any, Any, None]) -> None:
    loop = SteadyLoop()
    try:
        loop.run_until_complete(main)
    finally:
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=CONFIG.stall_s))
        loop.close()


def pairs(num: int) -> Iterator[tuple[str, str]]:
    """Yield all pairs of hosts of which at least one is a gateway."""
    gateways = [f"gateway-{i}" for i in range(3)]
    for i, a in enumerate(gateways):
        for b in [*gateways[i + 1 :], *(f"replica-{k}" for k in range(num))]:
            yield a, b
