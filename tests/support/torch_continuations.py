"""Generations of transformers whose weights change in the middle: the reference of the update tests.

A continuation is checked along the tokens that the engine chose. If each of them is the best at its position, greedy
decoding would have chosen the same. So a continuation costs one forward pass, not one per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A generation. The keys and values of the first ``old_kv`` tokens (prompt and output together) are computed by the
    old weights, all others by the new ones; the last ``new`` tokens are those that the new weights chose."""

    tokens: list[int]
    old_kv: int
    new: int


def continuations(old: Path, new: Path, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    """For the last ``case.new`` tokens of each case: ``best`` ids, ``logprobs`` of the tokens given. float32.
    Runs in the process of torch."""
    import torch
    from transformers import AutoModelForCausalLM

    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for folder in (old, new)
    )
    return continued(before, after, cases)


def continued(before: Any, after: Any, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    """As ``continuations``, of two models of torch."""
    import torch

    found = []
    for case in cases:
        tokens, cut = torch.tensor([case.tokens]), case.old_kv
        with torch.inference_mode():
            cache = before(input_ids=tokens[:, :cut], use_cache=True).past_key_values if cut else None
            out = after(input_ids=tokens[:, cut:-1], past_key_values=cache, use_cache=True)
        logits = out.logits[0, -case.new :]
        chosen = logits.log_softmax(-1).gather(1, tokens[0, -case.new :, None])[:, 0]
        found.append({"best": logits.argmax(-1).to(torch.int16).numpy(), "logprobs": chosen.numpy()})
    return found
