"""New weights that tests of updates send."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from fastdeploy.testing.checkpoints import Spec, random_tensors
from fastdeploy.testing.tensors import to_bfloat16
from support.specs import SPECS

SPEC = replace(SPECS["qwen2"], shards=1)
Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"  # of DeepSeek
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, np.ndarray]


def new_tensors(spec: Spec = SPEC, seed: int = 99) -> Tensors:
    return random_tensors(replace(spec, seed=seed))


def stored(array: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the tensor in the dtype of the checkpoint."""
    return to_bfloat16(array) if spec.dtype == "bfloat16" else array


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()
