#!/usr/bin/env python
"""Train the embedded model on arithmetic by TRL's unmodified AsyncGRPOTrainer, with rollouts from a running server.

    fastdeploy serve --dtype float32 --port 8180
    python benchmarks/trl_async_grpo.py --url http://127.0.0.1:8180 --steps 20

With --lora-rank, TRL trains an adapter with PEFT, and ships it by itself: no class of this project takes part.

Needs ``pip install -e ".[trl]"``. The trainer runs on the CPU (see trl_cpu/). Prints the reward of each step and the
time of each sync; --json writes both, with the checksums of the trained weights. For an adapter, --json also writes the
logprobs of one text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import trl_cpu
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.embedded.arithmetic import is_correct, make_problem, problems
from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer

# The form of an answer in the embedded model's chat template: all is content, up to the end token.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close_pattern": r"<\|end\|>\s*", "content": "text"}},
}

TEXT = b"<12+34=46> 7*8 is 56, and 9-4 is 5."  # one token per byte


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8180")
    add("--steps", type=int, default=20)
    add("--problems", type=int, default=512)
    add("--generations", type=int, default=8, help="samples per problem")
    add("--batch", type=int, default=32, help="samples per step")
    add("--max-tokens", type=int, default=128)
    add("--learning-rate", type=float, default=1e-4)
    add("--lora-rank", type=int, default=0, metavar="R", help="train an adapter of this rank; 0 = the full weights")
    add("--max-staleness", type=int, default=4, help="policies that a sample may be behind")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="write everything seen")
    return parser.parse_args()


def solved(completions: list[list[dict[str, str]]], kind: list[str], level: list[int], operands: list[list[int]],
           **_: Any) -> list[float]:  # fmt: skip
    """Return the reward of each completion: 1 for the right answer, else 0."""
    tasks = zip(completions, kind, level, operands, strict=True)
    return [float(is_correct(make_problem(k, n, tuple(o)), c[-1]["content"])) for c, k, n, o in tasks]


class TimedTransfer(FastDeployWeightTransfer):
    """FastDeployWeightTransfer that also records the time of each sync."""

    def __init__(self, url: str):
        super().__init__(url)
        self.seconds: list[dict[str, float]] = []
        self._began = 0.0

    def pause(self) -> None:
        self._began = time.perf_counter()
        super().pause()
        self.seconds.append({"pause": time.perf_counter() - self._began})

    def send_weights(self, iterator: Any) -> None:
        began = time.perf_counter()
        super().send_weights(iterator)
        self.seconds[-1]["send"] = time.perf_counter() - began

    def resume(self) -> None:
        super().resume()
        self.seconds[-1].setdefault("total", time.perf_counter() - self._began)


def train(args: argparse.Namespace) -> dict[str, Any]:
    trl_cpu.install()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    rows = [
        {
            "prompt": [{"role": "user", "content": p.prompt}],
            "kind": p.kind,
            "level": p.level,
            "operands": list(p.operands),
        }
        for p in problems(args.seed, args.problems, "train")
    ]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.response_template = RESPONSE_TEMPLATE
    transfer = None if args.lora_rank else TimedTransfer(args.url)
    with tempfile.TemporaryDirectory() as folder:
        config = AsyncGRPOConfig(
            output_dir=folder,
            max_steps=args.steps,
            num_generations=args.generations,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=1,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            max_completion_length=args.max_tokens,
            token_budget=0,
            max_inflight_tasks=32,
            max_staleness=args.max_staleness,
            queue_maxsize=64,
            vllm_server_base_url=args.url,
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
            train_dataset=Dataset.from_list(rows),
            reward_funcs=solved,
            processing_class=tokenizer,
            weight_transfer=transfer,
            peft_config=adapter_config(args.lora_rank),
        )
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model)
        seen = adapter_seen(model, f"{folder}/trained") if args.lora_rank else {}
    publications = [] if transfer is None else transfer.publications
    return {
        "log": trainer.state.log_history,
        "publications": [vars(p) | {"reports": [r.result for r in p.reports]} for p in publications],
        "sync_seconds": [] if transfer is None else transfer.seconds,
        "sha256": {
            name: hashlib.sha256(p.detach().contiguous().numpy().tobytes()).hexdigest()
            for name, p in model.named_parameters()
        },
    } | seen


def adapter_config(rank: int) -> Any:
    """Return the settings of the adapter to train, or None for rank 0."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def adapter_seen(model: Any, folder: str) -> dict[str, Any]:
    """Return the token ids of TEXT, and the logprob of each but the first, by the trained adapter and by the base model
    alone. Both are computed by Transformers and PEFT from the adapter as saved in ``folder``."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="float32")
    ids = torch.tensor([list(TEXT)])

    def logprobs(model: Any) -> list[float]:
        with torch.no_grad():
            rows = model(ids).logits[0, :-1].log_softmax(-1)
        return rows.gather(-1, ids[0, 1:, None])[:, 0].tolist()

    of_base = logprobs(base)
    return {"text": list(TEXT), "base_logprobs": of_base, "logprobs": logprobs(PeftModel.from_pretrained(base, folder))}


def main() -> int:
    args = parse()
    seen = train(args)
    for entry in seen["log"]:
        shown = {key: round(value, 4) for key, value in entry.items() if "reward" in key or key in ("loss", "step")}
        print(shown)
    for seconds in seen["sync_seconds"]:
        print("sync:", {name: round(value, 3) for name, value in seconds.items()})
    if args.json:
        Path(args.json).write_text(json.dumps(seen, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
