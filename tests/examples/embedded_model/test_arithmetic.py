"""The arithmetic task: correct solutions, disjoint splits, and a strict verifier."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.embedded_model import arithmetic
from examples.embedded_model.arithmetic import Problem, is_correct, make_problem, problems, split_of

STEP = re.compile(r"([0-9+*-]+)=([0-9]+)")


def evaluate(expression: str) -> int:
    """Return the value of numbers joined by + - *; leading zeros allowed."""
    return eval(compile(ast.parse(re.sub(r"\b0+(?=\d)", "", expression), mode="eval"), "", "eval"))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_solution_is_true_in_each_step_and_accepted_by_the_verifier(split: str):
    for problem in problems(1, 2000, split):
        assert int(problem.answer) == evaluate(problem.prompt.rstrip("=")), problem
        for left, right in STEP.findall(problem.solution):
            assert evaluate(left) == int(right), (problem.prompt, left, right)
        assert is_correct(problem, problem.solution)
        partial = [int(found) for found in re.findall(r">(\d+)(?=$|\n|#)", problem.solution)]
        if partial and problem.kind != "sum":
            assert partial[-1] == int(problem.answer), problem


def test_the_documented_example_is_what_the_solver_writes():
    assert make_problem("add", 2, (347, 85)).solution == "7+5+0=12>2;4+8+1=13>32;3+0+1=04>432#432"


def test_heldout_and_training_problems_are_disjoint_for_every_seed():
    heldout = {p.prompt for seed in range(3) for p in problems(seed, 2000, "heldout")}
    training = {p.prompt for seed in range(3) for p in problems(seed, 8000, "train")}
    assert len(heldout) > 4000
    assert not heldout & training


@given(st.permutations([12, 7, 345, 88, 88]))
def test_swapping_the_operands_of_a_commuting_problem_does_not_move_it_to_the_other_split(operands: list[int]):
    assert split_of("sum", tuple(operands)) == split_of("sum", (7, 12, 88, 88, 345))


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert problems(3, 50) == problems(3, 80)[:50]
    assert problems(3, 50) != problems(4, 50)
    assert problems(3, 50, "train") != problems(3, 50, "heldout")


def test_both_splits_draw_from_the_same_mix_of_kinds_and_levels():
    for split in ("train", "heldout"):
        drawn = problems(7, 6000, split)
        kinds, levels = Counter(p.kind for p in drawn), Counter(p.level for p in drawn)
        assert all(abs(kinds[kind] / 6000 - 1 / len(arithmetic.KINDS)) < 0.03 for kind in arithmetic.KINDS)
        for level, weight in zip(arithmetic.LEVELS, arithmetic.LEVEL_WEIGHTS, strict=True):
            assert abs(levels[level] / 6000 - weight) < 0.03


def test_solutions_run_from_a_few_tokens_to_several_hundred():
    lengths = [len(p.solution) + 1 for p in problems(0, 2000)]
    assert min(lengths) <= 5
    assert max(lengths) > 300
    assert statistics.quantiles(lengths, n=10)[8] > 4 * statistics.quantiles(lengths, n=10)[0]


WRONG = {
    "nothing": "",
    "no final answer": "7+5+0=12>2;4+8+1=13>32;3+0+1=04>432",
    "a wrong answer": "#431",
    "the right answer, then a wrong one": "#432#431",
    "digits missing": "#43",
    "digits too many": "#4320",
    "a leading zero": "#0432",
    "text after the answer": "#432 or so",
    "the negative": "#-432",
    "the prompt repeated": "347+85=#",
}


@pytest.mark.parametrize("completion", WRONG.values(), ids=WRONG.keys())
def test_the_verifier_rejects_wrong_answers(completion: str):
    assert not is_correct(make_problem("add", 2, (347, 85)), completion)


def test_only_the_last_stated_answer_counts():
    assert is_correct(make_problem("add", 2, (347, 85)), "#431#432")


@given(st.integers(min_value=0, max_value=99_999))
def test_the_verifier_accepts_exactly_one_number(stated: int):
    problem: Problem = make_problem("mul", 3, (47, 86))
    assert is_correct(problem, f"so it is #{stated}\n") == (stated == 47 * 86)


def test_the_task_is_importable_without_paddle_or_torch():
    code = "import sys, examples.embedded_model.arithmetic; print({'paddle', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
