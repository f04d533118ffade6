#!/usr/bin/env python
"""What --quantization int8 gains and costs, beside bfloat16 in the same run, without HTTP:

    python -m benchmarks.quantization                                                   # the embedded model
    python -m benchmarks.quantization --model ~/.cache/fastdeploy-peers/q05 --prompts 16

**Mismatch.** An engine with int8 samples answers at temperature 1. Two scorers (``fastdeploy.rl.scoring``) with the
same weights score these tokens: with int8, and in bfloat16, as a trainer without quantization does. ``kl`` and the
other figures are those of ``mismatch.py``. The embedded model gets problems of its task, any other random prompts.

**Time and memory.** Steps of two runners in turn, as in ``step.py``; an update from the model's folder while nothing
runs, until it can be committed; bytes of one set of packed linears. Medians. The ratio is bfloat16 / int8.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.report import json_flag, markdown, write_json
from benchmarks.lib.roofline import Shape
from benchmarks.mismatch import difference
from benchmarks.ops import BLOCK, measure
from benchmarks.step import make_steps
from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import problems
from fastdeploy import LLM, SamplingParams
from fastdeploy.bench.workload import prompt_ids
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.scoring import Scorer
from fastdeploy.worker.model_runner import ModelRunner

QUANTIZATIONS = (None, "int8")
CONTEXT, CHUNK = 64, 512  # tokens behind a sequence that decodes; of a prefill


def name_of(quantization: str | None) -> str:
    return quantization or "bfloat16"


def mismatch_rows(model: Path, prompts: Sequence[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    """Sample one answer to each prompt with int8. Return the figures of each scorer."""
    params = [SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=0, seed=i) for i in range(len(prompts))]
    with LLM(str(model), dtype="bfloat16", quantization="int8") as llm:
        choices = [output.outputs[0] for output in llm.generate(prompts, params)]
    samples = [(prompt, choice.token_ids) for prompt, choice in zip(prompts, choices, strict=True)]
    served = np.array([one for choice in choices for one in choice.token_logprobs], np.float32)
    found = []
    for quantization in QUANTIZATIONS:
        scored = Scorer(str(model), "bfloat16", quantization=quantization).logprobs(samples).numpy()
        found.append({"scorer": name_of(quantization), **difference(scored, served)})
    return found


def runner_of(model: Path, quantization: str | None, running: Sequence[int]) -> ModelRunner:
    longest = max(CONTEXT + 1, CHUNK)
    blocks = (max(running) + 1) * -(-longest // BLOCK)
    settings: dict[str, Any] = {"num_blocks": blocks, "max_model_len": longest, "standby_weights": "off"}
    return ModelRunner(str(model), "bfloat16", BLOCK, quantization=quantization, **settings)


def update_seconds(runner: ModelRunner, model: Path) -> float:
    """Stage the weights of the folder, and return the seconds until they can be committed."""
    started = time.perf_counter()
    staging = runner.begin_update(partial=False)
    staging.add(FolderSource(str(model)), {})
    staging.finish()
    seconds = time.perf_counter() - started
    staging.abandon()
    return seconds


def cost_rows(model: Path, running: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return time and memory of both, each with the ratio of the two."""
    runners = {quantization: runner_of(model, quantization, running) for quantization in QUANTIZATIONS}
    options = argparse.Namespace(running=running, adapters=[], context=CONTEXT, chunk=CHUNK, rank=0)
    steps = make_steps(options, Shape.of(model), -(-max(CONTEXT + 1, CHUNK) // BLOCK))
    calls: dict[str, Callable[[], object]] = {}
    for quantization, runner in runners.items():
        for name, step in steps.items():
            runner.execute(step.plan)
            calls[f"{name} {quantization}"] = partial(runner.execute, step.repeated())
    timings = measure(calls, repeats)
    found = {f"{name}, ms": {q: timings[f"{name} {q}"].median * 1e3 for q in QUANTIZATIONS} for name in steps}
    updates = {q: [update_seconds(runner, model) for _ in range(3)] for q, runner in runners.items()}
    found["update, ms"] = {q: float(np.median(seconds)) * 1e3 for q, seconds in updates.items()}
    found["packed linears, MB"] = {q: runner.weights.nbytes / 1e6 for q, runner in runners.items() if runner.weights}
    return [
        {"what": what, "bfloat16": of[None], "int8": of["int8"], "ratio": of[None] / of["int8"]}
        for what, of in found.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=MODEL_DIR)
    add("--prompts", type=int, default=256, help="each with one answer; 0 = no mismatch")
    add("--max-tokens", type=int, default=64, help="of an answer")
    add("--running", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32], help="decoding sequences")
    add("--repeats", type=int, default=9, help="of each step; 0 = neither time nor memory")
    json_flag(parser)
    args = parser.parse_args(argv)
    if args.model == MODEL_DIR:
        prompts = [tokenizer.prompt_ids(problem, chat=True) for problem in problems(0, args.prompts)]
    else:
        prompts = [prompt_ids("quantization", number, 32) for number in range(args.prompts)]
    mismatch = mismatch_rows(args.model, prompts, args.max_tokens) if prompts else []
    header = ("scorer", "tokens", "of these differ", "kl", "max \\|log r\\|", "r")
    cells = [
        (row["scorer"], row["tokens"], f"{row['differ'] / row['tokens']:.0%}", f"{row['kl']:.2g}",
         f"{row['max_abs']:.2g}", f"{row['ratio_min']:.4g} to {row['ratio_max']:.4g}")
        for row in mismatch
    ]  # fmt: skip
    print(markdown(header, cells))
    costs = cost_rows(args.model, args.running, args.repeats) if args.repeats else []
    table = [(row["what"], f"{row['bfloat16']:.1f}", f"{row['int8']:.1f}", f"{row['ratio']:.2f}") for row in costs]
    print(markdown(("what", "bfloat16", "int8", "ratio"), table))
    write_json(args, {"mismatch": mismatch, "costs": costs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
