"""Run by tests in a process of its own, since torch must not share one with Paddle.

stdin: JSON {"folder", "task", ...}; stdout: one JSON reply. Tasks:
    "solve":    prompts [str], chat bool, max_tokens   -> {"completions": [str], "lengths": [int], "ended": [bool]}
    "logits":   ids [int], path of an .npy to write    -> {"names": [str], "dtype": str}
    "tokenize": texts [str], chats [messages]          -> {"ids": [...], "decoded": [...], "chat_ids": [...]}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def solve(folder: str, prompts: list[str], chat: bool, max_tokens: int, batch: int = 50) -> dict[str, Any]:
    """Greedy completions. Batches follow the order given: neighbours should be of like length."""
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


def logits(folder: str, ids: list[int], path: str) -> dict[str, Any]:
    """Write the float32 logits [T, V] of one sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    dtype = str(model.dtype)
    with torch.no_grad():
        np.save(path, model.float()(torch.tensor([ids])).logits[0].numpy())
    return {"dtype": dtype, "class": type(model).__name__}


def tokenize(folder: str, texts: list[str], chats: list[list[dict[str, str]]]) -> dict[str, Any]:
    """Ids and back for plain texts, and the chat template's ids with the generation prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    chat_ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    special = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "size": len(tokenizer)}
    return {"ids": ids, "decoded": [tokenizer.decode(i) for i in ids], "chat_ids": chat_ids, **special}


if __name__ == "__main__":
    torch.set_num_threads(1)  # steps are too small to share
    request = json.load(sys.stdin)
    print(json.dumps({"solve": solve, "logits": logits, "tokenize": tokenize}[request.pop("task")](**request)))
