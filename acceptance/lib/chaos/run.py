"""The cycles: a pause, harm to some replicas, questions to every engine, and a resume."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from acceptance.lib.chaos.load import Load, number_of
from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.engines import EngineLauncher, FakeEngines
from benchmarks.lib.fleet.runner import Costs, fingerprint_of
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.core.errors import EngineDead, EngineError, FastDeployError, PauseTimeout, UpdateInProgress
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement
from fastdeploy.fleet.replica import Replica
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, context_of_many

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
BACK_S = 60.0
ANSWER_S = 5.0
SILENT_S = 3600.0  # a stopped engine keeps its connection
MODES = ("keep", "keep", "keep", "keep", "abort", "wait")
HARMS = ("kill", "stop", "stop for good", "slow")
MOMENTS = ("before", "during", "paused")
SPREAD_S = 0.06  # harm "during" a pause begins so long after the call, at most


@dataclass(frozen=True)
class Options:
    """replicas: number of engines. pauses: number of cycles. harm: part of the replicas that is harmed in a cycle with
    harm. step_s: of a replica. fence_s: fence_after_s of the fleet, above a step. sessions: of the load. scale: of
    the lengths of its answers. pace_s: longest time between two calls."""

    replicas: int = 32
    pauses: int = 1000
    seed: int = 0
    harm: float = 0.1
    step_s: float = 0.03
    fence_s: float = 0.03
    sessions: int = 16
    scale: float = 1.0
    pace_s: float = 0.3

    @property
    def num_harmed(self) -> int:
        return max(1, round(self.replicas * self.harm))

    @property
    def num_needed(self) -> int:
        """Members before a cycle begins. Others may still be on their way back."""
        return max(self.replicas - 2 * self.num_harmed, 1)


@dataclass(frozen=True)
class Pause:
    """A pause call. seconds: until its answer. harmed: harm was done in its cycle. fenced: replicas during the call."""

    mode: str
    seconds: float
    harmed: bool
    fenced: int


class Witness:
    """Asks engines for the truth, on connections that no gateway knows. Use from one event loop only."""

    def __init__(self, placements: Sequence[Placement], context: zmq.asyncio.Context):
        self._clients = {
            placement.name: EngineClient(
                ZmqConnector(placement.endpoint, context=context), SILENT_S, kills_stalled=False
            )
            for placement in placements
        }

    def start(self) -> None:
        for client in self._clients.values():
            client.start()

    async def ask(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the answers to FleetStateArgs, by name, of those that answer."""
        answers = await asyncio.gather(*(self._state(name) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def _state(self, name: str) -> dict[str, Any] | None:
        client = self._clients[name]
        try:
            async with asyncio.timeout(ANSWER_S):
                await client.connected.wait()
                return await client.call(m.FleetStateArgs())
        except (EngineError, TimeoutError):
            return None

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))


