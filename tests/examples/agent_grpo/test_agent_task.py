"""The agent's problems, its calculator, its start policy, and the samples of its sessions."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from examples.agent_grpo.calculator import TOOLS, call
from examples.agent_grpo.problems import draw
from examples.agent_grpo.start_policy import START_POLICY, TOO_MUCH, documents, habit, skill
from examples.agent_grpo.task import sample_of
from fastdeploy.rl.sessions import SessionRow

NUMBERS = st.integers(0, 10**6)


@given(st.integers(0, 10**6), st.sampled_from(["train", "heldout"]))
def test_the_steps_of_a_problem_lead_to_its_answer_and_no_question_is_in_both_splits(seed, split):
    problem = draw(random.Random(seed), split)
    assert int(problem.answer) == eval(problem.question) >= 0
    for step, result in zip(problem.steps, problem.results, strict=True):
        assert call("calculator", json.dumps({"expression": step})) == result
    assert problem.is_solved_by(f" {problem.answer}\n") and not problem.is_solved_by(problem.answer + "0")
    other = "train" if split == "heldout" else "heldout"
    assert problem.question not in {draw(random.Random(i), other).question for i in range(20)}


@given(a=NUMBERS, sign=st.sampled_from("+-*"), b=NUMBERS)
def test_one_operation_has_the_value_that_python_gives_it(a, sign, b):
    expression = f"{a}{sign}{b}"
    assert call("calculator", json.dumps({"expression": expression})) == str(eval(f"{a} {sign} {b}"))


@pytest.mark.parametrize(
    ("name", "arguments", "reply"),
    [
        ("calculator", '{"expression": "1+2+3"}', TOO_MUCH),
        ("calculator", '{"expression": "9**9"}', TOO_MUCH),
        ("calculator", '{"expression": "٣+1"}', TOO_MUCH),
        ("calculator", '{"expression": 7}', "error: bad arguments"),
        ("calculator", "[1]", "error: bad arguments"),
        ("calculator", '{"expr', "error: bad arguments"),
        ("other", '{"expression": "1+2"}', "error: no such tool"),
    ],
)
def test_any_other_call_gets_an_error(name, arguments, reply):
    assert call(name, arguments) == reply


@pytest.mark.parametrize("conversation", [skill, habit])
def test_the_texts_of_the_start_policy_are_those_of_its_chat_template(conversation):
    words = AutoTokenizer.from_pretrained(str(START_POLICY))
    made = documents(3, conversation, lambda text: words.encode(text, add_special_tokens=False))
    for _ in range(50):
        ids, weights = next(made)
        parts = words.decode(ids).removeprefix("<|system|>calculator(expression)").split("<|user|>")[1:]
        messages = []
        for part in parts:
            user, _, model = part.removesuffix("<|end|>").partition("<|assistant|>")
            if user.startswith("<tool_response>"):
                user = user.removeprefix("<tool_response>").removesuffix("</tool_response>")
            messages.append({"role": "tool" if messages else "user", "content": user})
            if model.startswith("<tool_call>"):
                function = json.loads(model.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})
            else:
                messages.append({"role": "assistant", "content": model})
        text = words.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        assert words.encode(text, add_special_tokens=False) == ids and len(weights) == len(ids)


def test_the_start_policy_is_small():
    assert sum(file.stat().st_size for file in Path(START_POLICY).iterdir()) < 2.1e6


def test_a_sample_has_the_sampled_tokens_that_no_earlier_row_has():
    def turn(start: int, end: int, *spans: tuple[str, int, int]) -> dict:
        versions = [{"version": version, "start": a, "end": b} for version, a, b in spans]
        return {"start": start, "end": end, "weight_versions": versions}

    turns = [turn(2, 4, ("1", 2, 4)), turn(5, 8, ("1", 5, 6), ("2", 6, 8))]
    row = SessionRow(list(range(8)), [0, 0, 1, 1, 0, 1, 1, 1], [0, 0, -1.0, -2.0, 0, -3.0, -4.0, -5.0], 0, turns)
    sample = sample_of(row)
    assert (sample.prompt_ids, sample.token_ids) == ([0, 1], [2, 3, 4, 5, 6, 7])
    assert sample.sampled.tolist() == [True, True, False, True, True, True]
    assert sample.logprobs.tolist() == [-1, -2, -3, -4, -5] and sample.publications.tolist() == [1, 1, 1, 2, 2]
    later = sample_of(SessionRow(row.token_ids, row.loss_mask, row.logprobs, 5, turns))
    assert later.sampled.tolist() == [False, False, False, True, True, True]
    assert later.logprobs.tolist() == [-3, -4, -5] and later.publications.tolist() == [1, 2, 2]
