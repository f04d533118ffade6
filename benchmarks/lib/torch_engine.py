"""Another engine, for checks that need one with rounding of its own: transformers and torch, in bfloat16.

Torch and Paddle do not live in the same process, so this one runs in a process of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fastdeploy.core.serving_dtype import dtype_of

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class TorchEngine:
    """model: a folder with config.json. dtype: of weights and activations."""

    def __init__(self, model: Path, scratch: Path, pool: ProcessPoolExecutor, dtype: str):
        self._folder, self._pool, self._dtype = scratch, pool, dtype
        copyfile(model / CONFIG, scratch / CONFIG)

    def logprobs(self, tensors: Mapping[str, np.ndarray], prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the log probability of each token of the prompts from the second on, float64, in one array. tensors:
        by the names of the checkpoint; the prompts have one length."""
        save_file({name: np.ascontiguousarray(one) for name, one in tensors.items()}, self._folder / WEIGHTS)
        return self._pool.submit(_logprobs, self._folder, np.array(prompts), self._dtype).result()


@contextmanager
def torch_engine(model: Path, dtype: str = "bfloat16") -> Iterator[TorchEngine]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, tempfile.TemporaryDirectory() as scratch:
        yield TorchEngine(model, Path(scratch), pool, dtype)


def _logprobs(folder: Path, prompts: np.ndarray, dtype: str) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM, logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for name, value in model.named_buffers():  # kept in float32 by every engine
        if name.endswith("e_score_correction_bias"):
            value.data = value.data.float()
    ids = torch.tensor(prompts)
    with torch.no_grad():
        logits = model(ids).logits.float()
    found = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return found.double().numpy().ravel()


def serving_dtype(name: str) -> str:
    """Return the dtype of a tensor in an engine that serves bfloat16."""
    return dtype_of(name, "bfloat16")
