"""TRL's own GRPOTrainer trains the embedded model with a server's completions. Run by test_trl_sync.py.

usage: trl_sync_child.py URL STEPS
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from typing import Any

from examples.embedded_model.arithmetic import problems
from examples.trl_async_grpo import task
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.frameworks.trl import FastDeployGeneration


def main(url: str, steps: int) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=steps, num_generations=4, per_device_train_batch_size=8, learning_rate=1e-4,
            lr_scheduler_type="constant", max_completion_length=32, bf16=False, use_cpu=True, save_strategy="no",
            gradient_checkpointing=False, report_to="none", logging_steps=1, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=str(MODEL_DIR),
            args=config,
            train_dataset=Dataset.from_list([task.row(problem) for problem in problems(0, 32, "train")]),
            reward_funcs=task.solved,
            processing_class=AutoTokenizer.from_pretrained(MODEL_DIR),
        )
        generation = FastDeployGeneration(url)
        generation.attach(trainer).train()
        generation.sync_weights()
        generation.close()
    parameters = trainer.model.named_parameters()
    return {
        "log": trainer.state.log_history,
        "versions": [publication.version for publication in generation.publications],
        "sha256": {
            name: hashlib.sha256(p.detach().contiguous().numpy().tobytes()).hexdigest() for name, p in parameters
        },
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], int(sys.argv[2])), default=str))
