"""A trainer in a process of its own: publishes three states of torch or Paddle tensors. Prints a JSON line for each:
the publication, and the sha256 of each tensor in bfloat16, as the framework itself rounds it.

    python trainer_child.py (torch|paddle) URL
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.embedded_weights import embedded_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Sharded:
    """As a DTensor: a tensor that is whole only after ``full_tensor``."""

    def __init__(self, whole: Any):
        self._whole = whole
        self.dtype, self.shape = whole.dtype, whole.shape

    def detach(self) -> Any:
        raise AssertionError("a shard is not the tensor")

    def full_tensor(self) -> Any:
        return self._whole


def torch_states() -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield states (float32 and bfloat16, tied, sharded), and their bits in bfloat16."""
    import torch

    weights = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in embedded_weights().items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        state: dict[str, Any] = dict(weights)
        for i, (name, weight) in enumerate(weights.items()):
            if i % 3 == 1:
                state[name] = weight.detach().to(torch.bfloat16)
            elif i % 3 == 2:
                state[name] = Sharded(weight)
        state[HEAD] = state[EMBEDDING]
        yield state, {n: w.detach().to(torch.bfloat16).view(torch.int16).numpy() for n, w in weights.items()}
        with torch.no_grad():
            for weight in weights.values():
                weight *= 1 + 0.1 * (torch.rand(weight.shape, generator=generator) < 0.02)


def paddle_states() -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield states (float32 and bfloat16, tied), and their bits in bfloat16."""
    import paddle

    weights = {name: paddle.to_tensor(value) for name, value in embedded_weights().items()}
    rng = np.random.default_rng(1)
    for _ in range(3):
        rounded = {name: weight.astype("bfloat16") for name, weight in weights.items()}
        state = {name: (rounded if i % 2 else weights)[name] for i, name in enumerate(weights)}
        state[HEAD] = state[EMBEDDING].clone()
        yield state, {name: weight.numpy() for name, weight in rounded.items()}
        for name, weight in weights.items():
            weights[name] = weight * paddle.to_tensor(1 + 0.1 * (rng.random(weight.shape) < 0.02), "float32")


def main() -> None:
    framework, url = sys.argv[1:]
    with SyncRolloutClient(url) as client:
        for state, bits in {"torch": torch_states, "paddle": paddle_states}[framework]():
            done = client.publish(state)
            shas = {name: hashlib.sha256(np.ascontiguousarray(b).tobytes()).hexdigest() for name, b in bits.items()}
            print(json.dumps({"is_delta": done.is_delta, "nbytes": done.nbytes, "checksums": shas}), flush=True)


if __name__ == "__main__":
    main()
