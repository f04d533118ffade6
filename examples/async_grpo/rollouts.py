"""The producer of groups: keeps generations in flight, and hands out batches that are not too old."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from typing import Literal

from examples.async_grpo.config import Settings
from examples.async_grpo.records import Records
from examples.async_grpo.samples import Group
from examples.async_grpo.task import AnswersFailed, Task
from fastdeploy.rl.client import RolloutClient

RECENT = 64  # groups whose success is shown
Fate = Literal["trained", "discarded", "in_flight"]


class Producer:
    """Generates groups for problems of ``task``, ``settings.concurrency`` at a time.

    Starts no group while those of an update are ready, so that answers do not grow old while they wait. Every group
    that ends gets a fate in ``records``, once.
    """

    def __init__(self, client: RolloutClient, settings: Settings, task: Task, records: Records):
        self._client, self._settings, self._task, self._records = client, settings, task, records
        self._ready: list[Group] = []
        self._in_flight = 0
        self._state: Literal["open", "closed", "ending"] = "open"
        self._changed = asyncio.Condition()  # of the three above
        self._solved: deque[float] = deque(maxlen=RECENT)

    @property
    def success(self) -> float:
        """Share of right answers in the last groups, those without variance included."""
        return sum(self._solved) / max(len(self._solved), 1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Generate inside the block. At its end, what is in flight is completed and gets the fate "in_flight"."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._settings.concurrency):
                    tasks.create_task(self._work())
                yield
                await self._enter("ending")
        finally:
            for group in self._ready:
                self.settle(group, "in_flight", "ready")

    async def batch(self, publication: int) -> list[Group]:
        """Return the groups of an update, at most ``max_staleness`` publications behind ``publication``. In the
        synchronous way, nothing is in flight when this returns, and nothing starts until :meth:`go_on`."""
        is_asynchronous = self._settings.sync != "synchronous"

        def is_complete() -> bool:
            self._drop_stale(publication)
            return len(self._ready) >= self._settings.groups and (is_asynchronous or not self._in_flight)

        async with self._changed:
            await self._changed.wait_for(is_complete)
            self._state = "open" if is_asynchronous else "closed"
            count = self._settings.groups if is_asynchronous else len(self._ready)
            found, self._ready = self._ready[:count], self._ready[count:]
            self._changed.notify_all()
            return found

    async def go_on(self) -> None:
        """Let generations start again."""
        await self._enter("open")

    def settle(self, group: Group, fate: Fate, why: str = "") -> None:
        """Record the fate of each answer of a group."""
        times = {"started": round(group.started, 4), "ended": round(group.ended, 4)}
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            tokens, spans = len(sample.logprobs), [astuple(span) for span in sample.spans]
            self._records.ledger[fate] += tokens
            self._records.write(
                "rollout", group=group.number, prompt_tokens=len(sample.prompt_ids), tokens=tokens, spans=spans,
                reward=reward, fate=fate, why=why, resumes=sample.num_resumes, preempted=sample.num_preempted, **times
            )  # fmt: skip

    def _drop_stale(self, publication: int) -> None:
        bound = publication - self._settings.max_staleness
        for group in [group for group in self._ready if group.oldest < bound]:
            self._ready.remove(group)
            self.settle(group, "discarded", "stale")
            self._changed.notify_all()  # others may start in its place

    def _may_start(self) -> bool:
        return self._state == "ending" or (self._state == "open" and len(self._ready) < self._settings.groups)

    async def _enter(self, state: Literal["open", "ending"]) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    async def _work(self) -> None:
        """Generate one group after the other."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._may_start)
                if self._state == "ending":
                    return
                self._in_flight += 1
            group = await self._generate()
            async with self._changed:
                self._in_flight -= 1
                if self._state == "ending":
                    self.settle(group, "in_flight")
                elif len(set(group.rewards)) > 1:
                    self._ready.append(group)
                else:
                    self.settle(group, "discarded", "all right" if group.rewards[0] else "all wrong")
                self._changed.notify_all()

    async def _generate(self) -> Group:
        """Return the answers to the next problem. Raises the failure of a generation; its tokens are discarded."""
        problem, seed = self._task.draw()
        number, started = self._task.drawn, self._records.now()
        failure = None
        try:
            samples, rewards = await self._task.answers(self._client, self._settings, problem, seed)
        except AnswersFailed as error:
            samples, rewards, failure = error.samples, [0.0] * len(error.samples), error
        group = Group(number, samples, rewards, started, self._records.now())
        if failure is not None:
            self.settle(group, "discarded", failure.message)
            raise failure
        solved = sum(rewards) / len(rewards)
        self._task.note(problem, solved)
        self._solved.append(solved)
        return group
