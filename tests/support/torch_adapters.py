"""Generations of transformers with adapters of PEFT. Runs in the process of torch: see torch_process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.torch_continuations import Case, continued
from support.torch_generation import greedy_of


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
        saved = {name: file.get_tensor(name) for name in list(file.keys()) if not name.endswith(".base_layer.weight")}
    used = {name.replace(".default", ""): t for name, t in model.state_dict().items() if ".lora_" in name}
    assert saved.keys() == used.keys(), saved.keys() ^ used.keys()
    assert all(torch.equal(tensor.float(), used[name].float()) for name, tensor in saved.items())
    return model


def adapted_greedy(
    folder: Path, adapters: dict[str, Path], lengths: list[int], steps: int
) -> dict[str, dict[int, dict[str, np.ndarray]]]:
    """Greedy tokens after ``prompt(length, vocab)`` with each adapter, by adapter and length."""
    found = {}
    for name, at in adapters.items():
        model = adapted(folder, at)
        found[name] = {n: greedy_of(model, n, steps) for n in lengths}
    return found


def adapted_continuations(folder: Path, old: Path, new: Path, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    """As torch_continuations.continuations, for an adapter that is replaced by another one."""
    return continued(adapted(folder, old), adapted(folder, new), cases)


def adapted_prompt_logprobs(folder: Path, adapter: Path, ids: list[int]) -> np.ndarray:
    """Log probability of each token after the first, [len(ids) - 1]."""
    import torch

    with torch.inference_mode():
        logprobs = adapted(folder, adapter)(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def settings(folder: Path, configs: list[dict[str, Any]]) -> list[dict[str, tuple[int, float]]]:
    """Rank and scaling of each module that PEFT adapts, for each config."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    found = []
    for config in configs:
        fields = {key: value for key, value in config.items() if key != "peft_type"}
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**fields)).base_model.model
        modules = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
        found.append({name: (module.r["default"], module.scaling["default"]) for name, module in modules.items()})
    return found


def config_fields() -> dict[str, Any]:
    """The fields of adapter_config.json as PEFT writes them, with their defaults."""
    from peft import LoraConfig

    return {name: getattr(value, "value", value) for name, value in LoraConfig().to_dict().items()}


def save_adapter(folder: Path, config: dict[str, Any], to: Path) -> None:
    """Save an adapter with random A and B as PEFT does."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(**config))
    for name, tensor in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(to)


def adapted_text_logprobs(folder: Path, adapter: Path, texts: list[list[int]]) -> list[np.ndarray]:
    """Log probability of each token after the first of each text; of the model alone for ``adapter`` = ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter == folder
        else adapted(folder, adapter)
    )
    found = []
    for ids in texts:
        with torch.inference_mode():
            rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        found.append(rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy())
    return found
