"""Small arithmetic with visible steps: the embedded model's task, its generator and its verifier.

Four kinds of problem, four levels each, so that solutions are 3 to about 300 tokens long (one token is one byte):

    kind   level 1            level 2            level 3            level 4
    add    1-2 digits         3-4 digits         5-6 digits         7-9 digits
    sub    1-2 digits         3-4 digits         5-6 digits         7-9 digits
    sum    3-4 terms, 1 digit 5-7 terms, 1 digit 8-12 terms, 1 dig. 4-6 terms, 2 digits
    mul    1-2 x 1 digit      3-4 x 1 digit      2-3 x 2 digits     3 x 3 digits

A solution works one column at a time from the right, each step showing the two-digit column result and, after ``>``,
the digits found so far; a ``sum`` shows its running totals; the answer stands after the last ``#``:

    "347+85="  ->  "7+5+0=12>2;4+8+1=13>32;3+0+1=04>432#432"

This module imports nothing but the standard library, so that a trainer can use it beside any framework.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

Split = Literal["train", "heldout"]

KINDS = ("add", "sub", "sum", "mul")
LEVELS = (1, 2, 3, 4)
LEVEL_WEIGHTS = (0.35, 0.3, 0.25, 0.1)
"""Share of each level among the problems of every kind, in training and in the held-out split alike."""

HELDOUT_ONE_IN = 8
"""One problem in this many, chosen by a hash of its operands, is never trained on."""


@dataclass(frozen=True)
class Problem:
    """prompt: the model's input ("347+85="). solution: one full correct completion. answer: the result. operands: in
    the order of the prompt."""

    kind: str
    level: int
    operands: tuple[int, ...]
    prompt: str
    solution: str
    answer: str


def problems(seed: int, n: int, split: Split = "heldout") -> list[Problem]:
    """Return ``n`` problems. The same arguments give the same problems. A problem may repeat within a list."""
    return list(islice(stream(seed, split), n))


def stream(seed: int, split: Split) -> Iterator[Problem]:
    """Yield problems without end; ``problems`` returns the first of them."""
    rng = random.Random(f"{split}/{seed}")
    while True:
        kind = rng.choice(KINDS)
        (level,) = rng.choices(LEVELS, LEVEL_WEIGHTS)
        yield random_problem(rng, kind, level, split)


def random_problem(rng: random.Random, kind: str, level: int, split: Split) -> Problem:
    """Return a problem of this kind and level. Only the operands are drawn again, so both splits have the same mix."""
    while split_of(kind, operands := _draw_operands(rng, kind, level)) != split:
        pass
    return make_problem(kind, level, operands)


def split_of(kind: str, operands: tuple[int, ...]) -> Split:
    """Return the split of a problem, which depends on its operands only. The order of commuting operands does not
    matter."""
    key = operands if kind == "sub" else tuple(sorted(operands))
    digest = zlib.crc32(f"{kind}:{key}".encode())
    return "heldout" if digest % HELDOUT_ONE_IN == 0 else "train"


def make_problem(kind: str, level: int, operands: tuple[int, ...]) -> Problem:
    """Return the problem with these operands and its solution."""
    sign = {"add": "+", "sum": "+", "sub": "-", "mul": "*"}[kind]
    steps, result = _SOLVERS[kind](*operands)
    return Problem(kind, level, operands, sign.join(map(str, operands)) + "=", f"{steps}#{result}", str(result))


def is_correct(problem: Problem, completion: str) -> bool:
    """Return whether ``completion`` (text without special tokens) has the right answer after its last ``#``.

    The steps are not checked. White space around the answer is allowed, other text after the answer is not.
    """
    _, mark, stated = completion.rpartition("#")
    return mark == "#" and stated.strip() == problem.answer


def _draw_operands(rng: random.Random, kind: str, level: int) -> tuple[int, ...]:
    def number(low: int, high: int) -> int:
        digits = rng.randint(low, high)
        return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)

    if kind == "sum":
        terms, digits = (((3, 4), 1), ((5, 7), 1), ((8, 12), 1), ((4, 6), 2))[level - 1]
        return tuple(number(digits, digits) for _ in range(rng.randint(*terms)))
    if kind == "mul":
        left, right = (((1, 2), (1, 1)), ((3, 4), (1, 1)), ((2, 3), (2, 2)), ((3, 3), (3, 3)))[level - 1]
        return number(*left), number(*right)
    low, high = ((1, 2), (3, 4), (5, 6), (7, 9))[level - 1]
    a, b = number(low, high), number(low, high)
    return (max(a, b), min(a, b)) if kind == "sub" else (a, b)


def _columns(a: int, b: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the digits of a and b from the right, padded with 0, and a flag that marks the last column."""
    width = max(len(str(a)), len(str(b)))
    for i in range(width):
        yield a // 10**i % 10, b // 10**i % 10, i == width - 1


def _add(a: int, b: int) -> tuple[str, int]:
    if max(a, b) < 10:
        return "", a + b
    steps, carry, found = [], 0, ""
    for x, y, last in _columns(a, b):
        total = x + y + carry
        found = (str(total) if last else str(total % 10)) + found
        steps.append(f"{x}+{y}+{carry}={total:02d}>{found}")
        carry = total // 10
    return ";".join(steps), a + b


def _sub(a: int, b: int) -> tuple[str, int]:
    if a < 10:
        return "", a - b
    steps, borrow, found = [], 0, ""
    for x, y, _ in _columns(a, b):
        lent = 10 if x - y - borrow < 0 else 0
        digit = x + lent - y - borrow
        found = str(digit) + found
        steps.append(f"{x + lent:02d}-{y}-{borrow}={digit}>{found}")
        borrow = lent // 10
    return ";".join(steps), a - b


def _sum(*terms: int) -> tuple[str, int]:
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return ";".join(steps), total


def _mul_digit(a: int, digit: int) -> str:
    steps, carry, found = [], 0, ""
    for x, _, last in _columns(a, 0):
        total = x * digit + carry
        found = (str(total) if last else str(total % 10)) + found
        steps.append(f"{x}*{digit}+{carry}={total:02d}>{found}")
        carry = total // 10
    return ";".join(steps)


def _mul(a: int, b: int) -> tuple[str, int]:
    """Add up the partial products of a and each digit of b, from the right."""
    if b < 10:
        return _mul_digit(a, b), a * b
    lines, total = [], 0
    for i, digit in enumerate(map(int, reversed(str(b)))):
        part = a * digit * 10**i
        lines.append(f"{a}*{digit}:{_mul_digit(a, digit)}")
        if i:
            lines.append(f"{total}+{part}:{_add(total, part)[0] or total + part}")
        total += part
    return "\n".join(lines), total


_SOLVERS: dict[str, Callable[..., tuple[str, int]]] = {"add": _add, "sub": _sub, "sum": _sum, "mul": _mul}
