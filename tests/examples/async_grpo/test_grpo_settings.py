"""Settings, curriculum and checkpoints of the example trainer."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save

from examples.async_grpo.config import Settings, parse
from examples.async_grpo.learner import Learner
from examples.async_grpo.problems import Curriculum
from examples.embedded_model.arithmetic import split_of
from fastdeploy.core.errors import InvalidField


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sync", "sometimes"),
        ("--kv", "drop"),
        ("--group", "1"),
        ("--groups", "0"),
        ("--learning-rate", "-1"),
        ("--learning-rate", "fast"),
        ("--max-staleness", "-1"),
        ("--minutes", "0"),
        ("--max-ratio", "1.1"),
    ],
)
def test_a_bad_argument_is_named(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([option, value])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert option.removeprefix("--").replace("-", "_") in said.replace("-", "_")
    assert "expected" in said or "invalid" in said


def test_the_curriculum_draws_from_the_train_split_only():
    curriculum = Curriculum(0)
    drawn = [curriculum.draw()[0] for _ in range(200)]
    assert {split_of(problem.kind, problem.operands) for problem in drawn} == {"train"}


def test_the_curriculum_turns_to_what_is_solved_sometimes():
    curriculum = Curriculum(0)
    for _ in range(1000):
        problem, _ = curriculum.draw()
        curriculum.note(problem, 1.0 if problem.kind == "sum" else 0.5)
    kinds = [curriculum.draw()[0].kind for _ in range(400)]
    assert kinds.count("sum") < 400 / 4 / 2


@pytest.fixture(scope="module")
def learner():
    return Learner(Settings(kl_weight=0))


def test_a_checkpoint_gives_back_the_weights_and_the_position_in_the_data(tmp_path, learner):
    curriculum = Curriculum(3)
    curriculum.note(curriculum.draw()[0], 1.0)
    learner.save(tmp_path / "checkpoint", {"curriculum": curriculum.state()})
    saved = {name: value.numpy() for name, value in learner.scorer.parameters.items()}
    for value in learner.scorer.parameters.values():
        value.set_value(value + 1)
    other = Curriculum(4)
    other.restore(learner.load(tmp_path / "checkpoint")["curriculum"])
    assert [other.draw() for _ in range(5)] == [curriculum.draw() for _ in range(5)]
    for name, value in learner.scorer.parameters.items():
        np.testing.assert_array_equal(value.numpy(), saved[name], err_msg=name)


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", save({"other": np.zeros(1)}, {"position": "{}"})])
def test_a_checkpoint_that_cannot_be_used_is_refused(content, tmp_path, learner):
    path = tmp_path / "checkpoint"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidField, match="resume"):
        learner.load(path)
