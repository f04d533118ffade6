"""The committed checkpoint, served by the runner, answers as transformers says it does."""

from __future__ import annotations

import pytest

from examples.embedded_model.arithmetic import problems
from examples.embedded_model.tokenizer import ASSISTANT_ID, END_ID, USER_ID
from fastdeploy.embedded import MODEL_DIR
from support.runner_ops import OPS, is_slow
from support.step_driver import Driver, Sequence
from support.torch_generation import solve
from support.torch_process import TorchProcess


@pytest.fixture(scope="module")
def wanted(torch_process: TorchProcess) -> dict[str, str]:
    """Answers of transformers, by question."""
    asked = [problem.prompt for problem in problems(seed=77, n=16)]
    answers = torch_process.run(solve, MODEL_DIR, asked, chat=True, max_tokens=120)["completions"]
    return dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("make_runner", [ops for ops in OPS if not is_slow(ops, "")], indirect=True)
def test_the_embedded_model_is_served_as_transformers_computes_it(make_runner, wanted):
    driver = Driver(make_runner(MODEL_DIR, num_blocks=256))
    sequences = [Sequence(p, [USER_ID, *p.encode(), ASSISTANT_ID]) for p in wanted]
    driver.generate(sequences, 120)
    for sequence, completion in zip(sequences, wanted.values(), strict=True):
        ids = sequence.output
        ids = ids[: ids.index(END_ID)] if END_ID in ids else ids
        assert bytes(ids).decode() == completion
