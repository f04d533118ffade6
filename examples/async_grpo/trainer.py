"""The loop of a run: take a batch, update, publish; evaluate and save from time to time."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

import numpy as np

from examples.async_grpo import sync
from examples.async_grpo.config import Settings
from examples.async_grpo.learner import Learner
from examples.async_grpo.records import Display, Records
from examples.async_grpo.rollouts import Producer
from examples.async_grpo.serving import sampled_tokens
from examples.async_grpo.task import Task
from fastdeploy.rl.client import RolloutClient


class Trainer:
    """One run of ``task`` on the server of ``client``."""

    def __init__(self, settings: Settings, client: RolloutClient, task: Task, display: Display):
        self._settings, self._client, self._display = settings, client, display
        self._learner = Learner(settings)
        self._task = task
        self._number = 0  # of updates made
        self._made = 0  # of these, by this process
        self._publication = 0  # the last one, counted over all processes of the run
        self._accuracy = 0.0  # held-out, from 0 to 1
        self._checkpoint, before = Path(settings.out) / "checkpoint", None
        if settings.resume:
            position = self._learner.load(self._checkpoint)
            self._task.restore(position["task"])
            self._number, before = position["update"], position["seconds"]
            self._publication = position["publication"] - 1  # the same weights are published again under this number
        else:
            self._checkpoint.unlink(missing_ok=True)  # of an earlier run in this folder
        self._records = Records(Path(settings.out) / "events.jsonl", before)
        self._began = self._records.now()

    async def run(self) -> None:
        """Train until the target, the time or the number of updates is reached."""
        settings, records, url = self._settings, self._records, self._client.connection.url
        sampled = sampled_tokens(url)
        records.write("run", seed=settings.seed, sync=settings.sync, kv=settings.kv, server_tokens=sampled,
                      update=self._number, drawn=self._task.drawn, settings=asdict(settings))  # fmt: skip
        await self._publish()
        producer = Producer(self._client, settings, self._task, records)
        if settings.eval_every and not settings.resume:
            await self._evaluate()
        async with producer.running():
            while (why := self._ending()) is None:
                await self._update(producer)
                if self._is_due(settings.eval_every):
                    await self._evaluate()
                if self._is_due(settings.checkpoint_every):
                    self._save()
        if settings.eval_every and not self._is_due(settings.eval_every):
            await self._evaluate()
        if settings.checkpoint_every and not self._is_due(settings.checkpoint_every):
            self._save()
        sampled = sampled_tokens(url) - sampled
        ledger = {"sampled": sampled, **records.ledger, "unexplained": sampled - records.ledger.total()}
        records.write("end", why=why, **ledger)
        tokens = "  ".join(f"{name} {count}" for name, count in ledger.items())
        self._display.console.print(f"ended: {why}\ntokens: {tokens}\nevents in {settings.out}/events.jsonl")

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._number % every == 0

    def _ending(self) -> str | None:
        """Return why the run has to end now, or None."""
        if self._accuracy >= self._settings.target:
            return "target"
        if self._records.now() >= 60 * self._settings.minutes:
            return "time"
        return "updates" if self._number >= self._settings.updates else None

    async def _update(self, producer: Producer) -> None:
        records = self._records
        began = records.now()
        groups = await producer.batch(self._publication)
        waited = records.now() - began
        done = await asyncio.to_thread(self._learner.update, self._number, self._publication, groups)
        for group in groups:
            producer.settle(group, "trained")
        self._number += 1
        await self._publish()
        await producer.go_on()
        done["seconds"]["wait"] = waited
        reward = float(np.mean([group.rewards for group in groups]))
        records.write("update", update=self._number, reward=reward, reward_all=producer.success, **done)
        now = records.now()
        per_second = records.ledger.total() / (now - self._began)
        self._made += 1
        by_updates = (now - self._began) / self._made * (self._settings.updates - self._number)
        by_time = 60 * self._settings.minutes - now
        self._display.set_time_left(min(by_updates, by_time), is_most=by_time <= by_updates)
        self._display.show(
            now, updates=self._number, reward=f"{producer.success:.2f}", tokens_per_s=f"{per_second:.0f}",
            lag=f"{done['lag_mean']:.1f} (max {done['lag_max']})",
            mismatch="-" if done["mismatch"] is None else f"{done['mismatch']['kl']:g}",
        )  # fmt: skip

    async def _publish(self) -> None:
        state, number = self._learner.scorer.state(), self._publication + 1
        done = await sync.publish(self._client, self._settings, state, number, self._records.now)
        self._publication = number
        self._records.write("sync", publication=number, **done)

    async def _evaluate(self) -> None:
        began, count = self._records.now(), self._settings.eval_problems
        solved, tokens = await self._task.evaluate(self._client, count)
        self._accuracy = solved / count
        self._records.ledger["evaluated"] += tokens
        self._records.write("eval", update=self._number, publication=self._publication, problems=count, solved=solved,
                            tokens=tokens, seconds=round(self._records.now() - began, 3))  # fmt: skip
        now = self._records.now()
        self._display.console.print(f"{now:6.0f} s  {self._display.show(now, held_out=f'{self._accuracy:.1%}')}")

    def _save(self) -> None:
        position = {"update": self._number, "publication": self._publication, "seconds": self._records.now()}
        self._learner.save(self._checkpoint, position | {"task": self._task.state()})
        self._records.write("checkpoint", drawn=self._task.drawn, **position)
