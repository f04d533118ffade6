"""The trainer of a control run: examples/async_grpo with a few problems, which come again and again. So prompts find
KV blocks that were computed before a commit."""

from __future__ import annotations

import sys
from unittest.mock import patch

from examples.async_grpo.__main__ import main as train
from examples.async_grpo.problems import Curriculum
from examples.embedded_model.arithmetic import Problem

PROBLEMS = 16


def main() -> int:
    pool: list[Problem] = []
    draw = Curriculum.draw

    def draw_again(self: Curriculum) -> tuple[Problem, int]:
        problem, seed = draw(self)
        if len(pool) < PROBLEMS:
            pool.append(problem)
        return pool[self.drawn % len(pool)], seed

    with patch.object(Curriculum, "draw", draw_again):
        return train()


if __name__ == "__main__":
    sys.exit(main())
