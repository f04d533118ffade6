#!/usr/bin/env python
"""The gain of routing replay: how far a trainer's log probabilities of a Mixture of Experts are from those of the
server that sampled the tokens, with the trainer's own routing and with that of the server.

    python -m benchmarks.routing_replay

The server samples in bfloat16 and returns the experts of each token. The trainers have its weights, and score the same
tokens. Prints a Markdown table:

    rows that differ     the share of tokens that the trainer computes with other experts, in any layer
    experts that differ  the same for single layers: the share of all tokens in all layers
    kl, max |log r|      see benchmarks/mismatch.py

Without ``--model`` the model is made by benchmarks/make_model.py: the shape ``moe`` with ``--layers`` layers and random
weights. Needs ``pip install -e ".[trl]"``.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks import make_model
from benchmarks.lib.report import json_flag, markdown, write_json
from benchmarks.mismatch import READY_S, difference, library_processes
from fastdeploy.rl.client import RolloutClient
from fastdeploy.testing import serve

VOCAB = 256  # prompts are of these ids


class Sample(NamedTuple):
    """Token ids of a prompt and of its answer, the server's log probability of each token of the answer, and the
    experts of all tokens but the last, [tokens - 1, experts layers, experts of a token]."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    experts: np.ndarray


class Scored(NamedTuple):
    """Log probabilities of all answers, float32, in the order of the samples; and the experts of each sample, or None
    if the trainer does not tell them."""

    logprobs: np.ndarray
    experts: list[np.ndarray] | None


def by_torch(dtype: str, folder: Path, samples: Sequence[Sample], replay: bool) -> Scored:
    """Score with Qwen3-MoE of Transformers. replay: each router takes the experts of the sample, with its own weights
    for them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    gates = [layer.mlp.gate for layer in model.model.layers]
    chosen: dict[int, torch.Tensor] = {}  # by place of the gate

    def route(place: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute what Qwen3MoeTopKRouter.forward returns, with the experts of ``chosen`` if there are any."""
        gate = gates[place]
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
        scores = logits.softmax(-1, dtype=torch.float32)
        if not replay:
            chosen[place] = scores.topk(gate.top_k).indices
        weights = scores.gather(1, chosen[place])
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen[place]

    for place, gate in enumerate(gates):
        gate.forward = partial(route, place)
    logprobs, experts = [], []
    for one in samples:
        if replay:
            chosen |= {place: torch.tensor(one.experts[:, place].astype(np.int64)) for place in range(len(gates))}
        with torch.no_grad():
            logits = model(torch.tensor([(one.prompt + one.answer)[:-1]])).logits[0, len(one.prompt) - 1 :]
        found = logits.float().log_softmax(-1).gather(1, torch.tensor(one.answer)[:, None])
        logprobs.append(found[:, 0].numpy())
        experts.append(np.stack([chosen[place].numpy() for place in range(len(gates))], 1))
    return Scored(np.concatenate(logprobs), experts)


def by_scorer(folder: Path, samples: Sequence[Sample], replay: bool) -> Scored:
    """Score with ``fastdeploy.rl.scoring``."""
    from fastdeploy.rl.scoring import Scorer

    routed = [one.experts for one in samples] if replay else None
    sequences = [(one.prompt, one.answer) for one in samples]
    return Scored(Scorer(str(folder), "bfloat16").logprobs(sequences, routed_experts=routed).numpy(), None)


class Trainer(NamedTuple):
    """score: takes the folder, the samples, and whether it replays their experts."""

    name: str
    library: Literal["torch", "paddle"]
    score: Callable[[Path, Sequence[Sample], bool], Scored]


TRAINERS = (
    Trainer("torch, float32", "torch", partial(by_torch, "float32")),
    Trainer("torch, bfloat16", "torch", partial(by_torch, "bfloat16")),
    Trainer("`fastdeploy.rl.scoring`", "paddle", by_scorer),
)


async def sample(model: Path, count: int, prompt_tokens: int, max_tokens: int) -> list[Sample]:
    """Start a server, sample an answer to each of ``count`` random prompts, and stop the server."""
    prompts = np.random.default_rng(0).integers(0, VOCAB, (count, prompt_tokens)).tolist()
    flags = ("--dtype", "bfloat16", "--enable-return-routed-experts", "--max-model-len", "2048")
    with serve(model, *flags, ready_s=READY_S) as server:
        async with RolloutClient(server.url) as client:

            async def one(seed: int, prompt: list[int]) -> Sample:
                params = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "routed_experts": True}
                rollout = await client.generate(prompt, params)
                assert rollout.logprobs is not None and rollout.routed_experts is not None
                return Sample(prompt, rollout.token_ids, rollout.logprobs, rollout.routed_experts.array().copy())

            return list(await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts))))


def differing(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the share of rows with other experts in any layer, and that of other experts over all rows and layers. The
    order of the experts does not matter."""
    pairs = zip(found, wanted, strict=True)
    other = np.concatenate([(np.sort(one) != np.sort(two)).any(-1) for one, two in pairs])
    return float(other.any(-1).mean()), float(other.mean())


def table(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        shares = ("-" if row[key] is None else f"{row[key]:.2%}" for key in ("rows_differ", "experts_differ"))
        routing = "of the server" if row["replay"] else "its own"
        cells.append((row["trainer"], routing, *shares, f"{row['kl']:.2g}", f"{row['max_abs']:.2g}"))
    header = ("trainer", "routing", "rows that differ", "experts that differ", "kl", "max \\|log r\\|")
    return markdown(header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Qwen3-MoE with experts in all layers")
    parser.add_argument("--layers", type=int, default=4, help="of the model that is made")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=96)
    json_flag(parser)
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as made, library_processes() as processes:
        model = args.model or Path(made)
        if args.model is None:
            make_model.main([made, "--shape", "moe", "--layers", str(args.layers)])
        samples = asyncio.run(sample(model, args.samples, args.prompt_tokens, args.max_tokens))
        served = np.concatenate([np.array(one.logprobs, np.float32) for one in samples])
        for trainer in TRAINERS:
            for replay in (False, True):
                scored = processes[trainer.library].submit(trainer.score, model, samples, replay).result()
                shares: tuple[float | None, float | None] = (None, None)
                if scored.experts is not None:
                    shares = differing(scored.experts, [one.experts for one in samples])
                found = {"rows_differ": shares[0], "experts_differ": shares[1], **difference(scored.logprobs, served)}
                rows.append({"trainer": trainer.name, "replay": replay, **found})
                print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    write_json(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
