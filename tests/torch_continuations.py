"""What transformers makes of a generation whose weights change in the middle: the reference of the update tests.

Run as a subprocess (``continuations``), since Paddle and torch do not live in one process. A continuation is checked
along the tokens that the engine chose (if every one of them is the best of its position, greedy decoding would have
chosen the same), so that each costs one forward pass and not one per token.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A generation. The keys and values of the first ``old_kv`` tokens (prompt and output together) are computed by the
    old weights, all others by the new ones; the last ``len(new)`` tokens are those that the new weights chose."""

    tokens: list[int]
    old_kv: int
    new: int


def continuations(old: Path, new: Path, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    """For the last ``case.new`` tokens of each case: ``best`` ids, ``logprobs`` of the tokens given, ``margin`` between
    the best two logits. float32."""
    out = old.parent / f"continuations-{old.name}.npz"
    task = {"old": str(old), "new": str(new), "cases": [asdict(c) for c in cases], "out": str(out)}
    subprocess.run([sys.executable, __file__], input=json.dumps(task).encode(), check=True, timeout=300)
    arrays = np.load(out)
    return [{key: arrays[f"{i}.{key}"] for key in ("best", "logprobs", "margin")} for i in range(len(cases))]


def _main(task: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    old, new = (
        AutoModelForCausalLM.from_pretrained(task[name], dtype=torch.float32, attn_implementation="eager").eval()
        for name in ("old", "new")
    )
    arrays = {}
    for i, case in enumerate(task["cases"]):
        tokens, cut, count = torch.tensor([case["tokens"]]), case["old_kv"], case["new"]
        with torch.inference_mode():
            cache = old(tokens[:, :cut], use_cache=True).past_key_values if cut else None
            logits = new(tokens[:, cut:-1], past_key_values=cache, use_cache=True).logits[0, -count:]
        chosen = tokens[0, -count:, None]
        two = logits.topk(2).values
        arrays[f"{i}.best"] = logits.argmax(-1).numpy()
        arrays[f"{i}.logprobs"] = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        arrays[f"{i}.margin"] = (two[:, 0] - two[:, 1]).numpy()
    np.savez(task["out"], **arrays)


if __name__ == "__main__":
    _main(json.load(sys.stdin))
