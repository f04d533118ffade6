"""A calculator for whole numbers with + - *. The expressions come from a model, so they are never evaluated as code."""

from __future__ import annotations

import re
from math import prod

MAX_CHARS = 64


class CalculatorError(ValueError):
    """An expression that the calculator does not take."""


def calculate(expression: str) -> int:
    """Return the value of an expression like ``12+3*04-5``. Products come first. Raises CalculatorError for an
    expression that is longer than MAX_CHARS, or of another form."""
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"expected at most {MAX_CHARS} characters, got {len(expression)}")
    if not re.fullmatch(r"[0-9]+([-+*][0-9]+)*", expression):
        raise CalculatorError(f"expected whole numbers joined by + - *, got {expression!r}")
    terms = re.split(r"(?=[-+])", expression)  # each with its sign
    return sum(prod(int(factor) for factor in term.split("*")) for term in terms)


def step_result(text: str) -> str:
    """Return the result of the expression at the end of ``text``, in the way of the embedded model's task: a step with
    a carry, like ``7+5+0`` or ``3*5+2``, has at least two digits. Raises CalculatorError if there is no expression."""
    expression = re.split(r"[^-+*0-9]", text)[-1]
    operators = re.findall(r"[-+*]", expression)
    if not operators:
        raise CalculatorError(f"expected an expression, got {expression!r}")
    width = 2 if len(operators) == 2 and operators[1] == "+" else 1
    return f"{calculate(expression):0{width}d}"
