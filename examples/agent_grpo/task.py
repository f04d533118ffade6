"""The task of the trainer: conversations of the agent, as the server remembers them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from openai import AsyncOpenAI, OpenAIError

from examples.agent_grpo.agent import solve
from examples.agent_grpo.problems import Problem, draw
from examples.async_grpo.config import Settings
from examples.async_grpo.samples import Sample, Span
from examples.async_grpo.task import AnswersFailed
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.sessions import SessionRow

HELDOUT_SEED = 0


class AgentTask:
    """Problems for the agent. All that is learned from comes from its sessions: see :func:`sample_of`."""

    def __init__(self, seed: int):
        self._rng = random.Random(f"agent_grpo/{seed}")
        self.drawn = 0

    def draw(self) -> tuple[Problem, int]:
        """Return the next problem and a seed for its answers."""
        self.drawn += 1
        return draw(self._rng, "train"), self._rng.getrandbits(48)

    async def answers(
        self, client: RolloutClient, settings: Settings, problem: Problem, seed: int
    ) -> tuple[Sequence[Sample], Sequence[float]]:
        """Let the agent solve a problem ``settings.group`` times. Raises AnswersFailed."""
        async with _openai() as openai:
            runs = [_converse(openai, client, problem, seed + i) for i in range(settings.group)]
            found = await asyncio.gather(*runs, return_exceptions=True)
        done = [run for run in found if not isinstance(run, BaseException)]
        samples = [sample for conversation, _ in done for sample in conversation]
        if failures := [run for run in found if isinstance(run, BaseException)]:
            if not isinstance(failures[0], OpenAIError):
                raise failures[0]
            raise AnswersFailed(str(failures[0]), samples) from failures[0]
        return samples, [reward for conversation, reward in done for _ in conversation]

    def note(self, problem: Problem, solved: float) -> None:
        """Do nothing: all problems are drawn alike."""

    async def evaluate(self, client: RolloutClient, count: int) -> tuple[int, int]:
        """Let the agent solve ``count`` held-out problems, sampled as in training. Returns the number of right
        answers, and the number of sampled tokens."""
        rng = random.Random(HELDOUT_SEED)
        problems = [draw(rng, "heldout") for _ in range(count)]
        async with _openai() as openai:
            runs = [_converse(openai, client, problem, seed) for seed, problem in enumerate(problems)]
            found = await asyncio.gather(*runs)
        tokens = sum(len(sample.logprobs) for conversation, _ in found for sample in conversation)
        return sum(int(reward) for _, reward in found), tokens

    def state(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return {"rng": self._rng.getstate(), "drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on at the position that ``state`` returned."""
        version, words, gauss = state["rng"]
        self._rng.setstate((version, tuple(words), gauss))
        self.drawn = state["drawn"]


def _openai() -> AsyncOpenAI:
    """Return a client whose base URL is that of no server: each conversation has its own."""
    return AsyncOpenAI(base_url="http://session", api_key="none", timeout=600)


async def _converse(
    openai: AsyncOpenAI, client: RolloutClient, problem: Problem, seed: int
) -> tuple[list[Sample], float]:
    """Return the samples of one conversation, and 1.0 if it ends with the right answer, else 0.0."""
    async with client.session() as session:
        agent = openai.with_options(base_url=session.openai_url)
        answer = await solve(agent, problem.question, temperature=1.0, seed=seed)
        rows = await session.rows()
    return [sample_of(row) for row in rows], float(problem.is_solved_by(answer))


def sample_of(row: SessionRow) -> Sample:
    """Return the sample of one conversation. Tokens that an earlier row of the session has are a part of that one."""
    sampled = np.asarray(row.new_mask, bool)
    made_by = np.zeros(len(sampled), np.int64)
    for span in (span for turn in row.turns for span in turn["weight_versions"]):
        made_by[span["start"] : span["end"]] = int(span["version"])
    learned = made_by[sampled]
    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(learned)]
    spans = [Span(int(learned[start]), start, end) for start, end in pairwise(bounds) if start < end]
    logprobs = np.asarray(row.logprobs, np.float32)[sampled]
    return Sample(row.prompt_ids, row.output_ids, sampled[len(row.prompt_ids) :], logprobs, spans)
