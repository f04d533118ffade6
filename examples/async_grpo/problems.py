"""Problems to train on, most of them of the kinds that the model solves sometimes; and accuracy on held-out ones."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from examples.async_grpo.config import Settings
from examples.async_grpo.samples import Sample, sample_of
from examples.async_grpo.task import AnswersFailed
from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import (
    KINDS,
    LEVEL_WEIGHTS,
    LEVELS,
    Problem,
    is_correct,
    problems,
    random_problem,
)
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.errors import RolloutFailed

FLOOR = 0.05  # share that a kind and level keep when it is solved always or never
MEMORY = 0.1  # weight of the newest group in the measured success
HELDOUT_SEED, HELDOUT_MAX_TOKENS = 0, 384  # those of examples.embedded_model.evaluate


class Curriculum:
    """Draws problems of the train split. A kind and level with success p is drawn in proportion to p (1 - p), the
    variance of its rewards, and to its share among the held-out problems.

    Equal seeds and equal successes give equal problems. drawn: number of problems so far.
    """

    def __init__(self, seed: int):
        self._rng = random.Random(f"async_grpo/{seed}")
        self.drawn = 0
        self.success = {(kind, level): 0.5 for kind in KINDS for level in LEVELS}

    def draw(self) -> tuple[Problem, int]:
        """Return the next problem and a seed for its answers."""
        shares = LEVEL_WEIGHTS * len(KINDS)
        weights = [share * (FLOOR + 4 * p * (1 - p)) for share, p in zip(shares, self.success.values(), strict=True)]
        kind, level = self._rng.choices(list(self.success), weights)[0]
        self.drawn += 1
        return random_problem(self._rng, kind, level, "train"), self._rng.getrandbits(62)

    async def answers(
        self, client: RolloutClient, settings: Settings, problem: Problem, seed: int
    ) -> tuple[list[Sample], list[float]]:
        """Return ``settings.group`` answers, and 1.0 for each right one, else 0.0. Raises AnswersFailed."""
        params = {"max_tokens": settings.max_tokens, "temperature": 1.0, "seed": seed}
        if settings.is_mixture:
            params["routed_experts"] = True
        prompt = tokenizer.prompt_ids(problem, chat=True)
        try:
            found = await client.generate_group(prompt, params, n=settings.group)
        except RolloutFailed as error:
            raise AnswersFailed(error.message, list(map(sample_of, error.partial))) from error
        rewards = [float(is_correct(problem, tokenizer.decode(rollout.token_ids))) for rollout in found]
        return list(map(sample_of, found)), rewards

    def note(self, problem: Problem, solved: float) -> None:
        """Note the share of right answers of one group."""
        cell = problem.kind, problem.level
        self.success[cell] += MEMORY * (solved - self.success[cell])

    def state(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return {"rng": self._rng.getstate(), "drawn": self.drawn, "success": list(self.success.values())}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on at the position that ``state`` returned."""
        version, words, gauss = state["rng"]
        self._rng.setstate((version, tuple(words), gauss))
        self.drawn, self.success = state["drawn"], dict(zip(self.success, state["success"], strict=True))

    async def evaluate(self, client: RolloutClient, count: int) -> tuple[int, int]:
        """Let the server answer ``count`` held-out problems, with greedy sampling. Returns the number of right answers,
        and the number of tokens of all answers."""

        async def answer(problem: Problem) -> list[int]:
            params = {"max_tokens": HELDOUT_MAX_TOKENS, "temperature": 0.0, "logprobs": None}
            return (await client.generate(tokenizer.prompt_ids(problem, chat=True), params)).token_ids

        asked = problems(HELDOUT_SEED, count)
        answers = await asyncio.gather(*map(answer, asked))
        solved = sum(is_correct(problem, tokenizer.decode(ids)) for problem, ids in zip(asked, answers, strict=True))
        return solved, sum(map(len, answers))
