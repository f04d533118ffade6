"""Log probabilities of samples and their gradients, by transformers. Runs in the process of torch: see
torch_process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def scored(
    folder: Path, samples: list[tuple[list[int], list[int]]], upstream: list[float], temperature: float
) -> dict[str, Any]:
    """Return ``logprobs`` of all output tokens, and the ``gradients`` by parameter name of their sum with the weights
    ``upstream``. float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    parts = []
    for prompt, output in samples:
        logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1] / temperature
        parts.append(logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0])
    logprobs = torch.cat(parts)
    (logprobs * torch.tensor(upstream)).sum().backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return {"logprobs": logprobs.detach().numpy(), "gradients": {n: g.astype(np.float32) for n, g in gradients.items()}}