class Chaos:
    """One run. say: prints a line. ledger, pauses, launcher: the results."""

    def __init__(self, options: Options, say: Callable[[str], None] = lambda line: None):
        self.options = options
        self.ledger = Ledger()
        self.pauses: list[Pause] = []
        self._say = say
        self._draw = random.Random(options.seed)
        self._config = FleetConfig(
            fleet_id="chaos",
            fence_after_s=options.step_s + options.fence_s,
            lease_s=2.0,
            stall_s=10.0,
            stage_timeout_s=5.0,
            rebuild_s=1.0,
        )
        self._weights = 0
        self._cycle_harmed = False
        self._harm: set[asyncio.Task[None]] = set()
        self._updates: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Make all cycles, and wait until the fleet is as new."""
        options = self.options
        costs = Costs(step_s=options.step_s, prompt_s=1e-6)
        with FakeEngines(costs) as engines:
            self.launcher = EngineLauncher(engines, options.replicas, **ENGINE)
            self._context = context_of_many()
            self._witness = Witness(self.launcher.listed, self._context)
            self._witness.start()
            load = Load(lambda: self.gateway, self.ledger, options.sessions, options.seed, options.scale)
            self.load = load
            await self._new_gateway()
            await self._until_members(options.replicas)
            first = next(iter((await self._witness.ask(self.launcher.names)).values()))
            load.first_version, self._boot_id = first["version"], self.gateway.membership.boot_id
            self._blocks = first["available_gpu_block_num"]
            load.clients.go_on()
            try:
                for number in range(options.pauses):
                    await self._cycle()
                    if (number + 1) % 50 == 0:
                        self._say(f"{number + 1} pauses, {dict(self.ledger.counts)}")
                await asyncio.gather(*self._harm)
                await load.clients.rest()
                await self._check_end()
            finally:
                await load.clients.close()
                await self.gateway.close()
                await self._witness.close()
                self._context.destroy(linger=0)

    # ------------------------------------------------------------------ a cycle

    async def _cycle(self) -> None:
        """Pause the fleet, by one hold or two, look at every engine, and resume."""
        draw, options = self._draw, self.options
        await self._until_members(options.num_needed)
        moment = draw.choice(MOMENTS) if draw.random() < 0.7 else ""
        self._cycle_harmed = bool(moment) or bool(self.launcher.harmed)
        if moment == "before":
            self._do_harm(0.0)
            await asyncio.sleep(draw.choice((0.0, 0.02)))
        elif moment == "during":
            self._do_harm(SPREAD_S)
        mode, kind = draw.choice(MODES), draw.random()
        if kind < 0.1:  # without a pause, or beside one
            self._updates = [asyncio.create_task(self._update())]
        holds = [f"trainer-{draw.randrange(1 << 30)}" for _ in range(2 if kind > 0.85 else 1)]
        if kind > 0.98:
            await self._replace_during_a_pause(holds[0])
            return
        stand = [hold for hold in await asyncio.gather(*(self._pause(hold, mode) for hold in holds)) if hold]
        if stand:
            before = self.load.tokens_so_far()
            await self._check_members(set(stand))
            await self._while_paused(moment, stand)
            if self.load.tokens_so_far() != before:
                self.ledger.problem(f"{self.load.tokens_so_far() - before} tokens came during a pause ({mode})")
        await asyncio.gather(*(self._resume(hold) for hold in stand))
        await asyncio.gather(*self._updates)
        self.load.rejecting -= len(stand) * (mode == "abort")
        await self._check_members(set())
        await asyncio.sleep(draw.uniform(0.0, options.pace_s))

    async def _while_paused(self, moment: str, stand: list[str]) -> None:
        draw = self._draw
        if moment == "paused":
            self._do_harm(0.0)
        if draw.random() < 0.2:
            await self._update()
            await self._check_members(set(stand))
        if draw.random() < 0.02:
            await self._replace_gateway()
            await self._check_members(set(stand))
        if len(stand) == 2 and draw.random() < 0.5:
            released = stand.pop()
            await self._resume(released)
            await self._check_members(set(stand))
        await asyncio.sleep(draw.uniform(0.0, self.options.pace_s / 2))

    async def _pause(self, hold: str, mode: str) -> str:
        """Return the hold if it stands."""
        draw, ledger, load = self._draw, self.ledger, self.load
        on_timeout = draw.choice(("cancel", "keep", "abort")) if mode == "wait" else None
        args = m.PauseArgs(mode, hold_id=hold, timeout_s=0.2, on_timeout=on_timeout)
        aborts = "abort" in (mode, on_timeout)
        load.aborts += aborts
        load.rejecting += aborts
        began = time.monotonic()
        try:
            report = await self.gateway.call(args)
        except PauseTimeout:
            ledger.counts["pauses refused"] += 1
            await self._check_members(set(), {hold})
            return ""
        finally:
            load.aborts += aborts
            load.rejecting -= aborts and mode != "abort"
        seconds, fenced = time.monotonic() - began, sum(entry["status"] == "fenced" for entry in report["replicas"])
        self.pauses.append(Pause(mode, seconds, self._cycle_harmed, fenced))
        ledger.counts["pauses"] += 1
        return hold

    async def _resume(self, hold: str) -> None:
        await self.gateway.call(m.ResumeArgs(hold))
        self.ledger.counts["resumes"] += 1

    async def _update(self) -> None:
        """Give the fleet new weights."""
        self._weights += 1
        version = f"w{self._weights}"
        kv = self._draw.choice(("keep", "recompute"))
        gateway = self.gateway
        try:
            report = await gateway.call(m.UpdateWeightsArgs(FolderSource(f"/{version}"), version=version, kv=kv))
        except (EngineDead, UpdateInProgress) as error:
            if isinstance(error, EngineDead) and gateway is self.gateway:
                raise
            self.ledger.counts["updates not made"] += 1
            return
        self.load.committed = max(self.load.committed, report["weight_epoch"])
        self.ledger.counts["updates"] += 1

    # ------------------------------------------------------------------ checks

    async def _check_members(self, stand: set[str], gone: set[str] | None = None) -> None:
        """Ask every engine. All members have the holds ``stand``, none of ``gone`` (None = no others), and the weights
        of the fleet. The engines answer on connections of their own, whatever the gateway believes."""
        state, ledger = self.gateway.membership.state, self.ledger
        members = [name for name in self._members() if self.launcher.harmed.get(name) not in ("killed", "stopped")]
        epoch = None if state.changing else state.weight_epoch
        reports = await self._witness.ask(members)
        still = set(self._members())
        for name in members:
            report = reports.get(name)
            if name not in still or self.launcher.harmed.get(name) in ("killed", "stopped"):
                continue
            if report is None:
                ledger.problem(f"{name}: a member that does not answer")
                continue
            holds = {hold["id"] for hold in report["holds"]}
            if not stand <= holds or (stand and not report["is_paused"]):
                ledger.problem(f"{name}: a member that is not paused: {stand - holds} of {stand}, {report['phase']}")
            if wrong := holds - stand if gone is None else holds & gone:
                ledger.problem(f"{name}: a member with a hold that was released, or never stood: {wrong}")
            if state.changing or state.weight_epoch != epoch:
                continue  # an update ran meanwhile
            expected = (state.weight_epoch, state.fingerprint)
            if (report["weight_epoch"], report["fingerprint"]) != expected:
                ledger.problem(f"{name}: a member with weights {report['version']!r}, epoch {report['weight_epoch']}")
            elif report["fingerprint"] != fingerprint_of(number_of(report["version"], self.load.first_version)):
                ledger.problem(f"{name}: its weights are not those of its label {report['version']!r}")
        ledger.counts["engines asked"] += len(reports)
        if self.gateway.membership.boot_id != self._boot_id:
            self._boot_id = self.gateway.membership.boot_id
            ledger.problem("the fleet has lost its weights")

    async def _check_end(self) -> None:
        """All replicas are members again, and nothing of any request is left on them."""
        await self._until_members(self.options.replicas)
        await self._check_members(set())
        for name, report in (await self._witness.ask(self.launcher.names)).items():
            left = (report["running"], report["waiting"], self._blocks - report["available_gpu_block_num"])
            if any(left) or report["holds"]:
                self.ledger.problem(f"{name}: running, waiting, blocks in use: {left}, holds {report['holds']}")

    # ------------------------------------------------------------------ harm

    def _do_harm(self, spread_s: float) -> None:
        """Harm some members, each at a time of its own within ``spread_s``."""
        members = [name for name in self._members() if name not in self.launcher.harmed]
        for name in self._draw.sample(members, min(self.options.num_harmed, len(members))):
            harm = self._draw.choice(HARMS)
            self.ledger.counts[harm] += 1
            self._spawn(self._harm_one(name, harm, self._draw.uniform(0.0, spread_s)))

    async def _harm_one(self, name: str, harm: str, after_s: float) -> None:
        draw, launcher = self._draw, self.launcher
        await asyncio.sleep(after_s)
        if name in launcher.harmed:
            return
        if harm == "kill":
            await launcher.kill(name, draw.uniform(0.0, 0.3))
        elif harm == "slow":
            await launcher.slow(name, draw.uniform(5.0, 20.0), draw.uniform(0.1, 0.5))
        elif harm == "stop":
            await launcher.stop(name, draw.uniform(0.005, 0.1))
        else:  # it may go on after the fleet has cut it off, until it is restarted
            launcher.delays[name] = draw.choice((0.0, 0.3))
            await launcher.stop(name, draw.uniform(0.1, 1.0))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._harm.add(task)
        task.add_done_callback(self._harm.discard)

    # ------------------------------------------------------------------ the gateway

    async def _new_gateway(self) -> None:
        self.load.ready.clear()
        self.gateway = FleetClient(
            self._config, self.launcher, lambda at: ZmqConnector(at.endpoint, context=self._context)
        )
        self.gateway.start()
        await self._until_members(self.options.num_needed)
        self.load.ready.set()

    async def _replace_gateway(self) -> None:
        self.ledger.counts["gateways replaced"] += 1
        closing = asyncio.create_task(self.gateway.close())
        await self._new_gateway()
        await closing

    async def _replace_during_a_pause(self, hold: str) -> None:
        """Replace the gateway while a pause call runs. Afterwards all members are paused, or none is."""
        pausing = asyncio.create_task(self.gateway.call(m.PauseArgs("keep", hold_id=hold)))
        await asyncio.sleep(self._draw.uniform(0.0, self.options.step_s))
        await self._replace_gateway()
        try:
            await pausing
            stands = True
        except FastDeployError:
            stands = any(hold == name for _, name in self.gateway.membership.state.holds)
        await self._check_members({hold} if stands else set())
        if stands:
            await self._resume(hold)

    async def _until_members(self, least: int) -> None:
        end = time.monotonic() + BACK_S
        while len(self._members()) < least:
            if time.monotonic() > end:
                states = {replica.name: (replica.state.value, replica.why) for replica in self._replicas()}
                raise RuntimeError(f"{least} replicas did not become members within {BACK_S:g} s: {states}")
            await asyncio.sleep(0.005)

    def _replicas(self) -> list[Replica]:
        return list(self.gateway.membership.replicas.values())

    def _members(self) -> list[str]:
        return [replica.name for replica in self._replicas() if replica.in_quorum]
