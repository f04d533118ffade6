"""The run of a soak: cycles, kills, and audits while nothing runs."""

from __future__ import annotations

import asyncio
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acceptance.lib.ledger import Ledger, Versions, Witness
from acceptance.lib.soak import plan
from acceptance.lib.soak.flat import Samples, files_under, process_holds
from acceptance.lib.soak.load import Load
from acceptance.lib.soak.served import MAX_NUM_SEQS, LineProcess, Server, segments
from benchmarks.lib.roofline import Shape
from benchmarks.make_adapters import write_adapter
from fastdeploy.embedded import MODEL_DIR

# Limits of what would hang for ever. A machine with much other work takes long, and that is no failure.
CYCLE_S = REST_S = 900.0
IDLE_S = 120.0
COMPARED = 2  # rollouts per audit whose tokens are compared with the reference
AT_ADAPTER = 10_000_000  # numbers of the rollouts with an adapter
ADAPTER = "soak-adapter"


@dataclass(frozen=True)
class Options:
    """cycles, minutes: the run ends when the first of them is over. audit_every: cycles. in_flight: rollouts. kills:
    whether processes are killed."""

    cycles: int = 1000
    minutes: float | None = None
    seed: int = 0
    audit_every: int = 10
    in_flight: int = 12
    kills: bool = True


class Broken(Exception):
    """A promise of the server does not hold. The run ends."""


