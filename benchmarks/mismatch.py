#!/usr/bin/env python
"""How far a trainer's log probabilities are from those of the server that sampled the tokens, with the same weights.

    python -m benchmarks.mismatch
    python -m benchmarks.mismatch --vllm       # vLLM too, if benchmarks/peers/vllm.sh has installed it

The weights are those of the embedded model in float32, each moved a little, as a trainer moves them. So a server in
bfloat16 rounds them. Every server samples answers to the same problems at temperature 1. Then each trainer scores the
same tokens. Prints a Markdown table. With r = p(trainer) / p(server) of a sampled token:

    kl          mean of r - 1 - log r, which TRL's AsyncGRPOTrainer logs as ``kl`` (estimator k3 of
                http://joschu.net/blog/kl-approx.html)
    max |log r| the largest difference of two log probabilities
    r           the least and the largest; TRL logs the mean as ``ratio``

Needs ``pip install -e ".[trl]"``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.client import Client
from benchmarks.lib.engines import Engine, vllm
from benchmarks.lib.processes import started
from benchmarks.lib.report import json_flag, markdown, write_json
from benchmarks.lib.trainers import TRAINERS, Sample, write_moved_weights
from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import problems
from fastdeploy.embedded import MODEL_DIR

DTYPES = ("float32", "bfloat16")
NAME = "moved"  # of the model, at the server
READY_S = 300.0


def fastdeploy(model: Path) -> Engine:
    command = (sys.executable, "-m", "fastdeploy.entrypoints.cli", "serve", "--model", str(model))
    return Engine(
        "FastDeploy", "", (*command, "--served-model-name", NAME, "--num-gpu-blocks-override", "2048"), "/ready"
    )


async def sample(engine: Engine, dtype: str, count: int, group: int, max_tokens: int) -> list[Sample]:
    """Start a server, sample ``group`` answers to each of ``count`` problems, and stop the server."""
    prompts = [tokenizer.prompt_ids(problem, chat=True) for problem in problems(0, count) for _ in range(group)]
    body = {"model": NAME, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    with started((*engine.command, "--dtype", dtype)) as server:
        await server.wait_ready(READY_S, engine.ready)
        client = Client(server.url)

        async def one(seed: int, prompt: list[int]) -> Sample:
            reply = await client.post("/v1/completions", {**body, "prompt": prompt, "seed": seed})
            choice = reply["choices"][0]
            return Sample(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

        return list(await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts))))


@contextmanager
def workers() -> Iterator[dict[str, ProcessPoolExecutor]]:
    """Give a process for each library, since torch and Paddle do not live in one process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as torch, ProcessPoolExecutor(1, get_context("spawn")) as paddle:
        yield {"torch": torch, "paddle": paddle}


def difference(trainer: np.ndarray, server: np.ndarray) -> dict[str, float]:
    """Return the figures of the table. trainer, server: log probabilities [tokens] of the same tokens."""
    log_ratio = trainer.astype(np.float64) - server
    ratio = np.exp(log_ratio)
    return {
        "tokens": len(ratio),
        "differ": int((log_ratio != 0).sum()),
        "kl": float((ratio - 1 - log_ratio).mean()),
        "max_abs": float(np.abs(log_ratio).max()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "ratio_mean": float(ratio.mean()),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        share, bounds = row["differ"] / row["tokens"], f"{row['ratio_min']:.4g} to {row['ratio_max']:.4g}"
        figures = f"{share:.0%}", f"{row['kl']:.2g}", f"{row['max_abs']:.2g}", bounds
        cells.append((row["server"], row["trainer"], row["tokens"], *figures))
    return markdown(("server", "trainer", "tokens", "of these differ", "kl", "max \\|log r\\|", "r"), cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--group", type=int, default=4, help="answers to each problem")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--vllm", action="store_true", help="let vLLM sample too")
    json_flag(parser)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder, workers() as pools:
        model = Path(folder) / "model"
        pools["paddle"].submit(write_moved_weights, MODEL_DIR, model).result()
        engines = [fastdeploy(model), *([vllm(model, NAME)] if args.vllm else [])]
        for engine, dtype in product(engines, DTYPES):
            samples = asyncio.run(sample(engine, dtype, args.problems, args.group, args.max_tokens))
            served = np.concatenate([one.logprobs for one in samples])
            for trainer in TRAINERS:
                scored = pools[trainer.library].submit(trainer.score, model, samples, dtype).result()
                rows.append(
                    {"server": f"{engine.name}, {dtype}", "trainer": trainer.name, **difference(scored, served)}
                )
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    write_json(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
