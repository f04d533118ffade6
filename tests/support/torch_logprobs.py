"""Log probabilities in each mode as torch computes them. Runs in the process of torch: see torch_process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def _distribution(logits, known: list[int], prompt_len: int, case: dict[str, Any]):
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


def told(
    folder: Path, cases: list[dict[str, Any]], top: int, given: dict[int, np.ndarray]
) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
    """Log probabilities of the token drawn and of the ``top`` best, [steps, 1 + top] per case: from the logits of
    transformers, and from the logits ``given`` [steps, V] by the case's number. A case has the fields that
    ``_distribution`` reads, ``ids`` and the length ``prompt`` of those before the first step."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def of_case(case: dict[str, Any], rows) -> np.ndarray:
        found, ids, start = [], case["ids"], case["prompt"]
        for k, row in enumerate(rows):
            logprobs = _distribution(row.clone(), ids[: start + k], start, case)
            found.append([logprobs[ids[start + k]], *logprobs.topk(top).values])
        return np.array(found, np.float64)

    own = []
    for case in cases:
        with torch.inference_mode():
            rows = model(torch.tensor([case["ids"]])).logits[0, case["prompt"] - 1 : -1]
        own.append(of_case(case, rows))
    return own, {i: of_case(cases[i], torch.tensor(rows)) for i, rows in given.items()}
