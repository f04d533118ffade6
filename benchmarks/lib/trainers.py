"""Log probabilities of sampled tokens as trainers compute them, for ``mismatch.py``.

Each trainer imports its library when it is called, since torch and Paddle do not live in one process. All return
float32 [total output tokens], in the order of the samples, from the float32 weights of a checkpoint folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

MOVE = 3e-3  # of a weight, relative: about half a step of bfloat16, which is 3.9e-3 to 7.8e-3
BATCH = 32  # samples


class Sample(NamedTuple):
    """Token ids of a prompt and of its answer, and the server's log probability of each token of the answer."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]


def write_moved_weights(source: Path, target: Path) -> None:
    """Copy a checkpoint to the new folder ``target`` with float32 weights, each times 1 + MOVE * N(0, 1)."""
    from safetensors.numpy import save_file

    shutil.copytree(source, target)
    rng = np.random.default_rng(0)
    weights = {name: array * (1 + MOVE * rng.standard_normal(array.shape)) for name, array in read(source).items()}
    save_file({name: array.astype(np.float32) for name, array in weights.items()}, target / "model.safetensors")


def read(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint of one file as float32 arrays."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="paddle") as file:
        return {name: file.get_tensor(name).astype("float32").numpy() for name in file.keys()}  # noqa: SIM118


def batches(samples: Sequence[Sample]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ids [B, T], padded with 0 at the end, and a mask [B, T]: True for a token of an answer."""
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        width = max(len(one.prompt) + len(one.answer) for one in batch)
        ids, answer = np.zeros((len(batch), width), np.int64), np.zeros((len(batch), width), bool)
        for row, one in enumerate(batch):
            end = len(one.prompt) + len(one.answer)
            ids[row, :end] = one.prompt + one.answer
            answer[row, len(one.prompt) : end] = True
        yield ids, answer


def by_trl(weights: str, autocast: bool, folder: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """Score with Transformers and with TRL's own head (``add_fused_lm_head``), which its trainers use.

    weights: dtype of the weights. autocast: multiply in bfloat16, as with ``bf16=True``, TRL's default."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights).eval()
    add_fused_lm_head(model, temperature=1.0)
    found = []
    for ids, answer in batches(samples):
        labels = np.where(answer, ids, -100)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            scored = model(torch.tensor(ids), labels=torch.tensor(labels), fused_lm_head=True).log_probs
        found.append(scored.float().numpy()[answer[:, 1:]])
    return np.concatenate(found)


def by_paddle(folder: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """Score with plain Paddle layers, in float32: Paddle has no bfloat16 product on a CPU."""
    import json
    from dataclasses import fields

    import paddle

    from examples.embedded_model.model import ModelConfig, Qwen3

    settings = json.loads((folder / "config.json").read_text())
    config = ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)})
    model = Qwen3(config, {name: paddle.to_tensor(array) for name, array in read(folder).items()})
    found = []
    for ids, answer in batches(samples):
        with paddle.no_grad():
            scored = paddle.nn.functional.log_softmax(model.logits(paddle.to_tensor(ids))[:, :-1], -1)
        chosen = np.take_along_axis(scored.numpy(), ids[:, 1:, None], -1)[..., 0]
        found.append(chosen[answer[:, 1:]])
    return np.concatenate(found)


def by_scorer(folder: Path, samples: Sequence[Sample], dtype: str) -> np.ndarray:
    """Score with ``fastdeploy.rl.scoring``. dtype: of the server."""
    from fastdeploy.rl.scoring import Scorer

    return Scorer(str(folder), dtype=dtype).logprobs([(one.prompt, one.answer) for one in samples]).numpy()


class Trainer(NamedTuple):
    """score: takes the folder, the samples, and the dtype of the server."""

    name: str
    library: Literal["torch", "paddle"]
    score: Callable[[Path, Sequence[Sample], str], np.ndarray]


TRAINERS = (
    Trainer("TRL and torch, float32", "torch", partial(by_trl, "float32", False)),
    Trainer("TRL and torch, float32 weights, bfloat16 products", "torch", partial(by_trl, "float32", True)),
    Trainer("TRL and torch, bfloat16", "torch", partial(by_trl, "bfloat16", False)),
    Trainer("plain Paddle layers, float32", "paddle", by_paddle),
    Trainer("`fastdeploy.rl.scoring`", "paddle", by_scorer),
)
