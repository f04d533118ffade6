"""The calculator computes what Python computes, and refuses everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.embedded_model import arithmetic
from examples.tool_rollout.calculator import MAX_CHARS, CalculatorError, calculate, step_result

NUMBERS = st.integers(0, 10**6)


@given(first=NUMBERS, rest=st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS), max_size=6))
def test_an_expression_has_the_value_that_python_gives_it(first, rest):
    expression = str(first) + "".join(f"{operator}{number}" for operator, number in rest)
    assert calculate(expression) == eval(expression)


def test_leading_zeros_are_allowed():
    assert calculate("007*010-0001") == 69


@given(text=st.text(alphabet="0123456789+-*/.() _e\n²٣", max_size=12))
def test_any_other_text_is_refused(text):
    try:
        value = calculate(text)
    except CalculatorError:
        return
    assert set(text) <= set("0123456789+-*") and text[0].isdigit() and text[-1].isdigit() and isinstance(value, int)


@pytest.mark.parametrize("text", ["", "+1", "1+", "1++2", "1*-2", "2**9", "(1)", "1 + 2", "1/2", "٣+1", "1\n"])
def test_these_are_no_expressions(text):
    with pytest.raises(CalculatorError, match="expected whole numbers"):
        calculate(text)


def test_an_expression_may_not_be_longer_than_the_limit():
    assert calculate("9" * MAX_CHARS) == int("9" * MAX_CHARS)
    with pytest.raises(CalculatorError, match="at most 64 characters, got 65"):
        calculate("9" * (MAX_CHARS + 1))


def test_the_results_are_written_as_in_every_solution_of_the_embedded_task():
    for problem in arithmetic.problems(seed=3, n=300):
        steps = problem.solution.split("=")
        for before, after in zip(steps, steps[1:], strict=False):
            assert after.startswith(step_result(before)), problem.solution
            assert not after.removeprefix(step_result(before))[:1].isdigit(), problem.solution


@pytest.mark.parametrize("text", ["", "12", "7+5+0=12>2;", "7+", "ab3"])
def test_a_call_without_an_expression_is_refused(text):
    with pytest.raises(CalculatorError):
        step_result(text)
