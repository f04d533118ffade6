"""The committed checkpoint, served by the runner, answers as transformers says it does."""

from __future__ import annotations

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.embedded.arithmetic import problems
from fastdeploy.embedded.tokenizer import ASSISTANT_ID, END_ID, USER_ID
from step_driver import Driver, Sequence
from torch_generation import solve


def test_the_embedded_model_is_served_as_transformers_computes_it(make_runner, torch_process):
    asked = [problem.prompt for problem in problems(seed=77, n=16)]
    wanted = torch_process.run(solve, MODEL_DIR, asked, chat=True, max_tokens=120)["completions"]
    driver = Driver(make_runner(MODEL_DIR, num_blocks=256))
    sequences = [Sequence(p, [USER_ID, *p.encode(), ASSISTANT_ID]) for p in asked]
    driver.generate(sequences, 120)
    for sequence, completion in zip(sequences, wanted, strict=True):
        ids = sequence.output
        ids = ids[: ids.index(END_ID)] if END_ID in ids else ids
        assert bytes(ids).decode() == completion
