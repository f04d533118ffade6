"""What a trainer needs of a task: problems, answers with rewards, and a measure of success."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from examples.async_grpo.config import Settings
from examples.async_grpo.samples import Sample
from fastdeploy.rl.client import RolloutClient


class AnswersFailed(Exception):
    """The server gave up on a group. samples: what it had sampled."""

    def __init__(self, message: str, samples: Sequence[Sample]):
        super().__init__(message)
        self.message, self.samples = message, samples


class Task(Protocol):
    """Equal seeds and equal successes give equal problems. drawn: number of problems so far."""

    drawn: int

    def draw(self) -> tuple[Any, int]:
        """Return the next problem and a seed for its answers."""

    async def answers(
        self, client: RolloutClient, settings: Settings, problem: Any, seed: int
    ) -> tuple[Sequence[Sample], Sequence[float]]:
        """Return ``settings.group`` samples of a problem and their rewards, from 0.0 to 1.0. Raises AnswersFailed."""

    def note(self, problem: Any, solved: float) -> None:
        """Note the mean reward of one group."""

    async def evaluate(self, client: RolloutClient, count: int) -> tuple[int, int]:
        """Answer ``count`` held-out problems. Returns the number of right answers, and the number of tokens of all
        answers."""

    def state(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on at the position that ``state`` returned."""
