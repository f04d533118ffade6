"""Generations of transformers with adapters of PEFT. Runs in the process of torch: see torch_process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.checkpoints import prompt


def adapted(folder: Path, adapter: Path) -> Any:
    """Return the model with the adapter, in float32, as PEFT loads them. Fails if PEFT does not use a tensor of the
    adapter, or misses one."""
    import torch
    from peft import PeftModel
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, adapter).eval()
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}
    used = {name.replace(".default", ""): t for name, t in model.state_dict().items() if ".lora_" in name}
    assert saved.keys() == used.keys(), saved.keys() ^ used.keys()
    assert all(torch.equal(tensor.float(), used[name].float()) for name, tensor in saved.items())
    return model


def adapted_greedy(folder: Path, adapter: Path, lengths: list[int], steps: int) -> dict[int, dict[str, np.ndarray]]:
    """Greedy tokens after ``prompt(length, vocab)``, by length: as torch_generation.greedy, with the adapter."""
    import torch

    model, found = adapted(folder, adapter), {}
    for length in lengths:
        ids, logprobs, margins, cache = [], [], [], None
        new = torch.tensor([prompt(length, model.config.vocab_size)])
        for _ in range(steps):
            with torch.inference_mode():
                out = model(input_ids=new, past_key_values=cache, use_cache=True)
            row, cache = out.logits[0, -1], out.past_key_values
            best = row.topk(2).values
            ids.append(int(row.argmax()))
            logprobs.append(float(row.log_softmax(-1)[ids[-1]]))
            margins.append(float(best[0] - best[1]))
            new = torch.tensor([[ids[-1]]])
        found[length] = {"ids": np.array(ids), "logprobs": np.array(logprobs), "margin": np.array(margins)}
    return found
