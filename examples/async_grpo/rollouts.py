"""The producer of groups: keeps generations in flight, and hands out batches that are not too old."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from examples.async_grpo.config import Settings
from examples.async_grpo.problems import Curriculum
from examples.async_grpo.records import Records
from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import is_correct
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import RolloutFailed
from fastdeploy.rl.rollout import Rollout, TokenSpan

RECENT = 64  # groups whose success is shown
Fate = Literal["trained", "discarded", "in_flight"]


def publication_of(span: TokenSpan) -> int:
    """Return the publication whose weights sampled a span. The trainer publishes each under its number."""
    return int(span.version)


@dataclass(frozen=True)
class Group:
    """The answers to one problem. rewards: 1.0 for a right answer, else 0.0. started, ended: seconds of the run."""

    number: int
    rollouts: Sequence[Rollout]
    rewards: Sequence[float]
    started: float
    ended: float

    @property
    def answers(self) -> list[list[int]]:
        return [rollout.token_ids for rollout in self.rollouts]

    @property
    def oldest(self) -> int:
        """The first publication that made one of its tokens."""
        return min(publication_of(span) for rollout in self.rollouts for span in rollout.spans)


class Producer:
    """Generates groups for problems of ``curriculum``, ``settings.concurrency`` at a time.

    Starts no group while those of an update are ready, so that answers do not grow old while they wait. Every group
    that ends gets a fate in ``records``, once.
    """

    def __init__(self, client: RolloutClient, settings: Settings, curriculum: Curriculum, records: Records):
        self._client, self._settings, self._curriculum, self._records = client, settings, curriculum, records
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
        for rollout, reward in zip(group.rollouts, group.rewards, strict=True):
            tokens, spans = len(rollout.token_ids), [[publication_of(s), s.start, s.end] for s in rollout.spans]
            self._records.ledger[fate] += tokens
            self._records.write(
                "rollout", group=group.number, prompt_tokens=len(rollout.prompt_ids), tokens=tokens, spans=spans,
                reward=reward, fate=fate, why=why, resumes=rollout.num_resumes, preempted=rollout.num_preempted, **times
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
        """Return the answers to the next problem. Raises RolloutFailed; the tokens until then are discarded."""
        problem, seed = self._curriculum.draw()
        number, started = self._curriculum.drawn, self._records.now()
        params = {"max_tokens": self._settings.max_tokens, "temperature": 1.0, "seed": seed}
        prompt, failure = tokenizer.prompt_ids(problem, chat=True), None
        try:
            found = await self._client.generate_group(prompt, params, n=self._settings.group)
        except RolloutFailed as error:
            found, failure = error.partial, error
        rewards = [float(is_correct(problem, tokenizer.decode(rollout.token_ids))) for rollout in found]
        group = Group(number, found, rewards, started, self._records.now())
        if failure is not None:
            self.settle(group, "discarded", failure.message)
            raise failure
        solved = sum(rewards) / len(rewards)
        self._curriculum.note(problem, solved)
        self._solved.append(solved)
        return group
