"""Log probabilities in each mode as torch computes them. A process of its own, since Paddle and torch do not live in
one: ``python tests/torch_logprobs.py folder``, with task.json and logits.npz in it, writes reference.npz."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np


def _distribution(logits, known: list[int], prompt_len: int, case: dict):
    """log probabilities [V] in the case's mode, in double precision, by sorting the whole vocabulary."""
    import torch

    x, mode, temperature = logits.double(), case["mode"], case["temperature"]
    if mode == "raw" or (mode == "temperature" and temperature == 0):
        return x.log_softmax(-1)
    if mode == "temperature":
        return (x / temperature).log_softmax(-1)
    counts = torch.bincount(torch.tensor(known[prompt_len:], dtype=torch.long), minlength=len(x))
    seen = torch.bincount(torch.tensor(known), minlength=len(x)) > 0
    penalty = case["repetition_penalty"]
    x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    x = x - case["presence_penalty"] * (counts > 0) - case["frequency_penalty"] * counts
    x[list(case["banned"])] = -torch.inf
    if temperature == 0:
        return x.log_softmax(-1)
    x = x / temperature
    best = x.argsort(descending=True, stable=True)
    if 0 < case["top_k"] < len(x):
        x[best[case["top_k"] :]] = -torch.inf
    p = x.softmax(-1)
    before = p[best].cumsum(0) - p[best]
    x[best[before >= case["top_p"]]] = -torch.inf
    x[p < case["min_p"] * p.max()] = -torch.inf
    return x.log_softmax(-1)


def _main(at: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    task, given = json.loads((at / "task.json").read_text()), np.load(at / "logits.npz")
    model = AutoModelForCausalLM.from_pretrained(task["folder"], dtype=torch.float32, attn_implementation="eager")
    model.eval()
    arrays = {}
    for i, case in enumerate(task["cases"]):
        ids, start = case["ids"], case["prompt"]
        with torch.inference_mode():
            own = model(torch.tensor([ids])).logits[0, start - 1 : -1]
        sources = {"own": own} | ({"given": torch.tensor(given[str(i)])} if str(i) in given else {})
        for kind, rows in sources.items():
            told = []
            for k, row in enumerate(rows):
                logprobs = _distribution(row.clone(), ids[: start + k], start, case)
                told.append([logprobs[ids[start + k]], *logprobs.topk(task["top"]).values])
            arrays[f"{kind}.{i}"] = np.array(told, np.float64)
    np.savez(at / "reference.npz", **arrays)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
