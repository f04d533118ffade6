"""The cycles: a pause, harm to some replicas and gateways, questions to every engine, and a resume."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from acceptance.lib.chaos.doors import Door, Doors, as_it_is
from acceptance.lib.chaos.load import Keepers, Load, code_of, number_of, tokens_of
from acceptance.lib.chaos.options import Options, Pause
from acceptance.lib.chaos.witness import Witness
from acceptance.lib.ledger import Ledger
from benchmarks.lib.fleet.engines import EngineLauncher, FakeEngines
from benchmarks.lib.fleet.runner import Costs, fingerprint_of
from fastdeploy.bench.client import ServerError, Stream, WireError
from fastdeploy.core.errors import HoldNotFound, PauseTimeout, UpdateInProgress
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import context_of_many

logger = logging.getLogger(__name__)
ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
BACK_S = 60.0
MODES = ("keep", "keep", "keep", "keep", "abort", "wait")
HARMS = ("kill", "stop", "stop for good", "slow")
DOOR_HARMS = ("kill", "kill", "end", "stop", "slow")
MOMENTS = ("before", "during", "paused")
SPREAD_S = 0.06  # harm "during" a pause begins so long after the call, at most
LAST_BYTES_S = 0.3  # several steps: without a token for so long, the clients have got what came before the pause,
LAST_TOKEN_S = 3.0  # and that takes no longer than this
CHECK_S = 10.0  # for a look at the members, which needs a gateway that leads and is unharmed
LEADER_S = 2.0  # for the gateway that leads to tell its members


class Chaos:
    """One run. say: prints a line. in_gateways: called first in the process of each gateway; a test may spoil it.
    ledger, pauses, launcher: the results."""

    def __init__(
        self,
        options: Options,
        say: Callable[[str], None] = lambda line: None,
        in_gateways: Callable[[], None] = as_it_is,
    ):
        self.options, self._in_gateways = options, in_gateways
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
            model_roots=("/",),
        )
        self._weights = 0
        self._updating = 0  # calls now, and of all
        self._num_updates = 0
        self._boot_id = ""
        self._cycle_harmed = False
        self._harm: set[asyncio.Task[None]] = set()
        self._updates: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Make all cycles, and wait until the fleet is as new."""
        options = self.options
        costs = Costs(step_s=options.step_s, prompt_s=1e-6)
        with FakeEngines(costs) as engines:
            self.launcher = EngineLauncher(engines, options.replicas, **ENGINE)
            context = context_of_many()
            self._witness = Witness(self.launcher.listed, context)
            self._witness.start()
            self.doors = Doors(self._config, self.launcher, options.gateways, self._in_gateways)
            sessions = options.sessions, options.seed, options.scale
            load = self.load = Load(self.doors, self.ledger, *sessions, self._keepers, self.launcher.num_harmed)
            try:
                self.doors.start()
                await self._until_members(options.replicas)
                first = next(iter((await self._witness.ask(self.launcher.names)).values()))
                load.first_version = first["version"]
                self._blocks = first["available_gpu_block_num"]
                load.clients.go_on()
                for number in range(options.pauses):
                    await self._cycle()
                    if (number + 1) % 50 == 0:
                        self._say(f"{number + 1} pauses, {dict(self.ledger.counts)}")
                await asyncio.gather(*self._harm)
                await load.clients.rest()
                await self._check_end()
            finally:
                for task in self._harm:
                    task.cancel()
                await load.clients.close()
                await self.doors.close()
                await self._witness.close()
                context.destroy(linger=0)

    # ------------------------------------------------------------------ a cycle

    async def _cycle(self) -> None:
        """Pause the fleet, by one hold or two, look at every engine, and resume."""
        draw, options = self._draw, self.options
        await self._until_members(options.num_needed)
        moment = draw.choice(MOMENTS) if draw.random() < 0.7 else ""
        door_moment = draw.choice(MOMENTS) if options.gateways > 1 else ""
        self._cycle_harmed = bool(moment) or bool(self.launcher.harmed)
        self._harm_at("before", moment, door_moment)
        if moment == "before":
            await asyncio.sleep(draw.choice((0.0, 0.02)))
        self._harm_at("during", moment, door_moment)
        mode, kind = draw.choice(MODES), draw.random()
        if kind < 0.1:  # without a pause, or beside one
            self._updates = [asyncio.create_task(self._update())]
        holds = [f"trainer-{draw.randrange(1 << 30)}" for _ in range(2 if kind > 0.85 else 1)]
        stand = [hold for hold in await asyncio.gather(*(self._pause(hold, mode) for hold in holds)) if hold]
        if stand:
            began, quiet = time.monotonic(), not self._doors_harmed
            # One that has no token yet may be one that another gateway takes up: its tokens are from before the pause.
            streams = [stream for stream in self.load.open_streams() if stream.log.num_tokens]
            before = await self._last_token(mode, quiet, streams)
            await self._check_members(set(stand))
            await self._while_paused(moment, door_moment, stand, mode)
            came = tokens_of(streams) - before
            if came and quiet and not self._doors_harmed and self.doors.harmed_at < began:
                self.ledger.problem(f"{came} tokens came during a pause ({mode})")
            self.ledger.counts["pauses without a token"] += quiet
        await asyncio.gather(*(self._resume(hold, mode) for hold in stand))
        await asyncio.gather(*self._updates)
        await self._check_members(set())
        await asyncio.sleep(draw.uniform(0.0, options.pace_s))

    async def _last_token(self, mode: str, quiet: bool, streams: Sequence[Stream]) -> int:
        """Wait until the clients have got what the gateways had before the end of the pause. Return the number of
        tokens. quiet: no gateway was harmed, so that must come soon."""
        end, number = time.monotonic() + LAST_TOKEN_S, -1
        while (now := tokens_of(streams)) != number:
            if quiet and time.monotonic() > end and not self._doors_harmed:
                self.ledger.problem(f"tokens go on coming in a pause ({mode})")
                break
            number = now
            await asyncio.sleep(LAST_BYTES_S)
        return now

    async def _while_paused(self, moment: str, door_moment: str, stand: list[str], mode: str) -> None:
        draw = self._draw
        self._harm_at("paused", moment, door_moment)
        if draw.random() < 0.2:
            await self._update()
            await self._check_members(set(stand))
        if len(stand) == 2 and draw.random() < 0.5:
            released = stand.pop()
            await self._resume(released, mode)
            await self._check_members(set(stand))
        await asyncio.sleep(draw.uniform(0.0, self.options.pace_s / 2))

    async def _pause(self, hold: str, mode: str) -> str:
        """Return the hold if it stands."""
        draw, ledger, load = self._draw, self.ledger, self.load
        on_timeout = draw.choice(("cancel", "keep", "abort")) if mode == "wait" else None
        body = {"mode": mode, "hold_id": hold, "timeout_s": 0.2} | ({"on_timeout": on_timeout} if on_timeout else {})
        aborts = "abort" in (mode, on_timeout)
        load.aborts += aborts
        load.rejecting += aborts
        began, harmed = time.monotonic(), self._doors_harmed
        logger.info("pause %s", body)
        reply = await self.doors.call("POST", "/v1/pause", body)
        seconds = time.monotonic() - began
        logger.info("pause %s: HTTP %d %s", hold, reply.status, code_of(reply.body))
        load.aborts += aborts
        load.rejecting -= aborts and mode != "abort"
        if code_of(reply.body) == PauseTimeout.code:
            ledger.counts["pauses refused"] += 1
            load.rejecting -= mode == "abort"
            await self._check_members(set(), {hold})
            return ""
        if reply.status != 200:
            ledger.problem(f"pause {hold}: HTTP {reply.status}: {reply.body}")
            load.rejecting -= mode == "abort"
            return ""
        report = reply.body["result"]
        self._boot_id = self._boot_id or report["boot_id"]
        if report["boot_id"] != self._boot_id:
            self._boot_id = report["boot_id"]
            ledger.problem("the fleet has lost its weights")
        fenced = sum(entry["status"] == "fenced" for entry in report["replicas"])
        door = harmed or self._doors_harmed or self.doors.harmed_at > began
        self.pauses.append(Pause(mode, seconds, self._cycle_harmed, door, fenced))
        ledger.counts["pauses"] += 1
        return hold

    async def _resume(self, hold: str, mode: str) -> None:
        logger.info("resume %s", hold)
        reply = await self.doors.call("POST", "/v1/resume", {"hold_id": hold})
        logger.info("resume %s: HTTP %d %s", hold, reply.status, code_of(reply.body))
        # Not found: an earlier try has released it, and its gateway died.
        if reply.status != 200 and code_of(reply.body) != HoldNotFound.code:
            self.ledger.problem(f"resume {hold}: HTTP {reply.status}: {reply.body}")
        self.load.rejecting -= mode == "abort"
        self.ledger.counts["resumes"] += 1

    async def _update(self) -> None:
        """Give the fleet new weights."""
        self._weights += 1
        version = f"w{self._weights}"
        body = {"model_path": f"/{version}", "version": version, "kv": self._draw.choice(("keep", "recompute"))}
        self._updating += 1
        self._num_updates += 1
        logger.info("update %s", version)
        try:
            reply = await self.doors.call("POST", "/v1/update_weights", body)
            logger.info("update %s: HTTP %d %s", version, reply.status, code_of(reply.body))
        finally:
            self._updating -= 1
        if code_of(reply.body) == UpdateInProgress.code:
            self.ledger.counts["updates not made"] += 1
            return
        if reply.status != 200:
            self.ledger.problem(f"update {version}: HTTP {reply.status}: {reply.body}")
            return
        self.load.committed = max(self.load.committed, reply.body["result"]["weight_epoch"])
        self.ledger.counts["updates"] += 1

    # ------------------------------------------------------------------ checks

    async def _check_members(self, stand: set[str], gone: set[str] | None = None) -> None:
        """Ask every engine. All members have the holds ``stand``, none of ``gone`` (None = no others), and the same
        weights. Wait until a gateway leads that tells its members, at most for CHECK_S."""
        end = time.monotonic() + CHECK_S
        while not await self._looked(stand, gone):
            if time.monotonic() > end:
                self.ledger.counts["looks without a leader"] += 1
                return
            await asyncio.sleep(0.05)
        self.ledger.counts["looks at all engines"] += 1

    async def _looked(self, stand: set[str], gone: set[str] | None) -> bool:
        """Look once. Return whether most replicas were members. The engines answer on connections of their own,
        whatever the gateways believe. The members are those that the gateway that leads names, before and
        afterwards."""
        ledger, updates, committed = self.ledger, (self._updating, self._num_updates), self.load.committed
        before, lives = await self._members(), dict(self.launcher.num_harmed)
        members = [name for name in before if self.launcher.harmed.get(name) not in ("killed", "stopped")]
        if 2 * len(members) <= self.options.replicas:
            return False
        reports = await self._witness.ask(members)
        still = await self._members()
        weights, num = set(), 0
        for name in members:
            report = reports.get(name)
            if still.get(name) != before[name] or self.launcher.num_harmed.get(name) != lives.get(name):
                continue
            num += 1
            if report is None:
                ledger.problem(f"{name}: a member that does not answer")
                continue
            holds = {hold["id"] for hold in report["holds"]}
            if not stand <= holds or (stand and not report["is_paused"]):
                ledger.problem(f"{name}: a member that is not paused: {stand - holds} of {stand}, {report['phase']}")
            if wrong := holds - stand if gone is None else holds & gone:
                ledger.problem(f"{name}: a member with a hold that was released, or never stood: {wrong}")
            if report["fingerprint"] != fingerprint_of(number_of(report["version"], self.load.first_version)):
                ledger.problem(f"{name}: its weights are not those of its label {report['version']!r}")
            if report["weight_epoch"] < committed:
                ledger.problem(f"{name}: a member with epoch {report['weight_epoch']}, below {committed}")
            weights.add((report["weight_epoch"], report["fingerprint"]))
        if len(weights) > 1 and updates == (0, self._num_updates):
            ledger.problem(f"members with different weights: {sorted(weights)}")
        ledger.counts["engines asked"] += num
        return 2 * num > self.options.replicas

    async def _keepers(self, name: str) -> Keepers:
        """Return the engines that have all tokens of a request, see Load."""
        harmed, lives = set(self.launcher.harmed), dict(self.launcher.num_harmed)
        answers = await self._witness.ask(
            [each for each in self.launcher.names if each not in harmed], m.RetainedArgs(name)
        )
        return {each: lives.get(each, 0) for each, answer in answers.items() if answer["kept_s"] is not None}

    async def _members(self) -> dict[str, tuple[str, ...]]:
        """Return the members, as the gateway that leads knows them, by name: with that gateway's address. Empty if it
        does not tell in time."""
        leaders = [report["leader"] for report in (await self._witness.ask(self.launcher.names[:3])).values()]
        door = self.doors.at(max(leaders, key=leaders.count, default=""))
        if door is None or door.harm:
            return {}
        try:
            entries = (await door.client.get("/v1/replicas", timeout=LEADER_S))["replicas"]
        except (WireError, ServerError, OSError, TimeoutError):
            return {}
        return {entry["name"]: (door.address,) for entry in entries if entry["state"] in ("member", "draining")}

    async def _check_end(self) -> None:
        """All replicas are members again, and nothing of any request is left on them."""
        await self._until_members(self.options.replicas)
        await self._check_members(set())
        self.load.check_end()
        for name, report in (await self._witness.ask(self.launcher.names)).items():
            left = (report["running"], report["waiting"], self._blocks - report["available_gpu_block_num"])
            if any(left) or report["holds"]:
                self.ledger.problem(f"{name}: running, waiting, blocks in use: {left}, holds {report['holds']}")

    # ------------------------------------------------------------------ harm

    @property
    def _doors_harmed(self) -> bool:
        return len(self.doors.unharmed) < self.options.gateways

    def _harm_at(self, now: str, moment: str, door_moment: str) -> None:
        """Harm engines or a gateway, if this is the moment for it."""
        if now == moment:
            self._do_harm(SPREAD_S if now == "during" else 0.0)
        if now == door_moment and len(self.doors.unharmed) > 1:
            door, harm = self._draw.choice(self.doors.unharmed), self._draw.choice(DOOR_HARMS)
            self.ledger.counts[f"gateway: {harm}"] += 1
            self._spawn(self._harm_door(door, harm, self._draw.uniform(0.0, SPREAD_S if now == "during" else 0.0)))

    async def _harm_door(self, door: Door, harm: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not door.harm:
            await self.doors.hurt(door, harm, self._draw.uniform(0.0, 0.3 if harm in ("kill", "end") else 1.0))

    def _do_harm(self, spread_s: float) -> None:
        """Harm some engines, each at a time of its own within ``spread_s``."""
        healthy = [name for name in self.launcher.names if name not in self.launcher.harmed]
        for name in self._draw.sample(healthy, min(self.options.num_harmed, len(healthy))):
            harm = self._draw.choice(HARMS)
            self.ledger.counts[harm] += 1
            self._spawn(self._harm_one(name, harm, self._draw.uniform(0.0, spread_s)))

    async def _harm_one(self, name: str, harm: str, after_s: float) -> None:
        draw, launcher = self._draw, self.launcher
        await asyncio.sleep(after_s)
        if name in launcher.harmed:
            return
        logger.info("%s: %s", name, harm)
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

    async def _until_members(self, least: int) -> None:
        end = time.monotonic() + BACK_S
        while len(await self._members()) < least:
            if time.monotonic() > end:
                replicas = (await self.doors.client.get("/v1/replicas"))["replicas"]
                states = {replica["name"]: (replica["state"], replica["why"]) for replica in replicas}
                raise RuntimeError(f"{least} replicas did not become members within {BACK_S:g} s: {states}")
            await asyncio.sleep(0.02)
