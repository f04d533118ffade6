"""The committed checkpoint, served by the runner, answers as transformers says it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.embedded.arithmetic import problems
from fastdeploy.embedded.tokenizer import ASSISTANT_ID, END_ID, USER_ID
from step_driver import Driver, Sequence

CHILD = Path(__file__).parent.parent / "embedded" / "transformers_child.py"


def test_the_embedded_model_is_served_as_transformers_computes_it(make_runner):
    asked = [problem.prompt for problem in problems(seed=77, n=16)]
    task = {"task": "solve", "folder": str(MODEL_DIR), "prompts": asked, "chat": True, "max_tokens": 120}
    child = subprocess.run(
        [sys.executable, str(CHILD)], input=json.dumps(task), capture_output=True, text=True, check=True, timeout=110
    )
    wanted = json.loads(child.stdout.splitlines()[-1])["completions"]
    driver = Driver(make_runner(MODEL_DIR, num_blocks=256))
    sequences = [Sequence(p, [USER_ID, *p.encode(), ASSISTANT_ID]) for p in asked]
    driver.generate(sequences, 120)
    for sequence, completion in zip(sequences, wanted, strict=True):
        ids = sequence.output
        ids = ids[: ids.index(END_ID)] if END_ID in ids else ids
        assert bytes(ids).decode() == completion
