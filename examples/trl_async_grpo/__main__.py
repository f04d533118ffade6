"""Train the embedded model on arithmetic by TRL's unmodified AsyncGRPOTrainer. README.md has the commands.

Everything here is TRL's own use, but for three lines: ``without_gpu.install()`` lets TRL run on a CPU,
``vllm_server_base_url`` is the address of this project's server, and ``weight_transfer`` ships the weights to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from examples.embedded_model.arithmetic import problems
from examples.trl_async_grpo import task, without_gpu
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.trl_async_grpo", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8180", help="a server of the embedded model, with --dtype float32")
    add("--steps", type=int, default=20)
    add("--problems", type=int, default=512, help="to train on")
    add("--generations", type=int, default=8, help="samples of a problem")
    add("--batch", type=int, default=32, help="samples of a step")
    add("--max-tokens", type=int, default=128, help="of a sample")
    add("--learning-rate", type=float, default=1e-4)
    add("--lora-rank", type=int, default=0, metavar="R", help="train an adapter of this rank; 0: the whole model")
    add("--max-staleness", type=int, default=4, help="steps that a sample may be behind")
    add("--held-out", type=int, default=0, metavar="N", help="solve N other problems, before and after")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="write TRL's log, the publications, and a sha256 of each trained tensor")
    return parser.parse_args()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what --json writes."""
    without_gpu.install()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.response_template = task.RESPONSE_TEMPLATE
    rank = args.lora_rank
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None
    transfer = FastDeployWeightTransfer(args.url)
    with tempfile.TemporaryDirectory() as folder:
        config = AsyncGRPOConfig(
            output_dir=folder,
            vllm_server_base_url=args.url,
            max_steps=args.steps,
            num_generations=args.generations,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=1,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            max_completion_length=args.max_tokens,
            token_budget=0,  # samples are not packed into rows
            max_inflight_tasks=32,
            max_staleness=args.max_staleness,
            queue_maxsize=64,
            dtype="float32",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            seed=args.seed,
        )
        trainer = AsyncGRPOTrainer(
            model=str(MODEL_DIR),
            args=config,
            train_dataset=Dataset.from_list([task.row(p) for p in problems(args.seed, args.problems, "train")]),
            reward_funcs=task.solved,
            processing_class=tokenizer,
            weight_transfer=None if lora else transfer,  # TRL itself ships an adapter
            peft_config=lora,
        )
        trainer.train()
    parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    sha256 = {name: hashlib.sha256(p.detach().contiguous().numpy().tobytes()).hexdigest() for name, p in parameters}
    return {
        "log": trainer.state.log_history,
        "publications": [vars(p) for p in transfer.publications],
        "sha256": sha256,
    }


def main() -> None:
    args = parse()
    if args.held_out:
        print(f"held-out problems solved before: {task.accuracy(args.url, args.held_out):.1%}", flush=True)
    seen = train(args)
    for entry in seen["log"]:
        if "reward" in entry:
            shown = ("reward", "loss", "kl", "ratio", "sample/staleness_mean")
            print(f"step {entry['step']:4d}", *(f"{name} {entry[name]:.4g}" for name in shown if name in entry))
    if args.held_out:
        trained = f"trl-policy-v{args.steps + 1}" if args.lora_rank else None  # TRL's name of the last adapter
        print(f"held-out problems solved after: {task.accuracy(args.url, args.held_out, trained):.1%}")
    if args.json:
        Path(args.json).write_text(json.dumps(seen, default=str))


if __name__ == "__main__":
    main()
