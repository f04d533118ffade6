"""New weights that tests of updates send."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from support.checkpoints import SPECS, Spec, bfloat16_bits, random_tensors

SPEC = replace(SPECS["qwen2"], shards=1)
Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"  # of DeepSeek
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, np.ndarray]


def new_tensors(spec: Spec = SPEC, seed: int = 99) -> Tensors:
    return random_tensors(replace(spec, seed=seed))


def stored(array: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the tensor in the dtype of the checkpoint."""
    return bfloat16_bits(array) if spec.dtype == "bfloat16" else array


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()
