"""Log probabilities in each mode, by the plain definition: of logits given, and of those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def _distribution(logits: np.ndarray, known: list[int], prompt_len: int, case: dict[str, Any]) -> np.ndarray:
    """log probabilities [V] in the case's mode, in double precision, by sorting the whole vocabulary."""
    x, mode, temperature = logits.astype(np.float64), case["mode"], case["temperature"]
    if mode == "raw" or (mode == "temperature" and temperature == 0):
        return _log_softmax(x)
    if mode == "temperature":
        return _log_softmax(x / temperature)
    counts = np.bincount(np.array(known[prompt_len:], int), minlength=len(x))
    seen = np.bincount(known, minlength=len(x)) > 0
    penalty = case["repetition_penalty"]
    x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    x = x - case["presence_penalty"] * (counts > 0) - case["frequency_penalty"] * counts
    x[list(case["banned"])] = -np.inf
    if temperature == 0:
        return _log_softmax(x)
    x = x / temperature
    best = np.argsort(-x, kind="stable")
    if 0 < case["top_k"] < len(x):
        x[best[case["top_k"] :]] = -np.inf
    p = np.exp(_log_softmax(x))
    before = p[best].cumsum() - p[best]
    x[best[before >= case["top_p"]]] = -np.inf
    x[p < case["min_p"] * p.max()] = -np.inf
    return _log_softmax(x)


def logprobs_of(case: dict[str, Any], logits: np.ndarray, top: int) -> np.ndarray:
    """Log probabilities [steps, 1 + top] of the token drawn and of the ``top`` best, from ``logits`` [steps, V].

    case: the fields that ``_distribution`` reads, ``ids``, and the length ``prompt`` of those before the first step."""
    found, ids, start = [], case["ids"], case["prompt"]
    for k, row in enumerate(logits):
        logprobs = _distribution(row, ids[: start + k], start, case)
        found.append([logprobs[ids[start + k]], *np.sort(logprobs)[::-1][:top]])
    return np.array(found)


def told(folder: Path, cases: list[dict[str, Any]], top: int) -> list[np.ndarray]:
    """``logprobs_of`` each case, from logits of transformers. Runs in the process of torch: see torch_process.py."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(case: dict[str, Any]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([case["ids"]])).logits[0, case["prompt"] - 1 : -1].numpy()

    return [logprobs_of(case, logits(case), top) for case in cases]
