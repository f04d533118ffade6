"""A sync of TRL, and the view of its trainer: TRL's VLLMClient samples, TRL's function computes the log probabilities
by the trainer's weights. Run by test_trl_sync.py in the environment of the frameworks; prints one line of JSON.

usage: trl_sync_child.py URL FOLDER      (FOLDER: the trainer's weights after a step)
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import trl.generation.vllm_client as module
from transformers import AutoModelForCausalLM
from trl.trainer.utils import selective_log_softmax

from fastdeploy.rl.frameworks.trl import FastDeployWeightTransfer

PROMPTS = [list(range(40, 60)), list(range(41, 55)), list(range(70, 78))]


def main(url: str, folder: str) -> dict[str, Any]:
    module.is_vllm_available = lambda: True  # read before the first request, and not used later
    client = module.VLLMClient(url)
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    transfer = FastDeployWeightTransfer(url)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights((name, value.detach()) for name, value in trainer.named_parameters())
    transfer.resume()
    answers = client.generate(PROMPTS, max_tokens=32, temperature=1.0, logprobs=0)
    mismatch = [
        (mine - torch.tensor(theirs).reshape(-1)).abs().max().item()
        for mine, theirs in zip(logprobs_of(trainer, answers), answers["logprobs"], strict=True)
    ]
    version = transfer.publications[-1].version
    transfer.destroy()
    return {"version": version, "mismatch": max(mismatch)}


@torch.no_grad()
def logprobs_of(trainer: Any, answers: dict[str, Any]) -> list[torch.Tensor]:
    """Return the trainer's log probabilities of the answers."""
    found = []
    for prompt, answer in zip(answers["prompt_ids"], answers["completion_ids"], strict=True):
        logits = trainer(torch.tensor([prompt + answer])).logits[:, len(prompt) - 1 : -1]
        found.append(selective_log_softmax(logits, torch.tensor([answer]))[0])
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
