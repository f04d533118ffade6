#!/usr/bin/env python
"""How far a trainer's log probabilities are from those of the server that sampled the tokens, with the same weights.

    python -m benchmarks.mismatch

The weights are those of the embedded model in float32, each moved a little, as a trainer moves them. So a server in
bfloat16 rounds them. Each server samples answers to the same problems at temperature 1. Then each trainer scores the
same tokens. Prints a Markdown table. With r = p(trainer) / p(server) of a sampled token:

    kl          mean of r - 1 - log r, which TRL's AsyncGRPOTrainer logs as ``kl`` (estimator k3 of
                http://joschu.net/blog/kl-approx.html)
    max |log r| the largest difference of two log probabilities
    r           the least and the largest

Needs ``pip install -e ".[trl]"``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.lib.report import json_flag, markdown, write_json
from examples.embedded_model import tokenizer
from examples.embedded_model.arithmetic import problems
from fastdeploy.bench.client import Client
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing import serve
from fastdeploy.testing.tensors import WEIGHTS, float32_tensors

MOVE = 3e-3  # of a weight, relative: about half a step of bfloat16, which is 3.9e-3 to 7.8e-3
BATCH = 32  # samples
DTYPES = ("float32", "bfloat16")
NAME = "moved"  # of the model, at the server
READY_S = 300.0


class Sample(NamedTuple):
    """Token ids of a prompt and of its answer, and the server's log probability of each token of the answer."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


def write_moved_weights(folder: Path) -> None:
    """Copy the embedded model to the new ``folder`` with float32 weights, each times 1 + MOVE * N(0, 1)."""
    shutil.copytree(MODEL_DIR, folder)
    rng = np.random.default_rng(0)
    weights = {
        name: array * (1 + MOVE * rng.standard_normal(array.shape))
        for name, array in float32_tensors(MODEL_DIR).items()
    }
    save_file({name: array.astype(np.float32) for name, array in weights.items()}, folder / WEIGHTS)


def batches(samples: Sequence[Sample]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids [B, T], padded with 0 at the end, and a mask [B, T]: True for a token of an answer."""
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        width = max(len(one.prompt) + len(one.answer) for one in batch)
        ids, answer = np.zeros((len(batch), width), np.int64), np.zeros((len(batch), width), bool)
        for row, one in enumerate(batch):
            end = len(one.prompt) + len(one.answer)
            ids[row, :end] = one.prompt + one.answer
            answer[row, len(one.prompt) : end] = True
        yield ids, answer


# A trainer imports its library when it is called. Each returns float32 [tokens of all answers], in the order of the
# samples, from the float32 weights of a checkpoint folder.


def by_trl(weights: str, autocast: bool, folder: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """Score with Transformers and with TRL's own head (``add_fused_lm_head``), which its trainers use.

    weights: dtype of the weights. autocast: multiply in bfloat16, as with ``bf16=True``, TRL's default."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights).eval()
    add_fused_lm_head(model, temperature=1.0)
    found = []
    for ids, answer in batches(samples):
        labels = np.where(answer, ids, -100)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            scored = model(torch.tensor(ids), labels=torch.tensor(labels), fused_lm_head=True).log_probs
        found.append(scored.float().numpy()[answer[:, 1:]])
    return np.concatenate(found)


def by_paddle(folder: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """Score with plain Paddle layers, in float32: Paddle has no bfloat16 product on a CPU."""
    import paddle

    from examples.embedded_model.model import ModelConfig, Qwen3

    settings = json.loads((folder / "config.json").read_text())
    config = ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)})
    model = Qwen3(config, {name: paddle.to_tensor(array) for name, array in load_file(folder / WEIGHTS).items()})
    found = []
    for ids, answer in batches(samples):
        with paddle.no_grad():
            scored = paddle.nn.functional.log_softmax(model.logits(paddle.to_tensor(ids))[:, :-1], -1)
        chosen = np.take_along_axis(scored.numpy(), ids[:, 1:, None], -1)[..., 0]
        found.append(chosen[answer[:, 1:]])
    return np.concatenate(found)


def by_scorer(folder: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """Score with ``fastdeploy.rl.scoring``. dtype: of the server."""
    from fastdeploy.rl.scoring import Scorer

    return Scorer(str(folder), dtype=dtype).logprobs([(one.prompt, one.answer) for one in samples]).numpy()


class Trainer(NamedTuple):
    """score: takes the folder, the samples, and the dtype of the server."""

    name: str
    library: Literal["torch", "paddle"]
    score: Callable[[Path, Sequence[Sample], str], np.ndarray]


TRAINERS = (
    Trainer("TRL and torch, float32", "torch", partial(by_trl, "float32", False)),
    Trainer("TRL and torch, float32 weights, bfloat16 products", "torch", partial(by_trl, "float32", True)),
    Trainer("TRL and torch, bfloat16", "torch", partial(by_trl, "bfloat16", False)),
    Trainer("plain Paddle layers, float32", "paddle", by_paddle),
    Trainer("`fastdeploy.rl.scoring`", "paddle", by_scorer),
)


@contextmanager
def library_processes() -> Iterator[dict[str, ProcessPoolExecutor]]:
    """Yield one process for each library: torch and Paddle do not live in the same process."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as torch, ProcessPoolExecutor(1, spawn) as paddle:
        yield {"torch": torch, "paddle": paddle}


async def sample(model: Path, dtype: str, count: int, group: int, max_tokens: int) -> list[Sample]:
    """Start a server, sample ``group`` answers to each of ``count`` problems, and stop the server."""
    prompts = [tokenizer.prompt_ids(problem, chat=True) for problem in problems(0, count) for _ in range(group)]
    body = {"model": NAME, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
    flags = ("--dtype", dtype, "--served-model-name", NAME, "--num-gpu-blocks-override", "2048")
    with serve(model, *flags, ready_s=READY_S) as server:
        client = Client(server.url)

        async def one(seed: int, prompt: list[int]) -> Sample:
            reply = await client.post("/v1/completions", {**body, "prompt": prompt, "seed": seed})
            choice = reply["choices"][0]
            return Sample(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

        return list(await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts))))


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
    json_flag(parser)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder, library_processes() as processes:
        model = Path(folder) / "model"
        write_moved_weights(model)
        for dtype in DTYPES:
            samples = asyncio.run(sample(model, dtype, args.problems, args.group, args.max_tokens))
            served = np.concatenate([one.logprobs for one in samples])
            for trainer in TRAINERS:
                scored = processes[trainer.library].submit(trainer.score, model, samples, dtype).result()
                rows.append({"server": dtype, "trainer": trainer.name, **difference(scored, served)})
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    write_json(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