@dataclass
class Soak:
    """One run. folder: empty; for all files. say: prints a line."""

    options: Options
    folder: Path
    say: Callable[[str], None]
    samples: Samples = field(default_factory=Samples)
    ledger: Ledger = field(default_factory=Ledger)
    cycle: int = 0
    _engines: dict[str, int] = field(default_factory=dict)  # boot_id -> last count of its tokens
    _killed: dict[str, int] = field(default_factory=dict)  # the same of engines that were killed since the last audit
    _kv_blocks: float | None = None
    _retained_mb: dict[int, float] = field(default_factory=dict)  # engine's pid -> most that its results have taken
    _trainer_pids: set[int] = field(default_factory=set)
    _may_fail: bool = False  # a process was killed in this cycle

    def __post_init__(self) -> None:
        self.versions, self.seen = Versions(self.ledger), self.ledger.counts

    async def run(self) -> dict[str, Any]:
        """Return the report. ``problems`` in it is empty if every check held."""
        began = time.monotonic()
        (self.folder / "published").mkdir()
        write_adapter(self.folder / "adapter", Shape.of(MODEL_DIR), 8, self.options.seed)
        self.server = Server(self.folder)
        seed = str(self.options.seed)
        trainer = [self.server.url, str(self.folder / "published"), seed]
        self.trainer = LineProcess("acceptance.lib.soak.trainer", trainer, self.folder / "trainer.log")
        reference = [str(self.folder / "reference"), seed]
        log = self.folder / "reference.log"
        self.reference = LineProcess("acceptance.lib.soak.reference", reference, log, threads=1)
        self.load: Load | None = None
        ticker = asyncio.create_task(self._tell_each_minute(began))
        try:
            await self._start()
            await self._cycles(began)
            await self._end()
        except Exception as error:  # whatever it is, the run has not shown that all is well
            traceback.print_exception(error)
            for leaf in leaves(error):
                self.ledger.problem(f"cycle {self.cycle}: {type(leaf).__name__}: {leaf}")
        finally:
            ticker.cancel()
            await self._close()
        for problem in self.samples.problems():
            self.ledger.problem(problem)
        return self._report(time.monotonic() - began)

    # ------------------------------------------------------------------ begin and end

    async def _start(self) -> None:
        await self.reference.start()
        await self.server.wait_ready()
        await self._start_trainer()
        weights = await self.server.client.get("/v1/weights")
        self.versions.first_boot, self.versions.first_version = weights["boot_id"], str(weights["version"])
        self.load = Load(self.server.url, self.options.seed, self.options.in_flight, self.ledger)
        self.load.clients.go_on()

    async def _start_trainer(self) -> None:
        await self.trainer.start()
        self._trainer_pids.add(self.trainer.process.pid)

    async def _cycles(self, began: float) -> None:
        cycles, minutes = self.options.cycles, self.options.minutes
        kills = plan.kills(self.options.seed, cycles) if self.options.kills else {}
        while self.cycle < cycles and (minutes is None or time.monotonic() - began < minutes * 60):
            cycle = plan.cycle(self.options.seed, self.cycle)
            async with asyncio.timeout(CYCLE_S):
                await self._one_cycle(cycle, kills.get(self.cycle))
            self.cycle += 1
            self.seen["cycles"] += 1
            if cycle.number in kills or self.cycle % self.options.audit_every == 0:
                await self._audit()
            await asyncio.sleep(cycle.rest_s)

    async def _end(self) -> None:
        await self._audit()
        await self.trainer.close()

    async def _close(self) -> None:
        if self.load is not None:
            await self.load.close()
        await self.trainer.close()
        await self.reference.close()
        if self.ledger.problems:
            self.server.kill_all()
            return
        for problem in await self.server.close():
            self.ledger.problem(problem)
        if left := segments(self._trainer_pids):
            self.ledger.problem(f"shared memory is left: {[path.name for path in left]}")

    # ------------------------------------------------------------------ one cycle

    async def _one_cycle(self, cycle: plan.Cycle, victim: plan.Victim | None) -> None:
        self._may_fail = victim is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._train(cycle))
            group.create_task(self._disturb(cycle, alone=victim is None))
            if victim is not None:
                group.create_task(self._kill(cycle, victim))
        if victim is None:
            return
        await self.server.whole()
        if not self.trainer.runs:  # killed when it had made the cycle
            await self._start_trainer()
        while str((await self.server.client.get("/v1/weights"))["version"]) != str(cycle.number + 1):
            await self._train(cycle)  # the engine was killed after its commit

    async def _train(self, cycle: plan.Cycle) -> None:
        """Let the trainer make the cycle. Another trainer begins it anew if the first one was killed."""
        while True:
            if not self.trainer.runs:
                await self._start_trainer()
            async for event in self.trainer.ask(str(cycle.number)):
                self._record(event, cycle)
                if event["kind"] == "done":
                    return
            if not self._may_fail:
                raise Broken(f"the trainer has ended: see {self.folder}/trainer.log")

    def _record(self, event: dict[str, Any], cycle: plan.Cycle) -> None:
        if event["kind"] == "publishing":
            self.versions.publishing(event["version"], event["t"])
        elif event["kind"] == "published":
            self.versions.published(event["version"], event["boot_id"], event["weight_epoch"], event["t"])
            self.seen[f"published {event['sent']}"] += 1
            self.seen[f"published {cycle.mode or 'live'}, kv={cycle.kv}"] += 1
            self.seen[f"published by {cycle.via}"] += 1
        elif event["kind"] == "failed":
            self.seen[f"failed: {event['code']}"] += 1
            if not self._may_fail:
                raise Broken(f"the trainer's call failed without a kill: {event}")
        else:
            self.seen["sleeps"] += bool(cycle.sleeps)

    async def _disturb(self, cycle: plan.Cycle, alone: bool) -> None:
        """Abort single requests. Unless a process is to be killed, also load, use and unload an adapter."""
        assert self.load is not None
        rng = plan.generator(self.options.seed, 9, cycle.number)
        for _ in range(cycle.aborts):
            await asyncio.sleep(float(rng.uniform(0.0, 0.4)))
            await self.load.abort_one(rng)
            self.seen["aborts"] += 1
        if cycle.adapter and alone:
            first = AT_ADAPTER + 2 * cycle.number
            prompts = [plan.prompt(self.options.seed, number) for number in (first, first + 1)]
            await self.load.with_adapter(ADAPTER, str(self.folder / "adapter"), prompts)
            self.seen["adapters"] += 1

    async def _kill(self, cycle: plan.Cycle, victim: plan.Victim) -> None:
        await asyncio.sleep(plan.kill_delay_s(self.options.seed, cycle.number))
        if victim == "trainer":
            await self.trainer.kill()
        elif victim == "engine":
            boot_id = (await self.server.client.get("/v1/is_paused"))["boot_id"]
            self._killed[boot_id] = int((await self.server.metrics())["generation_tokens_total"])
            self.server.kill("engine", 0)
        else:
            self.server.kill("api", cycle.number)
        self.seen[f"{victim} killed"] += 1

    # ------------------------------------------------------------------ audit

    async def _audit(self) -> None:
        """Let all rollouts end, and check everything while the server is idle. Raises Broken."""
        assert self.load is not None
        try:
            async with asyncio.timeout(REST_S):
                await self.load.clients.rest()
        except TimeoutError:
            raise Broken(f"rollouts do not end: {self.load.open_rollouts()}") from None
        metrics = await self._idle_metrics()
        weights = await self.server.client.get("/v1/weights")
        await self._check_idle_state(weights, metrics)
        self._check_tokens(weights["boot_id"], int(metrics["generation_tokens_total"]))
        now, done = time.monotonic(), self.load.ended
        self.load.ended = []
        for witness in done:
            self.versions.check(witness)
        self.versions.forget_before(now)
        self.seen["preemptions"] += sum(w.rollout.num_preempted for w in done)
        self.seen["resumed attempts"] += sum(w.rollout.num_resumes for w in done)
        self._sample(metrics)
        await self._compare(done)
        self.seen["audits"] += 1
        if found := self.ledger.problems:
            raise Broken(f"{len(found)} problems: {found[0]}")
        self.load.clients.go_on()

    async def _idle_metrics(self) -> dict[str, float]:
        end = time.monotonic() + IDLE_S
        while True:
            metrics = await self.server.metrics()
            busy = metrics["num_requests_running"] + metrics["num_requests_waiting"]
            if not busy:
                return metrics
            if time.monotonic() > end:
                raise Broken(f"{busy:g} requests are in the engine although all clients have their answers")
            await asyncio.sleep(0.05)

    async def _check_idle_state(self, weights: dict[str, Any], metrics: dict[str, float]) -> None:
        """Check that no session, sleep, adapter or block is left, and no hold of a living trainer. A dead trainer's
        hold ends by its ttl."""

        async def holds() -> list[Any]:
            found: list[Any] = (await self.server.client.get("/v1/is_paused"))["holds"]
            return found

        end = time.monotonic() + IDLE_S
        while (standing := await holds()) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        wrong = {
            "a hold": bool(standing),
            "a weight session": weights["session"] is not None,
            "a sleep": bool(weights["asleep"]),
            "an adapter": metrics["adapters_known"] != 0,
            "KV blocks in use": metrics["available_gpu_block_num"] != metrics["max_gpu_block_num"],
            "another number of KV blocks": self._kv_blocks not in (None, metrics["max_gpu_block_num"]),
            "an internal error": metrics["internal_errors_total"] != 0,
            "a dropped result": metrics["retained_results_dropped"] != 0,
        }
        self._kv_blocks = metrics["max_gpu_block_num"]
        if found := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise Broken(f"left in the idle server: {', '.join(found)}; {weights}; holds {standing}; {metrics}")

    def _check_tokens(self, boot_id: str, generated: int) -> None:
        for killed, least in self._killed.items():
            self.ledger.balance_killed(killed, least, MAX_NUM_SEQS)
        self._engines |= self._killed
        self._killed.clear()
        self.ledger.balance(boot_id, generated)
        self._engines[boot_id] = generated

    def _sample(self, metrics: dict[str, float]) -> None:
        processes = [*self.server.pids(), ("trainer", self.trainer.process.pid), ("clients", os.getpid())]
        for role, pid in processes:
            holds = process_holds(pid)
            if role == "engine":  # results that are kept for retain_s are no leak; freed memory is used again
                peak = max(self._retained_mb.get(pid, 0.0), metrics["retained_bytes"] / 1e6)
                self._retained_mb[pid] = peak
                holds |= {"rss_mb": holds["rss_mb"] - peak, "pss_mb": holds["pss_mb"] - peak}
            self.samples.add(self.cycle, role, pid, holds)
        count, nbytes = files_under([*self.server.folders.values(), self.folder / "published", self.server.ipc])
        self.samples.add(self.cycle, "folders", 0, {"folder_files": count, "folder_mb": nbytes})
        count, nbytes = files_under(segments(self._trainer_pids))
        self.samples.add(self.cycle, "shared memory", 0, {"shm_files": count, "shm_mb": nbytes})
        used = metrics["max_gpu_block_num"] - metrics["available_gpu_block_num"]
        self.samples.add(self.cycle, "idle engine", 0, {"kv_blocks": used})

    async def _compare(self, done: list[Witness]) -> None:
        """Compare greedy rollouts of one version with the tokens of the reference."""
        chosen = [w for w in done if is_comparable(w)][-COMPARED:]
        for witness in chosen:
            rollout, version = witness.rollout, witness.rollout.spans[0].version
            step = 0 if version == self.versions.first_version else int(version)
            question = {"step": step, "prompt": rollout.prompt_ids, "tokens": len(rollout.token_ids)}
            expected = await asyncio.wait_for(anext(self.reference.ask(json.dumps(question))), CYCLE_S)
            self.seen["tokens compared"] += len(expected)
            if expected != rollout.token_ids:
                first = next(i for i, (a, b) in enumerate(zip(expected, rollout.token_ids, strict=True)) if a != b)
                raise Broken(f"{witness.name}: token {first} is not that of version {version}: {rollout.spans}")

    # ------------------------------------------------------------------ report

    async def _tell_each_minute(self, began: float) -> None:
        while True:
            await asyncio.sleep(60)
            minutes = (time.monotonic() - began) / 60
            kills = sum(self.seen[f"{victim} killed"] for victim in plan.VICTIMS)
            self.say(
                f"{minutes:5.1f} min: cycle {self.cycle}, {kills} kills, {self.seen['audits']} audits, "
                f"{self.ledger.accepted} rollouts, {sum(self.ledger.received.values())} tokens"
            )

    def _report(self, seconds: float) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "options": vars(self.options),
            "seconds": round(seconds, 1),
            "problems": self.ledger.problems,
            "seen": dict(sorted(self.seen.items())),
            "ledger": {
                "engines": len(self._engines),
                "generated": sum(self._engines.values()),
                "received": sum(ledger.received.values()),
                "undelivered": sum(ledger.undelivered.values()),
                "missing": ledger.missing,
                "rollouts": ledger.accepted,
                "lost_results": ledger.lost_results,
            },
            "resources": self.samples.summary(),
        }


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors within a group of errors, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def is_comparable(witness: Witness) -> bool:
    """Return whether the tokens of a rollout follow from one version alone: greedy, and nothing computed by others."""
    rollout = witness.rollout
    return (
        witness.greedy and len({s.version for s in rollout.spans}) == 1 and not any(s.recomputed for s in rollout.spans)
    )
