"""Problems of one to three operations, which are worked out from left to right: "47*38+512" -> "2298"."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]
OPERATIONS = (0.2, 0.5, 0.3)
"""Share of the problems with one, two and three operations."""
HELDOUT_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """question: "47*38+512". steps: one operation each, "47*38" and "1786+512". results: of the steps."""

    question: str
    steps: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.results[-1]

    def is_solved_by(self, text: str) -> bool:
        """Return whether ``text`` is the right number, and nothing else."""
        return text.strip() == self.answer


def draw(rng: random.Random, split: Split) -> Problem:
    """Return a random problem of a split. No question is in both."""
    while True:
        problem = _draw(rng)
        held_out = zlib.crc32(problem.question.encode()) % HELDOUT_ONE_IN == 0
        if held_out == (split == "heldout"):
            return problem


def _draw(rng: random.Random) -> Problem:
    """Only the first operation may be a product, so that from left to right is also the usual order. No result is
    negative."""
    (count,) = rng.choices((1, 2, 3), OPERATIONS)
    value = rng.randint(10, 999)
    question, steps, results = str(value), [], []
    for i in range(count):
        sign = rng.choice("+-*") if i == 0 else rng.choice("+-")
        number = rng.randint(10, 99 if sign == "*" else 999)
        if sign == "-" and number > value:
            sign = "+"
        steps.append(f"{value}{sign}{number}")
        value = {"+": value + number, "-": value - number, "*": value * number}[sign]
        question += f"{sign}{number}"
        results.append(str(value))
    return Problem(question, tuple(steps), tuple(results))
