#!/usr/bin/env python
"""Measure log probabilities with gradients (fastdeploy.rl.scoring), beside the same model in plain Paddle:

    python -m benchmarks.scoring [--model PATH] [--groups 4] [--samples 8]

The samples are random: ``--groups`` prompts, ``--samples`` outputs for each, of 60 to 300 tokens. Plain Paddle scores
the same padded micro-batches as the backward pass of the scorer. Both ways alternate, and each round gives one ratio.
CPU time is that of all threads of this process; other programs change it little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import paddle
import paddle.nn.functional as F

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.model_executor.models import build_model, load_config
from fastdeploy.model_executor.models.interface import Model
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.rl.scoring.backward import Backward, micro_batches, padded, without_strides
from fastdeploy.rl.scoring.decoder import Decoder, Leaf, leaf_of
from fastdeploy.rl.scoring.samples import Sample, checked_samples
from fastdeploy.rl.scoring.scorer import EngineForward, Packer, read_parameters

MAX_TOKENS, DTYPE = 1024, "bfloat16"
PROMPT, SHORTEST, LONGEST = 20, 60, 300  # tokens of a prompt and of an output


def random_samples(options: argparse.Namespace, vocab_size: int) -> list[Sample]:
    """Return the samples to score."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(options.groups):
        prompt = rng.integers(0, vocab_size, PROMPT)
        counts = rng.integers(SHORTEST, LONGEST + 1, options.samples)
        pairs += [(prompt, rng.integers(0, vocab_size, count)) for count in counts]
    return checked_samples(pairs, vocab_size, PROMPT + LONGEST)


def plain_forward(model: Model, decoder: Decoder, leaves: dict[str, Leaf], samples: list[Sample]) -> np.ndarray:
    """Return the log probabilities of plain Paddle, without gradients, in the order of the micro-batches."""
    found = []
    with paddle.no_grad(), without_strides():
        for batch in micro_batches(samples, MAX_TOKENS):
            ids, rows, targets = padded(batch)
            hidden = F.embedding(paddle.to_tensor(rows), decoder.hidden(leaves, paddle.to_tensor(ids)))
            logits = decoder.logits(leaves, hidden)
            found.append(-F.cross_entropy(logits, paddle.to_tensor(targets), reduction="none").numpy().reshape(-1))
    return np.concatenate(found)


def measured(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of each way in each round, after one round to warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            if round_number:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL_DIR))
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = load_config(options.model)
    model = build_model(config, get_ops(DTYPE), config.max_position_embeddings)
    snapshot = Packer(model).snapshot(read_parameters(options.model, model))
    samples = random_samples(options, config.vocab_size)
    decoder = Decoder(model, snapshot.packed)
    leaves = {parameter.key: leaf_of(parameter, snapshot.rounded) for parameter in model.parameters}
    engine, backward = EngineForward(model, 8192), Backward(model, decoder, MAX_TOKENS)
    upstream = np.ones(sum(sample.output for sample in samples), np.float32)

    def forward() -> None:
        engine.logprobs(snapshot.packed, samples, 1.0)

    def gradients() -> None:
        backward.gradients(snapshot.rounded, samples, 1.0, upstream)

    def both() -> None:
        forward()
        gradients()

    ways: dict[str, Callable[[], object]] = {
        "scorer, forward": forward,
        "scorer, forward and backward": both,
        "plain Paddle, forward": lambda: plain_forward(model, decoder, leaves, samples),
        "plain Paddle, forward and backward": gradients,
    }
    times = measured(ways, options.rounds)
    tokens = sum(len(sample.ids) for sample in samples)
    print(f"{options.model}, {DTYPE}: {len(samples)} samples, {tokens} tokens. ms per 10,000 tokens:")
    for name, rounds in times.items():
        wall, cpu = (median(column) / tokens * 1e7 for column in zip(*rounds, strict=True))
        print(f"  {name:36s} {wall:8.0f} wall {cpu:8.0f} CPU")
    for part in ("forward", "forward and backward"):
        pairs = zip(times[f"scorer, {part}"], times[f"plain Paddle, {part}"], strict=True)
        ratio = median(ours[1] / plain[1] for ours, plain in pairs)
        print(f"  {part}: scorer takes {ratio:.2f} times the CPU time of plain Paddle")


if __name__ == "__main__":
    main()
