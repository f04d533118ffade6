"""Generation, logits and token ids of transformers. Runs in the process of torch: see torch_process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from support.specs import prompt


def solve(folder: Path, prompts: list[str], chat: bool, max_tokens: int, batch: int = 50) -> dict[str, list[Any]]:
    """Greedy ``completions``, their ``lengths``, and which of them ``ended``. Batches follow the order given:
    neighbours should be of like length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    completions, lengths, ended = [], [], []
    for start in range(0, len(prompts), batch):
        texts = prompts[start : start + batch]
        if chat:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": t}], add_generation_prompt=True, tokenize=False
                )
                for t in texts
            ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        outputs = model.generate(**inputs, max_new_tokens=max_tokens)[:, inputs["input_ids"].shape[1] :]
        for row in outputs.tolist():
            done = tokenizer.eos_token_id in row
            row = row[: row.index(tokenizer.eos_token_id)] if done else row
            completions.append(tokenizer.decode(row))
            lengths.append(len(row) + done)
            ended.append(done)
    return {"completions": completions, "lengths": lengths, "ended": ended}


def logits(folder: Path, ids: list[int]) -> tuple[str, str, np.ndarray]:
    """The model's class, the type of its weights, and the float32 logits [T, V] of one sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    dtype = str(model.dtype)
    with torch.inference_mode():
        return type(model).__name__, dtype, model.float()(torch.tensor([ids])).logits[0].numpy()


def tokenize(folder: Path, texts: list[str], chats: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Ids and back for plain texts, and the chat template's ids with the generation prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    chat_ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    special = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "size": len(tokenizer)}
    return {"ids": ids, "decoded": [tokenizer.decode(i) for i in ids], "chat_ids": chat_ids, **special}


def save(folder: Path, to: Path) -> None:
    """Save the model as transformers does, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(to)


def greedy(folder: Path, lengths: list[int], steps: int) -> dict[int, dict[str, np.ndarray]]:
    """Greedy tokens in float32 after ``prompt(length, vocab)``, by length: ``ids`` [steps], ``logprobs``
    [steps] of these ids, ``margin`` [steps] between the best two logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return {length: greedy_of(model, length, steps) for length in lengths}


def greedy_of(model: Any, length: int, steps: int) -> dict[str, np.ndarray]:
    """Return the greedy tokens of a torch model after ``prompt(length, vocab)``: ``ids`` [steps], ``logprobs`` [steps]
    of these ids, ``margin`` [steps] between the best two logits."""
    import torch

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
    return {"ids": np.array(ids), "logprobs": np.array(logprobs), "margin": np.array(margins)}


def state_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of the model, by its name in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
